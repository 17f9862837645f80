/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections, their queue pairs, and the requests on them: what the files of this directory share.
 * The lock of the context guards everything, except where a comment says otherwise.
 *
 * Variables have the same letter in all files: c a context, p a rail (a port of a NIC), n a
 * connection, l a queue pair, b a batch, r a record (a work request), m local memory, im an import
 * (a peer's memory). "This process" and "the program" are the ones that have opened the context;
 * "the peer" is the process at the other end of a connection.
 *
 * What arrives: batches of the program (sl_verbs_submit), messages of peers (sl_verbs_receive),
 * completions and events of NICs. What leaves: work requests, completions of batches (the ring),
 * messages for the program, and news for the control plane (sl_verbs_news).
 *
 * The way of a record:
 *  1. sl_verbs_build puts it on the posted list of a queue pair; sl_verbs_post_built gives all that
 *     are built to the NIC.
 *  2. Its completion takes it off the list: sl_verbs_complete.
 *  3. If the queue pair fails, the NIC completes the rest with errors, or is given up. What was not
 *     done moves to the unproved list of that queue pair: the peer's NIC may have executed it, or
 *     may still.
 *  4. The control plane asks the peer to destroy its end. The peer's answer says how many messages
 *     it has seen. A message that was seen proves the writes before it (sl_verbs_pair_settle). No
 *     request can be executed any more, so the rest is posted again: conn.repost, conn.resend.
 *
 * What is proved: a batch ends without an error only when each of its records is complete. After
 * sl_verbs_end none of its records can land in memory of this process, and with its proved argument
 * none can land at the peer either; otherwise batches with open writes end as unproven.
 */
#ifndef SLUICE_VERBS_PAIR_H
#define SLUICE_VERBS_PAIR_H

#include "../pieces.h"
#include "context.h"

#define SL_VERBS_CHAIN 64	/* requests that are built before they are posted */
#define SL_VERBS_ENTRIES 32	/* local entries of a request */
#define SL_VERBS_BUCKETS 256	/* of a rail's table of queue pairs */
#define SL_VERBS_CREDITS 4	/* receives that an initiator's queue pair needs */
#define SL_VERBS_STALL_CHECKS 8 /* checks of a queue pair in config.stall_ns */

/* The header of a message; little-endian. */
struct sl_verbs_head {
	uint32_t magic, kind;
	/* NOTIF: the message's number, from 1; CREDIT: how many messages the program has taken */
	uint64_t value;
};
_Static_assert(sizeof(struct sl_verbs_head) <= SL_VERBS_HEAD_MAX, "a receive has room for it");
enum { SL_VERBS_MAGIC = 0x31766c73 };
enum { SL_VERBS_IS_NOTIF = 1, SL_VERBS_IS_CREDIT };

/* An outgoing message, in memory that is registered with the NICs. */
struct sl_verbs_frame {
	struct sl_verbs_frame *next; /* on conn.free_frames */
	uint8_t *at;		     /* the header, then the bytes */
	uint32_t len;		     /* of both together */
};

struct sl_verbs_pair;

/* Kinds of records. */
enum sl_verbs_kind {
	SL_VERBS_DATA,
	SL_VERBS_NOTIF,
	SL_VERBS_CREDIT,
	SL_VERBS_PROBE, /* a write without bytes: completes when the peer's end works */
	SL_VERBS_MARK	/* the last request of a queue pair in the error state */
};

/*
 * A work request, from its first post until it is complete or dropped. It may be posted again on
 * another queue pair.
 */
struct sl_verbs_record {
	struct sl_verbs_record *next;
	struct sl_verbs_pair *pair;   /* that it is posted on, or NULL */
	struct sl_verbs_batch *batch; /* NULL: CREDIT, PROBE, MARK */
	struct sl_verbs_frame *frame; /* NOTIF, CREDIT: the message, or NULL */
	uint64_t number;	      /* NOTIF: of the message */
	uint32_t piece;		      /* DATA: the batch's piece with the first byte */
	uint8_t kind;
	uint8_t reposted;  /* it was on a queue pair that failed before */
	uint64_t off, len; /* DATA: the first byte's offset in piece; bytes */
};

struct sl_verbs_list {
	struct sl_verbs_record *first, *last;
	uint32_t n;
};

enum sl_verbs_pair_state {
	SL_VERBS_NONE,
	SL_VERBS_MADE,	   /* not connected yet */
	SL_VERBS_BEGUN,	   /* connected; an initiator's waits for its probe */
	SL_VERBS_LIVE,	   /* carries requests */
	SL_VERBS_DRAINING, /* in the error state, until nothing is posted any more */
	SL_VERBS_FAILED	   /* drained */
};

struct sl_verbs_pair {
	/* How completions find it. */
	struct sl_verbs_pair *next_in_bucket;
	struct sl_verbs_conn *conn;
	struct sl_verbs_rail *rail;
	struct ibv_qp *qp;  /* NULL: destroyed */
	uint32_t index;	    /* in conn.pairs */
	uint32_t number;    /* of qp; 0: none is in the rail's table */
	uint32_t depth;	    /* requests that may be posted */
	uint32_t first_psn; /* the packet sequence number that it begins with */
	/* Its life. */
	enum sl_verbs_pair_state state;
	int32_t status;		    /* of the completion that failed it */
	uint32_t unreported;	    /* news of it (SL_VERBS_PAIR_*); 0: none */
	int end_awaited;	    /* sl_verbs_destroy_pair runs: a failure is not news */
	uint64_t deadline;	    /* DRAINING: when it is given up */
	int destroy_error;	    /* errno of the last ibv_destroy_qp; 0: it did not fail */
	uint32_t receives_reserved; /* for messages that the peer may send over it */
	/* Its requests; each list is in the order in which they were posted. */
	struct sl_verbs_list posted;
	struct sl_verbs_list unposted;		/* the device refused them */
	struct sl_verbs_list unproved;		/* it failed before they completed */
	struct ibv_send_wr *wr_first, *wr_last; /* built, not posted yet: in posted */
	uint64_t bytes_posted;
	uint32_t reposted;    /* how many of posted were posted before: out of batch order */
	uint32_t unsignalled; /* requests since the last that asks for a completion */
	/* For sl_verbs_fail_stalled. */
	uint32_t returned;	  /* requests that have left posted */
	uint32_t returned_before; /* its value at the last check */
	uint32_t idle_checks;	  /* checks in a row with requests posted and none returned */
};

/* What connections add to a rail. */
struct sl_verbs_rail_traffic {
	struct sl_verbs_pair *buckets[SL_VERBS_BUCKETS]; /* by number of the queue pair */
	/* Of queue pairs. Each may have one request beyond its reserve: a probe or a mark. */
	uint32_t len;
	int events_ended;    /* the device reports no more events */
	int armed;	     /* the channel reports, or has reported, the next completion */
	uint32_t unreported; /* news of it (SL_VERBS_PORT_* or DEVICE_GONE); 0: none */
};

/* A peer's memory. */
struct sl_verbs_import {
	uint64_t base, size;
	uint64_t dropped_at; /* order of the first batch that cannot use it */
	uint32_t flags;
	int dropped, expired;
	struct sl_verbs_pair *refused_by; /* see sl_verbs_key_refused */
	uint32_t reachable_over;	  /* a bit for each queue pair with a key */
	uint32_t keys[SL_VERBS_PAIRS];	  /* remote key for each queue pair */
};

/* A byte of a batch: off is within the piece. */
struct sl_verbs_position {
	uint32_t piece;
	uint64_t off;
};

struct sl_verbs_batch {
	struct sl_verbs_batch *prev, *next; /* in conn.batches, or on free_batches */
	struct sl_verbs_batch *next_notif;  /* after conn.notif_first */
	struct sl_verbs_conn *conn;	    /* NULL: it is free */
	uint64_t tag, order, bytes;
	int write, cancelled;
	int32_t status, piece;		   /* of the first failure; 0: none so far */
	struct sl_verbs_pair *refused_by;  /* see sl_verbs_key_refused */
	uint32_t records_open;		   /* its records; 1 while refused_by is set */
	int one_pair;			   /* it is small: all goes over one queue pair */
	int32_t pair;			   /* index of the last one chosen; -1: none yet */
	struct sl_verbs_frame *notif;	   /* its message, until that is posted */
	struct sl_verbs_position position; /* the first byte that was not posted yet */
	struct sl_pieces pieces;
	/*
	 * The first runs of pieces with one local key: so many count in the users of their memory.
	 */
	uint32_t held_runs;
};

/* A message that arrived. */
struct sl_verbs_message {
	struct sl_verbs_message *next;
	struct sl_verbs_inbox *box;
	uint64_t number;
	uint32_t len;
	uint8_t body[SL_VERBS_NOTIF_MAX];
};

/* Received messages of a peer that the program has not taken. An inbox outlives its connection. */
struct sl_verbs_inbox {
	struct sl_verbs_inbox *prev, *next; /* in traffic.inboxes */
	struct sl_verbs_conn *conn;	    /* NULL: freed */
	uint64_t id;			    /* of the connection */
	uint32_t unread;		    /* its messages on traffic.arrived */
	struct sl_verbs_message *messages;  /* as many as the peer may send */
	struct sl_verbs_message *free_messages;
	struct sl_verbs_message *early; /* by number: one before them has not arrived */
};

struct sl_verbs_conn {
	struct sl_verbs_conn *prev, *next; /* in traffic.conns */
	struct sl_verbs_context *context;
	uint64_t id;
	int initiator;	 /* 0: owner */
	int closed;	 /* refuses batches */
	int ending;	 /* sl_verbs_end has begun: nothing is posted any more */
	int ended;	 /* no queue pair and no batch is left */
	int end_tried;	 /* by the close of the context */
	int32_t outcome; /* the status that batches end with; set with ending */
	int proved;	 /* set with ending: nothing that was posted lands any more */
	struct sl_verbs_conn *next_queued;
	int queued; /* it is on traffic.queued_conns */
	/* Held while a queue pair is made, begun or ended. Taken before the context's lock. */
	pthread_mutex_t setup_lock;
	struct sl_verbs_pair *pairs[SL_VERBS_PAIRS];
	uint32_t pairs_made; /* a bit for each queue pair that was ever made */
	uint32_t turn;	     /* the queue pair that comes first among equals */
	uint8_t *frame_memory;
	size_t frame_memory_size;
	struct ibv_mr *frame_mrs[SL_VERBS_RAILS]; /* its registration on each rail */
	struct sl_verbs_frame *frames, *free_frames;
	/* Of an initiator: */
	struct sl_verbs_batch batches;	       /* ring of those that have not ended */
	struct sl_verbs_batch *first_unposted; /* with data to post; &batches: none */
	uint64_t order;
	struct sl_verbs_import **imports;
	uint32_t imports_len, dropped_imports;
	struct sl_verbs_list repost; /* DATA that must be posted once more */
	struct sl_verbs_list resend; /* NOTIF that must be */
	uint32_t unproved;	     /* records on the unproved lists of all queue pairs */
	struct sl_verbs_batch *notif_first, *notif_last; /* batches with an unposted message */
	struct sl_verbs_pair *notif_pair;		 /* has the messages in flight */
	uint32_t notifs_in_flight;			 /* posted or unproved */
	uint32_t window;				 /* messages that the owner takes */
	/*
	 * How many messages submit has accepted, how many have a number, how many the peer's NIC
	 * has acknowledged, and how many the peer's program has taken.
	 */
	uint64_t accepted, sent, acknowledged, taken_by_peer;
	int was_refused; /* a submission got EAGAIN for want of credit */
	/* Of an owner: */
	struct sl_verbs_inbox *inbox;
	/* How many messages arrived, how many the program took, and the last credit sent. */
	uint64_t seen, taken, credit_sent;
	int credit_posted; /* a message of credit is posted */
};

/* What connections add to a context. */
struct sl_verbs_traffic {
	struct sl_verbs_conn conns;	    /* ring */
	struct sl_verbs_conn *queued_conns; /* they have requests for which there was no room */
	uint64_t last_id;		    /* of a connection */
	struct sl_verbs_batch *batches, *free_batches;
	uint64_t batches_used;
	struct sl_verbs_record *free_records;
	struct sl_verbs_record_slab *record_slabs;
	struct sl_verbs_inbox inboxes; /* ring */
	/* Messages for the program, and where the next one goes. */
	struct sl_verbs_message *arrived, **arrived_end;
	uint32_t news_waiting;	/* queue pairs and rails whose unreported is set */
	uint32_t draining;	/* queue pairs in that state */
	uint64_t stall_checked; /* when sl_verbs_fail_stalled last ran */
	uint32_t late_checks;	/* how often it ran late */
	int caller_polls;	/* the lock's holder polls the ring next: no wake-up */
	/* The thread: */
	pthread_t thread;
	int has_thread, epoll_fd, event_fd;
	atomic_int stop;
	atomic_uint lock_waiters; /* callers that wait for the lock: the thread lets them in */
	/* Calls that took completions in place of the thread, or will: it stands back for them. */
	atomic_uint drives;
	atomic_int standing_back;
	/* Requests that are built and not posted yet, and their local entries: */
	uint32_t wrs_used, sges_used;
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
	return l && l->state == SL_VERBS_LIVE && !l->rail->down && !l->rail->gone;
}

/*
 * The files, each of which calls only those above it: lock.c and record.c, receive.c and memory.c,
 * notif.c and import.c, pair.c, batch.c, send.c, arrive.c, complete.c, post.c, settle.c, submit.c
 * and step.c, end.c, make.c and events.c, conn.c, progress.c, traffic.c, rail.c, open.c.
 */

/* lock.c */
/* Called without the lock: lets callers that wait for it have it. */
void sl_verbs_yield_lock(struct sl_verbs_traffic *t);
void sl_verbs_wake_thread(struct sl_verbs_context *c); /* with or without the lock */
void sl_verbs_wake_poller(struct sl_verbs_context *c); /* writes wake_fd if the ring is armed */
void sl_verbs_signal_news(struct sl_verbs_context *c); /* writes control_fd */
int sl_verbs_wait(struct sl_verbs_context *c, uint64_t deadline); /* for changed; -ETIMEDOUT */
/* Queues a connection for sl_verbs_post_queued, and takes it off the queue. */
void sl_verbs_queue_conn(struct sl_verbs_conn *n);
void sl_verbs_unqueue_conn(struct sl_verbs_conn *n);

/* record.c */
struct sl_verbs_record *sl_verbs_new_record(struct sl_verbs_context *c); /* NULL: no memory */
int sl_verbs_reserve_records(struct sl_verbs_context *c, uint32_t n);
void sl_verbs_free_record(struct sl_verbs_context *c, struct sl_verbs_record *r);
void sl_verbs_free_record_slabs(struct sl_verbs_context *c); /* at the end */

/* notif.c: frames of outgoing messages, and inboxes */
int sl_verbs_make_inbox(struct sl_verbs_conn *n);
/* Frees the inbox of a connection that goes, now or with its last unread message. */
void sl_verbs_detach_inbox(struct sl_verbs_conn *n);
void sl_verbs_free_inbox(struct sl_verbs_inbox *box);
void sl_verbs_free_inboxes(struct sl_verbs_context *c);
void sl_verbs_free_frame(struct sl_verbs_conn *n, struct sl_verbs_frame *s);
void sl_verbs_free_frame_of(struct sl_verbs_conn *n, struct sl_verbs_record *r);
/* Wakes a sender that was refused for want of credit. */
void sl_verbs_wake_sender(struct sl_verbs_conn *n);
void sl_verbs_unqueue_notif(struct sl_verbs_batch *b); /* its message will not be sent */

/* import.c */
/* NULL: unknown */
struct sl_verbs_import *sl_verbs_import_of(const struct sl_verbs_conn *n, uint32_t slot);
void sl_verbs_free_dropped_imports(struct sl_verbs_conn *n); /* those that no batch uses */

/* pair.c: a queue pair, and what is posted on it */
struct sl_verbs_pair *sl_verbs_pair_of(struct sl_verbs_rail *p, uint32_t number);
void sl_verbs_enlist(struct sl_verbs_pair *l);	 /* completions find it by its number */
void sl_verbs_delist(struct sl_verbs_pair *l);	 /* completions no longer find it */
void sl_verbs_set_live(struct sl_verbs_pair *l); /* from BEGUN */
/* From MADE, BEGUN or LIVE to DRAINING, or to FAILED if nothing is posted. */
void sl_verbs_fail_pair(struct sl_verbs_pair *l, int32_t status);
/* From DRAINING to FAILED: nothing is posted on it any more. */
void sl_verbs_pair_drained(struct sl_verbs_pair *l);
int sl_verbs_has_room(const struct sl_verbs_pair *l);
/*
 * To post requests: sl_verbs_next_entries, choose a queue pair, sl_verbs_build for each; then
 * sl_verbs_post_built once for all. sl_verbs_next_entries returns room for the entries of the next
 * request. Without room it posts what is built, which may fail queue pairs: so choose after it.
 */
struct ibv_sge *sl_verbs_next_entries(struct sl_verbs_conn *n);
/* Adds a request with len entries to those that are built for a queue pair. */
struct ibv_send_wr *sl_verbs_build(struct sl_verbs_pair *l, struct sl_verbs_record *r,
				   struct ibv_sge *entries, uint32_t len);
void sl_verbs_post_built(struct sl_verbs_conn *n); /* posts what is built */
/* Takes the oldest request off the posted list. */
struct sl_verbs_record *sl_verbs_pop_posted(struct sl_verbs_pair *l);
/* Keeps a request that left the queue pair without a proof that it was done. */
void sl_verbs_keep_unproved(struct sl_verbs_pair *l, struct sl_verbs_record *r);
void sl_verbs_keep_all_unproved(struct sl_verbs_pair *l); /* the same, of all that are posted */

/* batch.c */
/* Whether all of its data is posted, or has been. */
static inline int sl_verbs_all_posted(const struct sl_verbs_batch *b)
{
	return b->position.piece >= b->pieces.count;
}
/*
 * A batch ends in sl_verbs_end_if_over alone, when none of its records is open, and nothing is left
 * to post or it has a status. These lead to that, and keep the first status that they are given:
 * give_up posts no further request, so that the batch ends when the posted ones are over; cancel
 * gives up what is not posted, while a batch that is all posted goes on.
 */
void sl_verbs_end_if_over(struct sl_verbs_batch *b);
void sl_verbs_give_up_batch(struct sl_verbs_batch *b, int32_t status, int32_t piece);
void sl_verbs_cancel_batch(struct sl_verbs_batch *b, int32_t status);
/*
 * The peer's NIC refused a key. Usually the peer revoked it. But a process that is killed loses its
 * memory before its queue pairs, so the peer may be dying. Until that is known the batch does not
 * end: refused_by is the queue pair that reported the refusal. sl_verbs_end_refusals ends it when
 * the peer has answered for that queue pair (the batch ends as revoked), or, with l NULL, when the
 * connection has ended (it ends as lost, if that is the connection's outcome).
 */
void sl_verbs_key_refused(struct sl_verbs_batch *b, struct sl_verbs_pair *refused_by,
			  int32_t piece);
void sl_verbs_end_refusals(struct sl_verbs_conn *n, const struct sl_verbs_pair *l);
/* Undoes what submit's check has done for held_runs. */
void sl_verbs_release_memories(struct sl_verbs_context *c, struct sl_verbs_batch *b);
/* Forgets a record that is on no list and will not be posted again. */
void sl_verbs_drop_record(struct sl_verbs_conn *n, struct sl_verbs_record *r);
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
void sl_verbs_receive(struct sl_verbs_rail *p, const struct ibv_wc *wc);

/* complete.c */
/* Counts a record, which is on no list, as done, and frees it. Its batch may end. */
void sl_verbs_complete(struct sl_verbs_pair *l, struct sl_verbs_record *r);
unsigned sl_verbs_take_completions(struct sl_verbs_rail *p); /* some of them; how many */
/*
 * Takes all messages that have arrived. Their senders have an acknowledgement, and some devices
 * drop the completions when the queue pair is destroyed.
 */
void sl_verbs_take_receives(struct sl_verbs_rail *p);

/* post.c */
void sl_verbs_post_waiting(struct sl_verbs_conn *n); /* as far as there is room */

/* step.c */
/* Takes completions, and posts what has room now. Returns how many completions. */
unsigned sl_verbs_step(struct sl_verbs_context *c);
void sl_verbs_post_queued(struct sl_verbs_context *c); /* sl_verbs_post_waiting of queued_conns */

/* end.c */
void sl_verbs_give_up_draining(struct sl_verbs_context *c, uint64_t now); /* after the deadline */
/* Fails queue pairs that have requests posted but report no completion and no error. */
void sl_verbs_fail_stalled(struct sl_verbs_context *c, uint64_t now);
/*
 * Fails a queue pair, drains and destroys it. Called with n->setup_lock, without the context's
 * lock. -errno: the device keeps it, bytes may still move over it, and none of its records is over.
 * It may be called again.
 */
int sl_verbs_destroy_pair(struct sl_verbs_pair *l);

/* events.c */
void sl_verbs_handle_events(struct sl_verbs_rail *p); /* that the device has reported */

/* conn.c */
void sl_verbs_free_conns(struct sl_verbs_context *c);

/* progress.c */
void *sl_verbs_progress(void *context);

#endif
