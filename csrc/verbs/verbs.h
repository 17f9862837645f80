/* SPDX-License-Identifier: Apache-2.0 */
/*
 * RDMA verbs: rails, memory on them, and connections that move bytes over reliable queue pairs.
 * Call sl_verbs_load first. Functions return 0 or -errno unless they say otherwise, and may be
 * called from any thread.
 *
 * One lock guards a context; a call holds it once for a whole batch. The context has a thread,
 * which takes completions when no caller does, and sleeps on the completion channels.
 *
 * The two ends of a connection must agree on queue pairs, keys and numbers of messages: the caller
 * carries these to the peer (the control plane, backends/rdma).
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
	/* The same, and writes that were posted may still land at the peer. */
	SL_VERBS_CLOSED_UNPROVEN = -1005,
	SL_VERBS_LOST_UNPROVEN = -1006
};

struct sl_verbs_config {
	/* Bounds: */
	uint32_t batches; /* submitted and not polled; a power of two */
	uint32_t notifs;  /* messages of one connection, posted or not received */
	uint32_t conns;	  /* connections over which peers send: notifs receives for each */
	uint32_t depth;	  /* work requests posted on a queue pair */
	uint64_t slice;	  /* bytes of one work request */
	uint64_t flight;  /* bytes posted on a queue pair: what a cancel waits for */
	uint64_t spin_ns; /* how long the thread polls before it sleeps */
	/*
	 * A queue pair that has requests posted, and completes none for so long, has failed; 0:
	 * never.
	 */
	uint64_t stall_ns;
	int wake_fd; /* an eventfd, written for completions and messages while the ring is armed */
	int control_fd; /* an eventfd, written for news */
};

struct sl_verbs_rail_config {
	const char *device;
	uint8_t port, gid;
	uint8_t mtu; /* enum ibv_mtu at most; 0: the port's */
	uint8_t timeout; /* of an acknowledgement: 4.096 us << timeout */
	uint8_t retries; /* 0 to 6 */
	uint8_t level, traffic_class; /* service level; of the global route */
	uint16_t entries; /* most local entries of a request; 0: the device's limit */
};

/* What a rail can do. */
struct sl_verbs_rail_info {
	uint32_t depth_max, sge_max, inline_max;
	uint32_t reads; /* that a queue pair executes at a time, in each direction */
	uint8_t mtu, link_layer, dmabuf;
	uint16_t lid;
	uint8_t gid[16];
};

/* Counted since the rail was opened. */
struct sl_verbs_counters {
	uint64_t bytes_out, bytes_in; /* by writes, by reads; those that were acknowledged */
	uint64_t requests;
	uint64_t reposted; /* requests posted once more, on any rail, after they failed on this */
	uint64_t failures; /* of its queue pairs */
	uint64_t in_flight; /* bytes that are posted now */
};

/* One end of a queue pair, as the other end needs it. */
struct sl_verbs_end {
	uint32_t queue_pair, packet; /* its number, and that of its first packet */
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
int sl_verbs_rail_info(struct sl_verbs_context *c, uint32_t rail, struct sl_verbs_rail_info *out);
int sl_verbs_rail_counters(struct sl_verbs_context *c, uint32_t rail,
			   struct sl_verbs_counters *out);

/*
 * Registers a range with the NIC of a rail for local use; the NIC may write to it unless READ_ONLY.
 * It may take long, and holds no lock: call it for several rails in parallel.
 */
int sl_verbs_pin(struct sl_verbs_context *c, uint32_t rail, void *base, uint64_t len,
		 uint32_t flags, const struct sl_verbs_dmabuf *d, struct sl_verbs_pin **out);
int sl_verbs_unpin(struct sl_verbs_pin *p); /* -EBUSY: a key or a grant uses it */

/*
 * Makes memory known under a key that the caller chooses and that is free. pins has one for each
 * rail (NULL: not on this rail); prefer has a bit for each rail that suits it.
 */
int sl_verbs_map(struct sl_verbs_context *c, uint32_t key, void *base, uint64_t len,
		 struct sl_verbs_pin *const *pins, uint32_t prefer);
/*
 * Ends the grants of the memory, and forgets it. -EBUSY: a batch of this context uses it. After an
 * error, also where the NIC keeps a grant, it stays mapped, and the call may be made again.
 */
int sl_verbs_unmap(struct sl_verbs_context *c, uint32_t key);

/*
 * Lets peers reach the memory over a rail, with *remote_key and by addresses from at on, until
 * sl_verbs_revoke. A second call before that returns the same key. It may take long. at is as far
 * within a page as base is. A NIC may give the key of an ended grant to the next grant: only other
 * addresses keep out old requests with that key.
 */
int sl_verbs_grant(struct sl_verbs_context *c, uint32_t key, uint32_t rail, uint64_t at,
		   uint32_t flags, uint32_t *remote_key);
/*
 * Ends all grants of a key. When it returns 0, the NICs know none of the remote keys, and no
 * request with one of them can land. After an error some queue pair must be ended first.
 */
int sl_verbs_revoke(struct sl_verbs_context *c, uint32_t key);

/*
 * Makes a connection without queue pairs. An initiator submits, an owner receives. credit, for an
 * initiator: how many messages the owner takes (its config.notifs); 0: as many as this config has.
 */
int sl_verbs_connect(struct sl_verbs_context *c, int initiator, uint32_t credit,
		     struct sl_verbs_conn **out);
uint64_t sl_verbs_id(struct sl_verbs_conn *n); /* never 0, never used again */

/*
 * A queue pair is made over a rail, and then begun with the description of the peer's end. An
 * owner's is live then, an initiator's after a request without bytes has completed on it. After it
 * has failed it may be made again, and begun again after it was settled. -EBUSY: it has not failed,
 * or is not settled.
 */
int sl_verbs_pair_make(struct sl_verbs_conn *n, uint32_t pair, uint32_t rail,
		       struct sl_verbs_end *mine);
int sl_verbs_pair_begin(struct sl_verbs_conn *n, uint32_t pair, const struct sl_verbs_end *theirs);
/*
 * Ends a queue pair: error state, drained, destroyed. All messages that came over it are received.
 * An initiator's then waits to be settled, as after a failure, but this is not news. 0 also where
 * there is none. -errno: the device keeps the queue pair, and bytes may still move over it; the
 * call may be made again.
 */
int sl_verbs_pair_end(struct sl_verbs_conn *n, uint32_t pair);
/* Of an owner: how many messages of the peer arrived, in order, over all queue pairs. */
uint64_t sl_verbs_seen(struct sl_verbs_conn *n);
/*
 * Of an initiator, for a queue pair that has failed: says that the owner has destroyed its end,
 * too, and had seen so many messages. Requests that this proves done are done; the others are
 * posted again on queue pairs that are live, now or later.
 */
int sl_verbs_pair_settle(struct sl_verbs_conn *n, uint32_t pair, uint64_t seen);

/* News: changes that the control plane reacts to. */
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
/* Takes one piece of news; 0: there is none. Only one thread at a time. */
int sl_verbs_news(struct sl_verbs_context *c, struct sl_verbs_news *out);

/*
 * Makes a peer's memory known to a connection: batches name it by slot. It has a remote key for
 * each queue pair (by index); 0: that queue pair does not reach it.
 */
int sl_verbs_import(struct sl_verbs_conn *n, uint64_t base, uint64_t size, uint32_t flags,
		    const uint32_t *remote_keys, uint32_t pairs, uint32_t *slot);
void sl_verbs_drop(struct sl_verbs_conn *n, uint32_t slot); /* batches under way keep it */
/* Its epoch has ended: no more requests for it are posted. */
void sl_verbs_expire(struct sl_verbs_conn *n, uint32_t slot);

/*
 * Starts a batch of count descriptors or, where p is not NULL, of a pattern with its lists (see
 * sluice.h): all of it or nothing. Returns 0, or an errno in the low 16 bits and the piece above
 * them. EAGAIN: no room for the batch or the message; ERANGE: an unknown key, or beyond its memory;
 * EROFS; EPIPE: lost; EBADF: ended; ESTALE: the import's epoch has ended; EHOSTUNREACH: no queue
 * pair reaches both memories. The batch waits while no queue pair that does is live. notif NULL:
 * none.
 */
int64_t sl_verbs_submit(struct sl_verbs_conn *n, int write, uint64_t tag, const struct sl_desc *d,
			size_t count, const struct sl_pages *p, const struct sl_nest *nest,
			const uint32_t *local, const uint32_t *remote, const uint8_t *notif,
			size_t notif_len);
void sl_verbs_cancel(struct sl_verbs_conn *n, uint64_t tag);
int sl_verbs_busy(struct sl_verbs_conn *n); /* whether any batch is under way */

/* Takes completions in the caller: the thread stands back until sl_verbs_resume_thread. */
void sl_verbs_drive(struct sl_verbs_context *c);
void sl_verbs_resume_thread(struct sl_verbs_context *c);

/*
 * Refuses new batches, ends those that are not all posted with SL_VERBS_CLOSED, and waits for the
 * others. -ETIMEDOUT: some have not ended.
 */
int sl_verbs_drain(struct sl_verbs_conn *n, uint64_t grace_ns);
/*
 * Ends all queue pairs, then all batches with the outcome of the first call, SL_VERBS_CLOSED or
 * SL_VERBS_LOST. proved says that no request that was posted can land at the peer any more. Without
 * it, batches with a write or a message that did not complete end as unproven. -errno: a device
 * keeps a queue pair; no batch has ended, and the call may be made again.
 */
int sl_verbs_end(struct sl_verbs_conn *n, int32_t status, int proved);
/*
 * Ends the connection with SL_VERBS_CLOSED and frees it. Messages that were not taken stay. -errno,
 * as of sl_verbs_end: n stays until another call, or until the context is freed.
 */
int sl_verbs_disconnect(struct sl_verbs_conn *n);

/*
 * Takes the first message. data has room for the ring's first_len bytes; ring.notifs says whether
 * there is a message. Returns the id of its connection. Only one thread at a time.
 */
uint64_t sl_verbs_notif_take(struct sl_verbs_context *c, uint8_t *data);

#endif
