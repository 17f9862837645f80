/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Contexts of UCX, the connections of their workers, and the batches on these. sl_ucx_load must
 * have succeeded. Functions return 0 or -errno unless they say otherwise, and may be called from
 * any thread.
 *
 * A worker is one of UCX, in mode "serialized": each call into it is made under the worker's lock,
 * which is taken once for a whole batch. To step a worker is to let UCX progress and to send some
 * of the batches. The worker's own thread steps it while no caller does.
 */
#ifndef SLUICE_UCX_H
#define SLUICE_UCX_H

#include "../ring.h"
#include "../sluice.h"

#define SL_UCX_CONTROL_MAX 4096
#define SL_UCX_NOTIF_MAX 4096
#define SL_UCX_READ_ONLY 1

/* Outcomes of batches that are not UCX's; those are above -101. */
enum {
	SL_UCX_ABORTED = -1001,
	SL_UCX_REVOKED = -1002,
	SL_UCX_CLOSED = -1003,
	SL_UCX_LOST = -1004,
	SL_UCX_DENIED = -1005, /* a write to read-only memory */
	SL_UCX_RANGE = -1006,  /* beyond the memory */
	SL_UCX_FAULT = -1007 /* memory that its own process cannot read, or cannot write to */
};

struct sl_ucx_config {
	const char *transports, *devices; /* UCX_TLS, UCX_NET_DEVICES; NULL: UCX's own choice */
	const char *const *settings;	  /* name, value, name, value, NULL; or NULL */
	uint32_t workers;
	uint32_t batches; /* most of a worker at a time, a power of two */
	uint32_t notifs;  /* most notifications to one peer that its program has not received */
	uint64_t spin_ns;  /* how long a worker's thread polls before it sleeps */
	uint64_t grace_ns; /* older messages land only after the peer has confirmed them */
	int wake_fd;	   /* eventfd: completions and notifications, while armed */
	int control_fd;	   /* eventfd: control messages */
};

struct sl_ucx_context;
struct sl_ucx_conn;

/* On failure why is the reason in words, of at most size bytes. */
int sl_ucx_open(const struct sl_ucx_config *c, struct sl_ucx_context **out, char *why, size_t size);

/*
 * Ends threads, connections and memory. The rings stay until sl_ucx_free. -ETIMEDOUT: a connection
 * was not closed, or UCX holds messages of one still, so the context stays, at rest. A later call
 * tries again.
 */
int sl_ucx_close(struct sl_ucx_context *c, uint64_t grace_ns);
void sl_ucx_free(struct sl_ucx_context *c);

struct sl_ring *sl_ucx_ring(struct sl_ucx_context *c, uint32_t worker);

/* The address of a worker, constant until sl_ucx_close. */
const void *sl_ucx_address(struct sl_ucx_context *c, uint32_t worker, size_t *len);

/*
 * Two words by which C and the provider of memory exclude each other (package internal/hostmem):
 * inside counts the writes into the memory; phase is 1 while the provider waits until none is
 * inside, 2 while it replaces pages, and else 0. Both NULL: pages are never replaced.
 */
struct sl_ucx_landings {
	int64_t *inside;
	int32_t *phase;
};

/*
 * The ranges of a memory that messages may reach, in order; n of 0: all of it. The caller keeps
 * them until sl_ucx_revoke has returned 0.
 */
struct sl_ucx_only {
	const struct sl_ucx_extent {
		uint64_t off, len;
	} *ranges;
	uint64_t n;
};

/* Registers memory under a key that the caller chooses. Messages reach it by the ticket. */
int sl_ucx_map(struct sl_ucx_context *c, uint32_t key, void *base, uint64_t len, uint32_t flags,
	       uint64_t ticket, struct sl_ucx_landings landings, struct sl_ucx_only only);

/*
 * Ends the memory of a key. Whatever it returns, no message is admitted to it from now on. 0: no
 * thread of this process accesses the memory any more, and the key may be mapped again. -ETIMEDOUT:
 * a worker's lock was not free within ns, since its thread accesses some memory whose pages do not
 * come: call it again. It may run beside sl_ucx_close, and until sl_ucx_free.
 */
int sl_ucx_revoke(struct sl_ucx_context *c, uint32_t key, uint64_t ns);

/* How many messages of a connection UCX has not sent yet. For tests. */
uint32_t sl_ucx_sends(struct sl_ucx_conn *n);

/* The clock by which threads judge peers and messages: CLOCK_MONOTONIC, unless a test moved it. */
uint64_t sl_ucx_now(void);
/* Moves that clock on, and has the workers of this context look at once what is late. For tests. */
void sl_ucx_elapse(struct sl_ucx_context *c, uint64_t ns);

/* Makes our end of a connection. It does not wait for the other end. */
int sl_ucx_connect(struct sl_ucx_context *c, uint32_t worker, const void *address,
		   struct sl_ucx_conn **out);
uint64_t sl_ucx_id(struct sl_ucx_conn *n);

/* Tells C the id of the other end, and the grace of its context. */
void sl_ucx_bind(struct sl_ucx_conn *n, uint64_t peer, uint64_t grace_ns);

/* Sends a control message. -EPIPE: lost; -EBADF: ended; -EAGAIN: the peer receives none now. */
int sl_ucx_control(struct sl_ucx_conn *n, const uint8_t *data, size_t len);

/* Describes the transports that UCX chose for a connection, in at most size bytes. */
void sl_ucx_lanes(struct sl_ucx_conn *n, char *text, size_t size);

/* Makes a peer's memory known to a connection: batches name it by slot. */
int sl_ucx_import(struct sl_ucx_conn *n, uint32_t key, uint64_t size, uint64_t ticket,
		  uint32_t flags, uint32_t *slot);
void sl_ucx_drop(struct sl_ucx_conn *n, uint32_t slot);

/*
 * Starts a batch of count descriptors or, where p is not NULL, of a pattern with its lists (see
 * sluice.h): all of it or nothing. Returns 0, or an errno in the low 16 bits and the piece above
 * them. EAGAIN: no room for the batch or the notification; ERANGE: an unknown key, or beyond its
 * memory; EROFS: a write to read-only memory; EPIPE: lost; EBADF: ended. notif NULL: none.
 */
int64_t sl_ucx_submit(struct sl_ucx_conn *n, int write, uint64_t tag, const struct sl_desc *d,
		      size_t count, const struct sl_pages *p, const struct sl_nest *nest,
		      const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
		      size_t notif_len);

/* Sends a notification without a batch. -EAGAIN: no room now; -EPIPE: lost; -EBADF: ended. */
int sl_ucx_notify(struct sl_ucx_conn *n, const uint8_t *data, size_t len);

void sl_ucx_cancel(struct sl_ucx_conn *n, uint64_t tag);

/* The result of sl_ucx_help. */
#define SL_UCX_HELPED 1 /* it did something; batches that ended woke no poller, so poll now */
#define SL_UCX_AGAIN 2	/* the batch has not ended: there may be more to do */

/*
 * Steps the worker for a moment, or once, for a caller that waits for a batch. 0: nothing was to
 * do.
 */
int sl_ucx_help(struct sl_ucx_conn *n, uint64_t tag, int once);

/*
 * A caller that polls for completions and messages without pause calls sl_ucx_drive each time: it
 * steps each worker whose lock is free, and the workers' threads pause meanwhile. Before the caller
 * sleeps it calls sl_ucx_undrive, and they go on.
 */
void sl_ucx_drive(struct sl_ucx_context *c);
void sl_ucx_undrive(struct sl_ucx_context *c);

/*
 * Accepts no submissions from now on. Batches of which nothing was sent end with SL_UCX_CLOSED, and
 * it waits for the others. -ETIMEDOUT: some have not ended; -EPIPE: nor have they, but the peer has
 * been silent for so long that sl_ucx_end ends them at once.
 */
int sl_ucx_drain(struct sl_ucx_conn *n, uint64_t grace_ns);

/*
 * Ends all batches with this outcome, and ignores messages that still arrive. A write whose bytes
 * may be on their way ends later: when they are so old that the other end would ask before it lands
 * them. proven: the other end has said that it is over, or its process is dead; then all end now.
 */
void sl_ucx_end(struct sl_ucx_conn *n, int32_t status, int proven);

/*
 * heard_ns: the time since the peer's last message. waited_ns: the time for which something has
 * been waiting for the peer. Both are 0 for a connection that is lost or not bound yet; heard_ns is
 * 0 also while nothing waits and the peer's next ping is not late.
 */
void sl_ucx_silence(struct sl_ucx_conn *n, uint64_t *heard_ns, uint64_t *waited_ns);

/* Declares a silent peer lost. */
void sl_ucx_give_up(struct sl_ucx_conn *n);

/* Ends a connection, waits for its batches, and frees it: n is invalid afterwards. */
void sl_ucx_disconnect(struct sl_ucx_conn *n, uint64_t grace_ns);

/* A control message that arrived. */
struct sl_ucx_arrived_control {
	uint64_t conn;
	uint32_t worker, len;
	int lost; /* 1: no message, the peer is lost; 2: and its end is proven to be over */
};

/*
 * Takes a control message, of at most SL_UCX_CONTROL_MAX bytes. 0: there is none. Only one thread
 * at a time.
 */
int sl_ucx_take_control(struct sl_ucx_context *c, struct sl_ucx_arrived_control *out,
			uint8_t *data);

/*
 * Takes the first notification of a worker. The ring says whether there is one, and its length,
 * first_len. Returns the id of the connection. Only one thread at a time.
 */
uint64_t sl_ucx_take_notification(struct sl_ucx_context *c, uint32_t worker, uint8_t *data);

#endif
