/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections, their queue pairs, and the requests under way on them: declarations that the files
 * of this directory share. The lock of the context guards everything, except where a comment says
 * otherwise.
 *
 * Variables have the same letter in all files: c a context, p a port (a rail), n a connection, l a
 * queue pair, b a batch, r a record (a work request), m local memory, im a peer's memory.
 *
 * The way of a record: sl_verbs_build puts it on the posted list of a queue pair; its completion
 * takes it off (sl_verbs_done). When the queue pair fails, what the NIC did not complete moves to
 * the unproved list. The caller then learns from the peer which messages arrived, which proves the
 * writes before them (settle.c); the rest is posted again, on conn.repost or conn.resend.
 */
#ifndef SLUICE_VERBS_PAIR_H
#define SLUICE_VERBS_PAIR_H

#include "../pieces.h"
#include "context.h"

#define SL_VERBS_LISTED 8	/* local memories that a batch lists */
#define SL_VERBS_CHAIN 64	/* requests that are built before they are posted */
#define SL_VERBS_ENTRIES 32	/* local entries of a request */
#define SL_VERBS_BUCKETS 256	/* of a rail's table of queue pairs */
#define SL_VERBS_CREDITS 4	/* receives that an initiator's queue pair needs */
#define SL_VERBS_WATCHES 8	/* looks at a queue pair in the time after which it has failed */

/* The header of a message; little-endian. */
struct sl_verbs_head {
	uint32_t magic, kind;
	/* of a message: its number, from 1; of credit: how many the program has taken */
	uint64_t value;
};
_Static_assert(sizeof(struct sl_verbs_head) <= SL_VERBS_HEAD_MAX, "a receive has room for it");
enum { SL_VERBS_MAGIC = 0x31766c73 };
enum { SL_VERBS_IS_NOTIF = 1, SL_VERBS_IS_CREDIT };

/* An outgoing message, in memory that is registered with the NIC. */
struct sl_verbs_frame {
	struct sl_verbs_frame *next; /* free ones */
	uint8_t *at;		    /* the head, then the bytes */
	uint32_t len;		    /* of both */
};

struct sl_verbs_pair;

enum sl_verbs_kind {
	SL_VERBS_DATA,
	SL_VERBS_NOTIF,
	SL_VERBS_CREDIT,
	SL_VERBS_PROBE, /* a write without bytes: completes when the other end works */
	SL_VERBS_MARK	/* the last request of a queue pair in the error state */
};

/*
 * A work request, from its first post until it is proved done or dropped. It may be posted again on
 * another queue pair.
 */
struct sl_verbs_record {
	struct sl_verbs_record *next;
	struct sl_verbs_pair *pair; /* the queue pair that it is posted on, or NULL */
	struct sl_verbs_batch *batch; /* NULL: of none */
	struct sl_verbs_frame *frame;
	uint64_t number; /* of the message */
	uint32_t piece;	 /* DATA: from here on, len bytes */
	uint8_t kind;
	uint8_t reposted; /* it was on a queue pair that failed before */
	uint64_t off, len;
};

struct sl_verbs_list {
	struct sl_verbs_record *first, *last;
	uint32_t n;
};

enum sl_verbs_pair_state {
	SL_VERBS_NONE,
	SL_VERBS_MADE,
	SL_VERBS_BEGUN,	  /* waits for its probe */
	SL_VERBS_LIVE,
	SL_VERBS_DRAINING, /* in the error state, until nothing is posted any more */
	SL_VERBS_FAILED	  /* drained */
};

struct sl_verbs_pair {
	struct sl_verbs_pair *chain; /* of a bucket of the rail */
	struct sl_verbs_conn *conn;
	struct sl_verbs_port *port;
	struct ibv_qp *qp; /* NULL: gone */
	uint32_t index, number, depth, packet;
	enum sl_verbs_pair_state state;
	int awaited; /* a caller waits for its end: that is not reported as news */
	int32_t status;
	uint32_t news; /* SL_VERBS_PAIR_*, not reported yet; 0: none */
	uint64_t deadline; /* of draining */
	int destroy_error; /* of the last ibv_destroy_qp, an errno; 0: none has failed */
	uint32_t receives_promised; /* to the messages that the peer may send over it */
	/* All three in the order in which they were posted: */
	struct sl_verbs_list posted;
	struct sl_verbs_list unposted; /* the device refused them */
	struct sl_verbs_list unproved; /* the queue pair failed before they completed */
	uint32_t reposted; /* how many of posted are: these are out of the order of batches */
	uint32_t returned; /* requests that completed */
	uint32_t returned_before; /* its value at the last sl_verbs_watch */
	uint32_t idle_looks; /* of sl_verbs_watch: some were posted, and none completed */
	uint32_t unsignalled; /* since the last that asked for a completion */
	uint64_t flight;      /* bytes of posted */
	struct ibv_send_wr *wr_first, *wr_last; /* built, not posted yet: they are in posted */
};

/* The queue pairs of a rail. */
struct sl_verbs_pairs {
	struct sl_verbs_pair *buckets[SL_VERBS_BUCKETS]; /* by number of the queue pair */
	/* each may have one request more than there is room for, a probe or a mark */
	uint32_t len;
	int silent; /* the device has no more events */
	int armed; /* the next completion of either queue is an event of the channel, or was one */
	uint32_t news; /* SL_VERBS_PORT_* or DEVICE_GONE, not reported yet; 0: none */
};

/* A peer's memory. */
struct sl_verbs_import {
	uint64_t base, size, dropped_at; /* order of the first batch that cannot use it */
	uint32_t flags;
	int dropped, expired;
	struct sl_verbs_pair *doubt; /* see sl_verbs_key_refused */
	uint32_t pairs; /* a bit for each that reaches it */
	uint32_t keys[SL_VERBS_PAIRS];
};

/* The position of a batch: a byte of a piece. */
struct sl_verbs_place {
	uint32_t piece;
	uint64_t off;
};

struct sl_verbs_batch {
	struct sl_verbs_batch *prev, *next; /* of a connection, in order; or the free ones */
	struct sl_verbs_batch *next_notif;   /* of those whose message is not posted */
	struct sl_verbs_conn *conn;
	uint64_t tag, order, bytes;
	int write, cancelled;
	int32_t status, piece;
	struct sl_verbs_pair *doubt; /* see sl_verbs_key_refused */
	uint32_t open; /* its records that are not over, and one more while it has a doubt */
	int whole;     /* it is small: all of it goes over one queue pair */
	int32_t pair;  /* the index of that one; -1: not chosen yet */
	struct sl_verbs_frame *notif; /* not posted yet */
	struct sl_verbs_place place;
	struct sl_pieces pieces;
	/*
	 * The local memories that it holds. A listed one is held once. The list may be too short:
	 * others are held once for each run of pieces, and only counted.
	 */
	struct sl_verbs_memory *memories[SL_VERBS_LISTED];
	uint32_t memories_len, unlisted_holds;
};

/* A message that arrived. */
struct sl_verbs_post {
	struct sl_verbs_post *next;
	struct sl_verbs_inbox *box;
	uint64_t number;
	uint32_t len;
	uint8_t body[SL_VERBS_NOTIF_MAX];
};

/* Received messages of a peer that the program has not taken. An inbox outlives its connection. */
struct sl_verbs_inbox {
	struct sl_verbs_inbox *prev, *next; /* of the context */
	struct sl_verbs_conn *conn;	    /* NULL: gone */
	uint64_t id;
	uint32_t unread;
	/* ahead: by number, until those before them have come */
	struct sl_verbs_post *free, *ahead;
	struct sl_verbs_post *posts; /* as many as the peer may send */
};

struct sl_verbs_conn {
	struct sl_verbs_conn *prev, *next; /* of the context */
	struct sl_verbs_conn *next_queued;
	int in_pump_queue; /* has what could not be posted */
	struct sl_verbs_context *context;
	uint64_t id;
	int initiator, closed, ending, ended;
	int tried; /* to end it, when the context closes */
	int32_t outcome; /* once ended */
	int proved;	 /* once ending: nothing that was posted lands any more */
	/* one queue pair is made, begun or ended at a time; before the context's lock */
	pthread_mutex_t setup;
	struct sl_verbs_pair *pairs[SL_VERBS_PAIRS];
	uint32_t reaches; /* a bit for each queue pair that was ever made */
	uint32_t turn;	  /* the queue pair that comes first among equals */
	uint8_t *slab; /* frames */
	size_t slab_size;
	struct ibv_mr *slab_mr[SL_VERBS_RAILS];
	struct sl_verbs_frame *frames, *free_frames;
	/* As the initiator: */
	struct sl_verbs_batch live; /* ring, in order */
	struct sl_verbs_batch *head; /* the first whose data is not all posted, or &live */
	uint64_t order;
	struct sl_verbs_import **imports;
	uint32_t imports_len, dropped_imports;
	struct sl_verbs_list repost; /* data that must be posted once more */
	struct sl_verbs_list resend; /* messages that must be */
	uint32_t unproved; /* records on the unproved lists of all queue pairs */
	struct sl_verbs_batch *notif_first, *notif_last;
	struct sl_verbs_pair *notif_pair; /* has the messages that are posted or unproved */
	uint32_t notifs_out;		 /* how many these are */
	/*
	 * How many messages submit accepted, how many have been given a number, how many the peer
	 * has acknowledged, and how many its program has taken.
	 */
	uint64_t accepted, sent, arrived, credited;
	uint32_t window;
	int was_refused; /* a submission was refused for want of credit */
	/* As the owner: */
	struct sl_verbs_inbox *inbox;
	/* How many messages arrived, and the program took; the last credit that was sent. */
	uint64_t seen, taken, credit_sent;
	int credit_posted; /* a message of credit is under way */
};

struct sl_verbs_traffic {
	struct sl_verbs_conn conns; /* ring */
	struct sl_verbs_conn *pump_queue;
	uint64_t last_id;
	struct sl_verbs_batch *batches, *free;
	uint64_t live; /* batches under way */
	struct sl_verbs_record *records; /* free */
	struct sl_verbs_slab *slabs;	 /* of records */
	struct sl_verbs_inbox inboxes;	 /* ring */
	struct sl_verbs_post *first, **end; /* what arrived */
	uint32_t news; /* queue pairs and rails that have some */
	uint32_t draining; /* queue pairs */
	uint64_t watched; /* when sl_verbs_watch last looked */
	uint32_t late;	  /* how many of its looks came late */
	/* the holder of the lock looks for completions afterwards: no need to wake the poller */
	int polled;
	/* The thread: */
	pthread_t thread;
	int has_thread, epoll_fd, event_fd;
	atomic_int stop;
	atomic_uint waiting; /* callers that wait for the lock: the thread lets them in */
	/* calls that took completions in place of the thread, or will: it stands back */
	atomic_uint drives;
	atomic_int standing_back;
	/* Requests that are built and not posted yet, and the entries of those: */
	uint32_t built, entries;
	struct ibv_send_wr wrs[SL_VERBS_CHAIN];
	struct ibv_sge sges[SL_VERBS_CHAIN * SL_VERBS_ENTRIES];
};

/* Lists of records. */
static inline void sl_verbs_append(struct sl_verbs_list *l, struct sl_verbs_record *r)
{
	r->next = NULL;
	if (l->last)
		l->last->next = r;
	else
		l->first = r;
	l->last = r;
	l->n++;
}

static inline struct sl_verbs_record *sl_verbs_pop(struct sl_verbs_list *l)
{
	struct sl_verbs_record *r = l->first;

	if (r) {
		l->first = r->next;
		if (!l->first)
			l->last = NULL;
		l->n--;
	}
	return r;
}

static inline int sl_verbs_usable(const struct sl_verbs_pair *l)
{
	return l && l->state == SL_VERBS_LIVE && !l->port->down && !l->port->gone;
}

/*
 * The files, each of which calls only those above it: lock.c and record.c, receive.c and memory.c,
 * notif.c and import.c, pair.c, batch.c, send.c, arrive.c, complete.c, post.c, settle.c, submit.c
 * and step.c, end.c, make.c and events.c, conn.c, progress.c, traffic.c, rail.c, open.c.
 */

/* lock.c */
void sl_verbs_enter(struct sl_verbs_context *c); /* takes the lock, for a caller that waits */
/* Called without the lock: lets callers that wait for it have it. */
void sl_verbs_yield_lock(struct sl_verbs_traffic *t);
void sl_verbs_wake_thread(struct sl_verbs_context *c); /* with or without the lock */
void sl_verbs_wake_poller(struct sl_verbs_context *c); /* if it is armed */
void sl_verbs_signal_news(struct sl_verbs_context *c);
int sl_verbs_wait(struct sl_verbs_context *c, uint64_t deadline); /* for c->news, or -ETIMEDOUT */
void sl_verbs_queue_pump(struct sl_verbs_conn *n); /* pumps n when a queue pair has room */
void sl_verbs_unqueue_pump(struct sl_verbs_conn *n);

/* record.c */
struct sl_verbs_record *sl_verbs_record(struct sl_verbs_context *c); /* NULL: no memory */
int sl_verbs_reserve_records(struct sl_verbs_context *c, uint32_t n);
void sl_verbs_recycle(struct sl_verbs_context *c, struct sl_verbs_record *r);
void sl_verbs_free_records(struct sl_verbs_context *c);

/* notif.c: where messages lie, before they leave and after they came */
int sl_verbs_make_inbox(struct sl_verbs_conn *n);
void sl_verbs_leave_inbox(struct sl_verbs_conn *n);
void sl_verbs_free_inbox(struct sl_verbs_inbox *box);
void sl_verbs_empty(struct sl_verbs_context *c);
void sl_verbs_free_frame(struct sl_verbs_conn *n, struct sl_verbs_frame *s);
void sl_verbs_drop_frame(struct sl_verbs_conn *n, struct sl_verbs_record *r);
void sl_verbs_wake_sender(struct sl_verbs_conn *n);
void sl_verbs_unqueue_notif(struct sl_verbs_batch *b); /* its message will not be sent */

/* import.c */
/* NULL: unknown */
struct sl_verbs_import *sl_verbs_import_of(const struct sl_verbs_conn *n, uint32_t slot);
void sl_verbs_free_dropped_imports(struct sl_verbs_conn *n); /* those that no batch uses */

/* pair.c: a queue pair, and what is posted on it */
struct sl_verbs_pair *sl_verbs_pair_of(struct sl_verbs_port *p, uint32_t number);
void sl_verbs_enlist(struct sl_verbs_pair *l); /* completions find it by its number */
void sl_verbs_delist(struct sl_verbs_pair *l); /* completions no longer find it */
void sl_verbs_fail_pair(struct sl_verbs_pair *l, int32_t status); /* to the error state, once */
void sl_verbs_pair_drained(struct sl_verbs_pair *l); /* nothing is posted on it any more */
void sl_verbs_pair_lives(struct sl_verbs_pair *l);
int sl_verbs_has_room(const struct sl_verbs_pair *l);
/*
 * To post requests: sl_verbs_entries, choose a queue pair, sl_verbs_build for each; then
 * sl_verbs_post_built once for all. sl_verbs_entries returns room for the entries of the next
 * request. Without room it posts what is built, which may fail queue pairs: so choose after it.
 */
struct ibv_sge *sl_verbs_entries(struct sl_verbs_conn *n);
/* Adds a request with len entries to those that are built for a queue pair. */
struct ibv_send_wr *sl_verbs_build(struct sl_verbs_pair *l, struct sl_verbs_record *r,
				   struct ibv_sge *entries, uint32_t len);
void sl_verbs_post_built(struct sl_verbs_conn *n); /* posts what is built */
/* Takes the oldest request off the posted list. */
struct sl_verbs_record *sl_verbs_pop_posted(struct sl_verbs_pair *l);
/* Keeps a request that left the queue pair without a proof that it was done. */
void sl_verbs_record_unproved(struct sl_verbs_pair *l, struct sl_verbs_record *r);
void sl_verbs_posted_unproved(struct sl_verbs_pair *l); /* the same, of all that are posted */

/* batch.c */
/* Whether all of its data is posted, or has been. */
static inline int sl_verbs_begun(const struct sl_verbs_batch *b)
{
	return b->place.piece >= b->pieces.count;
}
/*
 * A batch ends in sl_verbs_end_if_over alone. These three lead to it, and keep the first status
 * that they are given: fail only notes the status; give_up posts no further request, so that the
 * batch ends when the posted ones are over; cancel gives up what is not posted, while a batch that
 * is all posted goes on.
 */
void sl_verbs_fail(struct sl_verbs_batch *b, int32_t status, int32_t piece);
void sl_verbs_give_up_batch(struct sl_verbs_batch *b, int32_t status, int32_t piece);
void sl_verbs_cancel_batch(struct sl_verbs_batch *b, int32_t status);
void sl_verbs_key_refused(struct sl_verbs_batch *b, struct sl_verbs_pair *doubt, int32_t piece);
void sl_verbs_resolve_doubt(struct sl_verbs_conn *n, const struct sl_verbs_pair *l); /* NULL: all */
void sl_verbs_end_if_over(struct sl_verbs_batch *b); /* none of its records is open */
/* Keeps memory mapped for a batch. Call it once for each run of pieces with one local key. */
void sl_verbs_hold_memory(struct sl_verbs_batch *b, struct sl_verbs_memory *m);
void sl_verbs_release_memories(struct sl_verbs_context *c, struct sl_verbs_batch *b);
void sl_verbs_drop_record(struct sl_verbs_conn *n, struct sl_verbs_record *r);
/* Those of the batch that wait to be posted again. */
void sl_verbs_drop_waiting_records(struct sl_verbs_batch *b);
void sl_verbs_drop_all_records(struct sl_verbs_conn *n); /* at its end, when none is posted */

/* send.c */
struct sl_verbs_pair *sl_verbs_notif_pair(struct sl_verbs_conn *n); /* NULL: none at the moment */
void sl_verbs_post_notifs(struct sl_verbs_conn *n);
/*
 * Tells the peer how many messages the program has taken, if that is a quarter of the window or the
 * peer has used up its credit.
 */
void sl_verbs_send_credit(struct sl_verbs_conn *n);

/* arrive.c */
void sl_verbs_arrived(struct sl_verbs_port *p, const struct ibv_wc *wc);

/* complete.c */
void sl_verbs_done(struct sl_verbs_pair *l, struct sl_verbs_record *r);
unsigned sl_verbs_take_completions(struct sl_verbs_port *p); /* some of them */
/*
 * Takes all messages that have arrived. Their senders have an acknowledgement, and some devices
 * drop the completions when the queue pair is destroyed.
 */
void sl_verbs_take_receives(struct sl_verbs_port *p);

/* post.c */
void sl_verbs_pump(struct sl_verbs_conn *n); /* posts what has room */

/* step.c */
/* Takes what completions there are and posts what has room now. How many completions. */
unsigned sl_verbs_step(struct sl_verbs_context *c);
void sl_verbs_pump_queued(struct sl_verbs_context *c); /* pumps those that wait for room */

/* end.c */
void sl_verbs_tick(struct sl_verbs_context *c, uint64_t now); /* gives up what does not drain */
/* Fails queue pairs that have requests posted but report no completion and no error. */
void sl_verbs_watch(struct sl_verbs_context *c, uint64_t now);
/*
 * Ended, drained and given back; n->setup is held, the lock not. -errno: the device keeps it,
 * bytes may still move over it, nothing of it is over, and it may be called again.
 */
int sl_verbs_finish_pair(struct sl_verbs_pair *l);

/* events.c: what devices say without being asked */
void sl_verbs_handle_events(struct sl_verbs_port *p);

/* conn.c */
void sl_verbs_free_conns(struct sl_verbs_context *c);

/* progress.c */
void *sl_verbs_progress(void *context);

#endif
