/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts of UCX, the connections of their workers, and what moves on them. Needs
 * sl_ucx_load first. Functions return 0 or -errno unless they say otherwise, and may be
 * called from any thread.
 *
 * A worker is UCX's "serialized": a caller into it holds its lock, once for a
 * whole batch. Its own thread moves it when no other does.
 */
#ifndef SLUICE_UCX_H
#define SLUICE_UCX_H

#include "../ring.h"
#include "../sluice.h"

#define SL_UCX_CONTROL_MAX 4096
#define SL_UCX_NOTIF_MAX 4096
#define SL_UCX_READ_ONLY 1

/* Outcomes beside UCX's own, which are above -101. */
enum {
	SL_UCX_ABORTED = -1001,
	SL_UCX_REVOKED = -1002,
	SL_UCX_CLOSED = -1003,
	SL_UCX_LOST = -1004,
	SL_UCX_DENIED = -1005, /* a write to what is read-only */
	SL_UCX_RANGE = -1006,
	SL_UCX_FAULT = -1007 /* memory that its own process cannot read, or cannot write to */
};

struct sl_ucx_config {
	const char *transports, *devices; /* UCX_TLS, UCX_NET_DEVICES; NULL: UCX's own choice */
	const char *const *settings;	  /* name, value, name, value, NULL; or NULL */
	uint32_t workers;
	uint32_t batches; /* of a worker, a power of two */
	uint32_t notifs;	  /* messages to one peer that it has not received */
	uint64_t spin_ns;    /* how long a thread looks before it sleeps */
	uint64_t grace_ns;   /* how old a message may be that lands unasked */
	int wake_fd, control_fd; /* eventfds of the caller's */
};

struct sl_ucx_context;
struct sl_ucx_conn;

/* why is the reason of a failure in words, cut at size. */
int sl_ucx_open(const struct sl_ucx_config *c, struct sl_ucx_context **out, char *why, size_t size);

/*
 * Ends threads, connections and memory. The rings stay until free. -ETIMEDOUT: a connection was not
 * closed, or UCX holds messages of one still, so the context stays, at rest. A later call tries
 * again.
 */
int sl_ucx_close(struct sl_ucx_context *c, uint64_t grace_ns);
void sl_ucx_free(struct sl_ucx_context *c);

struct sl_ring *sl_ucx_ring(struct sl_ucx_context *c, uint32_t worker);

/* The address of a worker, constant until sl_ucx_close. */
const void *sl_ucx_address(struct sl_ucx_context *c, uint32_t worker, size_t *len);

/*
 * Two words of the memory's provider: how many writes are under way, and the phase of what moves
 * its pages (0: nothing does, 2: it moves them). NULL: its pages are never moved.
 */
struct sl_ucx_landings {
	int64_t *inside;
	int32_t *phase;
};

/* What messages may reach of a memory, in order; n of 0: all. Stays until sl_ucx_revoke is 0. */
struct sl_ucx_only {
	const struct sl_ucx_extent {
		uint64_t off, len;
	} *ranges;
	uint64_t n;
};

/*
 * Makes memory known under a key of the caller's. Messages of peers reach it with the
 * ticket.
 */
int sl_ucx_map(struct sl_ucx_context *c, uint32_t key, void *base, uint64_t len, uint32_t flags,
	       uint64_t ticket, struct sl_ucx_landings landings, struct sl_ucx_only only);

/*
 * Ends the memory of a key: no message is admitted to it from now on, whatever it returns. 0:
 * nothing of ours works on the memory any more, and the key may be mapped again. -ETIMEDOUT: within
 * so many ns a thread of ours that works on some memory has not let go of it, as where its pages do
 * not come; call it again. It may run beside sl_ucx_close, and until sl_ucx_free.
 */
int sl_ucx_revoke(struct sl_ucx_context *c, uint32_t key, uint64_t ns);

/* How many messages UCX has not yet put into the peer's queue. For tests. */
uint32_t sl_ucx_sends(struct sl_ucx_conn *n);

/* The clock by which threads judge peers and messages: CLOCK_MONOTONIC, unless a test moved it. */
uint64_t sl_ucx_now(void);
/*
 * Moves the clock of all contexts on, and has the workers of this one look at once for what is late
 * by it. For tests.
 */
void sl_ucx_elapse(struct sl_ucx_context *c, uint64_t ns);

/* Makes our end of a connection; does not wait for the other. */
int sl_ucx_connect(struct sl_ucx_context *c, uint32_t worker, const void *address,
		   struct sl_ucx_conn **out);
uint64_t sl_ucx_id(struct sl_ucx_conn *n);

/* The other end, and the grace of its context, are known. */
void sl_ucx_bind(struct sl_ucx_conn *n, uint64_t peer, uint64_t grace_ns);

/* Sends a control message. -EPIPE lost, -EBADF ended, -EAGAIN the peer does not take them. */
int sl_ucx_control(struct sl_ucx_conn *n, const uint8_t *data, size_t len);

/* Text of what UCX chose, cut at size. */
void sl_ucx_lanes(struct sl_ucx_conn *n, char *text, size_t size);

/* A peer's memory. */
int sl_ucx_import(struct sl_ucx_conn *n, uint32_t key, uint64_t size, uint64_t ticket,
		  uint32_t flags, uint32_t *slot);
void sl_ucx_drop(struct sl_ucx_conn *n, uint32_t slot);

/*
 * Starts a batch: all of it or nothing. 0, or errno in the low 16 bits and the piece
 * above: EAGAIN no place for a batch or a message, ERANGE an unknown key or beyond its memory,
 * EROFS, EPIPE lost, EBADF ended. notif NULL: no message.
 */
int64_t sl_ucx_submit(struct sl_ucx_conn *n, int write, uint64_t tag, const struct sl_desc *d,
		      size_t count, const uint8_t *notif, size_t notif_len);

int64_t sl_ucx_submit_pages(struct sl_ucx_conn *n, int write, uint64_t tag,
			    const struct sl_pages *p, const struct sl_nest *nest,
			    const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
			    size_t notif_len);

/* Sends a notification without a batch. -EAGAIN no room now; -EPIPE lost, -EBADF ended. */
int sl_ucx_notify(struct sl_ucx_conn *n, const uint8_t *data, size_t len);

void sl_ucx_cancel(struct sl_ucx_conn *n, uint64_t tag);

/* What a helper did. */
#define SL_UCX_HELPED 1 /* something, and what ended by it woke no sleeper: the caller polls */
#define SL_UCX_AGAIN 2	/* and there may be more to do */

/*
 * Moves the worker for a moment while the peer serves a batch. 0: there was nothing to do.
 */
int sl_ucx_help(struct sl_ucx_conn *n, uint64_t tag);

/*
 * Moves the workers that no thread has in hand, in the caller, which looks for completions and
 * messages without pause: their threads stand back meanwhile. sl_ucx_undrive when the
 * caller goes to sleep.
 */
void sl_ucx_drive(struct sl_ucx_context *c);
void sl_ucx_undrive(struct sl_ucx_context *c);

/*
 * No submissions from now on; what has not begun ends with SL_UCX_CLOSED. Waits for the
 * rest. -ETIMEDOUT: some is still under way; -EPIPE: and the peer has been silent for so long that
 * sl_ucx_end needs not wait.
 */
int sl_ucx_drain(struct sl_ucx_conn *n, uint64_t grace_ns);

/*
 * All batches end with this outcome, and messages that still arrive are ignored. A write whose
 * bytes may be on their way ends once the other end would ask before it lands them; at once where
 * the other end is proven to be over: it has said so, or its process is dead.
 */
void sl_ucx_end(struct sl_ucx_conn *n, int32_t status, int proven);

/*
 * How long ago the peer said anything, and for how long something waits for it. Both are 0 where it
 * is lost or not bound yet, and the first where nothing waits and its next ping is not late.
 */
void sl_ucx_silence(struct sl_ucx_conn *n, uint64_t *heard_ns, uint64_t *waited_ns);

/* The peer is lost for its silence. */
void sl_ucx_give_up(struct sl_ucx_conn *n);

/* Ends it, waits for its batches, and gives it back; n is gone. */
void sl_ucx_disconnect(struct sl_ucx_conn *n, uint64_t grace_ns);

/* A control message that arrived. */
struct sl_ucx_arrived_control {
	uint64_t conn;
	uint32_t worker, len;
	int lost; /* the peer was given up; no data. 2: and its end is over */
};

/* Takes one, with at most SL_UCX_CONTROL_MAX bytes. 0: there is none. Only one thread at a time. */
int sl_ucx_take_control(struct sl_ucx_context *c, struct sl_ucx_arrived_control *out,
			uint8_t *data);

/*
 * Takes the first message with data of a worker, of first_len bytes: the ring says whether there is
 * one. Returns whose end it was sent to. Only one thread at a time.
 */
uint64_t sl_ucx_take_notification(struct sl_ucx_context *c, uint32_t worker, uint8_t *data);

#endif
