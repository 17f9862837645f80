/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMA verbs: rails, memory on them, and connections that move bytes over reliable
 * queue pairs. Needs sl_verbs_load first. Functions return 0 or -errno unless they say
 * otherwise, and may be called from any thread.
 *
 * One lock guards a context; a caller holds it, once for a whole batch. A thread of
 * its own takes completions when no other does, and sleeps on the completion channels.
 *
 * What is agreed between the two ends of a connection (queue pairs, keys, what was seen) is
 * carried by the caller, over a channel of its own.
 */
#ifndef SLUICE_VERBS_H
#define SLUICE_VERBS_H

#include "../ring.h"
#include "../sluice.h"

#define SL_VERBS_RAILS 16 /* of a context */
#define SL_VERBS_PAIRS 16 /* of a connection */
#define SL_VERBS_NOTIF_MAX 4096

enum {
	SL_VERBS_READ_ONLY = 1,
	SL_VERBS_RELAXED = 2 /* PCIe may reorder writes of the NIC, where it can */
};

/* Outcomes beside those of completions (enum ibv_wc_status, above 0). */
enum {
	SL_VERBS_ABORTED = -1001,
	SL_VERBS_REVOKED = -1002,
	SL_VERBS_CLOSED = -1003,
	SL_VERBS_LOST = -1004,
	/* The same, and the peer may still take something that was posted. */
	SL_VERBS_CLOSED_UNPROVEN = -1005,
	SL_VERBS_LOST_UNPROVEN = -1006
};

struct sl_verbs_config {
	uint32_t batches; /* submitted and not polled; a power of two */
	uint32_t notifs;	  /* messages of one connection on their way or not received */
	/* connections that may receive, so many receives are posted at most */
	uint32_t conns;
	uint32_t depth;	  /* work requests under way on a queue pair */
	uint64_t slice;	  /* bytes of one work request */
	uint64_t flight;  /* bytes under way on a queue pair: what a cancel waits for */
	uint64_t spin_ns; /* how long the thread looks before it sleeps */
	/*
	 * a queue pair over which nothing comes back for so long has failed; 0: it may take for
	 * ever
	 */
	uint64_t stall_ns;
	int wake_fd, control_fd; /* eventfds of the caller's */
};

struct sl_verbs_rail_config {
	const char *device;
	uint8_t port, gid;
	uint8_t mtu;	 /* enum ibv_mtu at most; 0: the port's */
	uint8_t timeout; /* of an acknowledgement: 4.096 us << timeout */
	uint8_t retries; /* 0 to 6 */
	uint8_t level, traffic_class; /* service level; of the global route */
	/* of local memory in one request at most; 0: as many as the device takes */
	uint16_t entries;
};

/* What a rail can do. */
struct sl_verbs_rail {
	/* reads: under way at a time, as initiator and target */
	uint32_t depth_max, sge_max, inline_max, reads;
	uint8_t mtu, state, link_layer, dmabuf;
	uint16_t lid;
	uint8_t gid[16];
};

/* Counted since the rail was opened. */
struct sl_verbs_counters {
	uint64_t bytes_out, bytes_in; /* by writes, by reads; those that were acknowledged */
	uint64_t requests;
	/*
	 * requests that were posted once more, on this rail or on others, after they failed on this
	 */
	uint64_t again;
	uint64_t failures; /* of its queue pairs */
	uint64_t in_flight; /* bytes, now */
};

/* One end of a queue pair, as the other end needs it. */
struct sl_verbs_end {
	uint32_t queue_pair, packet; /* numbers; packet: the first one */
	uint16_t lid;
	uint8_t mtu, reads, link_layer;
	uint8_t gid[16];
};

/* Memory of a device, by a file descriptor, which stays open until unpin; fd -1: by its address. */
struct sl_verbs_dmabuf {
	int fd;
	uint64_t offset;
};

struct sl_verbs_context;
struct sl_verbs_pin;
struct sl_verbs_conn;

int sl_verbs_open(const struct sl_verbs_config *c, struct sl_verbs_context **out);
/* Ends all connections, memory and rails. The ring stays until free. */
int sl_verbs_close(struct sl_verbs_context *c); /* -errno: a device keeps a queue pair */
void sl_verbs_free(struct sl_verbs_context *c);
struct sl_ring *sl_verbs_ring(struct sl_verbs_context *c);

/* Opens a port of a device. why is the reason of a failure in words, cut at size. */
int sl_verbs_rail_open(struct sl_verbs_context *c, const struct sl_verbs_rail_config *r,
		       uint32_t *rail, char *why, size_t size);
int sl_verbs_rail_info(struct sl_verbs_context *c, uint32_t rail, struct sl_verbs_rail *out);
int sl_verbs_rail_counters(struct sl_verbs_context *c, uint32_t rail,
			   struct sl_verbs_counters *out);

/*
 * Pins a range for local use on a rail: registered with the rights of the NIC to write to it
 * unless READ_ONLY. May take long, and holds no lock: call it for several rails at once.
 */
int sl_verbs_pin(struct sl_verbs_context *c, uint32_t rail, void *base, uint64_t len,
		 uint32_t flags, const struct sl_verbs_dmabuf *d, struct sl_verbs_pin **out);
int sl_verbs_unpin(struct sl_verbs_pin *p); /* -EBUSY: a map or a grant still uses it */

/*
 * Makes memory known under a key of the caller's, which is free. pins has one for each rail
 * (NULL: not on this rail); prefer has a bit for each rail that suits it.
 */
int sl_verbs_map(struct sl_verbs_context *c, uint32_t key, void *base, uint64_t len,
		 struct sl_verbs_pin *const *pins, uint32_t prefer);
/*
 * Ends the grants of the memory, and forgets it. -EBUSY: a batch of ours works on it. After an
 * error, also where the NIC keeps a grant, it stays mapped, and the call may be made again.
 */
int sl_verbs_unmap(struct sl_verbs_context *c, uint32_t key);

/*
 * Lets peers reach the memory over a rail, with *remote_key, by addresses from at on, until
 * sl_verbs_revoke. Granted once in each epoch; again it gives the same. May take long. at is as far
 * within a page as base is. A NIC may give the key of a grant that has ended to the next one: only
 * other addresses keep out what was sent with it before.
 */
int sl_verbs_grant(struct sl_verbs_context *c, uint32_t key, uint32_t rail, uint64_t at,
		   uint32_t flags, uint32_t *remote_key);
/*
 * Ends all grants of a key: when it returns 0 the NICs know none of the keys, and nothing
 * that was begun with them lands any more. Otherwise some queue pair must be ended first.
 */
int sl_verbs_revoke(struct sl_verbs_context *c, uint32_t key);

/*
 * A connection of no pairs. An initiator submits, an owner receives. credit: of an initiator, how
 * many messages the owner takes (its config's notifications), 0: as many as ours.
 */
int sl_verbs_connect(struct sl_verbs_context *c, int initiator, uint32_t credit,
		     struct sl_verbs_conn **out);
uint64_t sl_verbs_id(struct sl_verbs_conn *n); /* never 0, never used again */

/*
 * A queue pair is made over a rail, then begun with the other end's, then live: an initiator's
 * once a request without bytes came back. It ends when it fails, and may be made anew, also
 * before it was settled, but begun only then. -EBUSY: it is there.
 */
int sl_verbs_pair_make(struct sl_verbs_conn *n, uint32_t pair, uint32_t rail,
		       struct sl_verbs_end *mine);
int sl_verbs_pair_begin(struct sl_verbs_conn *n, uint32_t pair, const struct sl_verbs_end *theirs);
/*
 * To the error state, drained, gone: what came over it is received, nothing more will be. An
 * initiator's then waits to be settled, as after a failure, but without news. 0 where there is
 * none. -errno: the device keeps the queue pair, and bytes may still move over it. Call it again
 * then.
 */
int sl_verbs_pair_end(struct sl_verbs_conn *n, uint32_t pair);
/* Of an owner: how many messages of the peer arrived, in order, over all pairs. */
uint64_t sl_verbs_seen(struct sl_verbs_conn *n);
/*
 * Of an initiator, for a queue pair that has failed: its other end is gone too, and had seen so
 * many messages. What this proves done is done, all else is posted again on queue pairs that are
 * live, now or later. Until then it waits.
 */
int sl_verbs_pair_settle(struct sl_verbs_conn *n, uint32_t pair, uint64_t seen);

/* What the caller must know of. */
enum {
	SL_VERBS_PAIR_LIVE = 1,
	SL_VERBS_PAIR_FAILED,
	SL_VERBS_PORT_UP,
	SL_VERBS_PORT_DOWN,
	SL_VERBS_DEVICE_GONE
};
struct sl_verbs_news {
	uint64_t conn; /* 0: of a rail */
	uint32_t kind, pair, rail;
	int32_t status; /* of the completion that failed a queue pair */
};
/* 1: there is some, and control_fd was written to. Only one thread at a time. */
int sl_verbs_news(struct sl_verbs_context *c, struct sl_verbs_news *out);

/*
 * A peer's memory, with a remote key for each queue pair (by index). 0: that queue pair does not
 * reach it.
 */
int sl_verbs_import(struct sl_verbs_conn *n, uint64_t base, uint64_t size, uint32_t flags,
		    const uint32_t *remote_keys, uint32_t pairs, uint32_t *slot);
void sl_verbs_drop(struct sl_verbs_conn *n, uint32_t slot); /* batches under way keep it */
/* its epoch is over: no more of it is posted */
void sl_verbs_expire(struct sl_verbs_conn *n, uint32_t slot);

/*
 * Starts a batch: all of it or nothing. 0, or errno in the low 16 bits and the piece
 * above: EAGAIN no place for a batch or a message, ERANGE an unknown key or beyond its memory,
 * EROFS, EPIPE lost, EBADF ended, ESTALE a past epoch, EHOSTUNREACH no queue pair reaches both
 * sides' memory. It waits when none that does is live. notif NULL: no message.
 */
int64_t sl_verbs_submit(struct sl_verbs_conn *n, int write, uint64_t tag, const struct sl_desc *d,
			size_t count, const uint8_t *notif, size_t notif_len);
int64_t sl_verbs_submit_pages(struct sl_verbs_conn *n, int write, uint64_t tag,
			      const struct sl_pages *p, const struct sl_nest *nest,
			      const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
			      size_t notif_len);
void sl_verbs_cancel(struct sl_verbs_conn *n, uint64_t tag);
int sl_verbs_busy(struct sl_verbs_conn *n); /* whether any batch is under way */

/* Takes completions in the caller, for which the thread stands back until undrive. */
void sl_verbs_drive(struct sl_verbs_context *c);
void sl_verbs_undrive(struct sl_verbs_context *c);

/*
 * No submissions from now on; what was not posted ends with SL_VERBS_CLOSED. -ETIMEDOUT: some is
 * still under way.
 */
int sl_verbs_drain(struct sl_verbs_conn *n, uint64_t grace_ns);
/*
 * All queue pairs to the error state and drained, then all batches end with the outcome of the
 * first call, SL_VERBS_CLOSED or SL_VERBS_LOST. proved: nothing that was posted lands at the peer
 * any more. Otherwise those end as unproven whose writes or messages did not come back. -errno: a
 * device keeps a queue pair. No batch ends then, and it may be called again.
 */
int sl_verbs_end(struct sl_verbs_conn *n, int32_t status, int proved);
/*
 * Ends it with SL_VERBS_CLOSED and gives it back; n is gone. Messages not taken yet stay.
 * -errno, as of sl_verbs_end: n stays until it is disconnected once more, or the context is freed.
 */
int sl_verbs_disconnect(struct sl_verbs_conn *n);

/*
 * Takes the first message with data, of first_len bytes: the ring says whether there is one.
 * Returns the id of the connection that it came over. Only one thread at a time.
 */
uint64_t sl_verbs_notif_take(struct sl_verbs_context *c, uint8_t *data);

#endif
