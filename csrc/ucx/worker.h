/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Declarations that the files of this directory share; none is called from Go.
 *
 * Variables have the same letter in all files: c a context, w a worker, n a connection, b a batch,
 * r a record (a message with data that is not answered), p an outgoing message, m local memory, im
 * a peer's memory, h the head of a message that arrived.
 */
#ifndef SLUICE_UCX_WORKER_H
#define SLUICE_UCX_WORKER_H

#include "../guard.h"
#include "../pieces.h"
#include "ucx.h"
#include "load.h"
#include "message.h"

#include <pthread.h>
#include <stdatomic.h>

#define SL_UCX_CHUNK 1024	 /* keys in one piece of the table */
#define SL_UCX_CHUNKS 4096	 /* pieces */
#define SL_UCX_WINDOW 64	 /* messages with data under way on a connection */
#define SL_UCX_QUANTUM (256u << 10) /* bytes moved by one hold of the lock */

/*
 * A registered memory. Threads read it under the lock of any worker. A thread that changes it then
 * takes the lock of each worker once: after that no thread works with the former value.
 */
struct sl_ucx_memory {
	_Atomic uint64_t ticket; /* 0: the key is free */
	uint8_t *base;
	uint64_t len;
	uint32_t flags;
	struct sl_ucx_only only;
	struct sl_ucx_landings landings;
};

/* Whether a message may write or read there. */
int sl_ucx_reaches(const struct sl_ucx_memory *m, uint64_t off, uint64_t len);

/* A peer's memory. */
struct sl_ucx_import {
	uint64_t size, ticket;
	uint32_t key, flags;
	int used, dropped;
	uint64_t dropped_at; /* order of the first batch that cannot use it */
};

/* Pieces of a batch that follow each other at both ends, and so are one range. */
struct sl_ucx_run {
	uint8_t *local;
	uint64_t remote, len, done;
	struct sl_ucx_import *import;
	struct sl_ucx_memory *memory; /* of local */
	uint32_t first, count;	      /* pieces */
};

struct sl_ucx_batch {
	struct sl_ucx_batch *prev, *next; /* of a connection, in order; or the free ones */
	struct sl_ucx_conn *conn;
	uint64_t tag, order;
	int write, cancelled;
	int32_t status, piece;
	int issued; /* all of it was sent */
	uint32_t outstanding; /* records: its messages that are not answered */
	uint32_t next_piece;  /* the first behind run */
	struct sl_pieces pieces;
	struct sl_ucx_run run;
	struct sl_ucx_message *tail; /* the notification that follows the bytes, or NULL */
};

enum { SL_UCX_FREE, SL_UCX_WRITING, SL_UCX_READING };

/* A message with data, from when it is sent until the peer has answered it. */
struct sl_ucx_record {
	struct sl_ucx_batch *batch; /* NULL: it has ended */
	uint32_t seq;
	uint8_t kind;
	/* A read's answer lands at local, or NULL: from this piece on, and from off of its run. */
	uint32_t piece;
	uint8_t *local;
	struct sl_ucx_memory *memory; /* of local */
	uint64_t off, len;
};

/*
 * The states of our end of a connection, in this order. Only an OPEN one accepts batches. One that
 * is OPEN or DRAINING sends, and handles what it receives. Once it has ENDED nothing that the peer
 * sends lands here; batches whose bytes may still land at the peer stay until proven otherwise.
 */
enum sl_ucx_state { SL_UCX_OPEN, SL_UCX_DRAINING, SL_UCX_BROKEN, SL_UCX_ENDED };

/* A message that arrived and waits: see arrive.c. */
struct sl_ucx_held {
	struct sl_ucx_held *next;
	struct sl_ucx_head head;
	size_t len;
	uint8_t body[];
};

struct sl_ucx_conn {
	struct sl_ucx_conn *next; /* of those that wait for their end */
	struct sl_ucx_worker *worker;
	uint64_t id, peer; /* ours; the other end's, 0 until bound */
	ucp_ep_h handle;
	enum sl_ucx_state state;
	int32_t outcome; /* of batches, once ENDED */
	int failed;	 /* UCX reported an error of the endpoint, or the worker goes */
	int proven;	 /* the other end is over, too */
	uint64_t stamp;	 /* the peer's clock in its last message */
	uint64_t heard;	 /* when that came, ns */
	uint64_t last_out; /* when our last message went out, ns */
	uint64_t idle_at;  /* when nothing waited for the peer the last time we looked, ns */
	/* Ages, in ns; see ages.c. */
	/* what the peer lands later than that after its stamp, it asks us about */
	uint64_t lease;
	/* what we land without asking is no older; lease and limit are at most limit_max */
	uint64_t limit, limit_max;
	uint64_t proposed;	  /* the limit of the next question */
	/* our stamp after which the peer confirmed all that it had sent */
	uint64_t confirmed;
	int asking;		  /* for that; it has not answered */
	struct sl_ucx_held *held, **held_end;
	uint64_t held_bytes;
	int stalled; /* held is tried again in a moment */
	ucs_status_ptr_t flush;	    /* request of the flush before the end of handle */
	int flushed;		    /* it is over */
	ucs_status_ptr_t closing;   /* request of the end of handle, which is NULL then */
	/* Messages that UCX has not sent yet: all, pings, and those with data of a batch. */
	uint32_t sends, pings, data_sends;
	uint64_t answers; /* bytes of answers to the peer's reads, likewise */
	/* As the initiator: */
	struct sl_ucx_batch live; /* ring, in order; those not issued come last */
	struct sl_ucx_batch *head; /* the first that is not issued, or &live */
	uint64_t order;
	struct sl_ucx_import **imports;
	uint32_t imports_len, dropped_imports;
	uint32_t first_seq, next_seq; /* of records in use */
	struct sl_ucx_record records[SL_UCX_WINDOW];
	uint32_t credit;
	int starved; /* a submission was refused for want of credit */
	uint32_t credit_owed;	/* for messages that were taken: to be given back */
	uint32_t credit_urgent; /* for so many more messages it gets the credit back at once */
	/* As the owner: */
	int rx_failed; /* a piece of the batch that arrives */
	uint32_t unread; /* messages that Go has not taken */
	uint32_t controls; /* control messages alike */
	struct sl_ucx_post *loss; /* made in advance: reports the loss even without memory */
};

/* A message that waits for Go. */
struct sl_ucx_inbox {
	struct sl_ucx_post *first, **end;
	uint32_t len;
};

struct sl_ucx_worker {
	struct sl_ucx_context *context;
	ucp_worker_h handle;
	ucp_address_t *address;
	size_t address_len;
	int event_fd;
	pthread_t thread;
	int has_thread;
	pthread_mutex_t lock;
	pthread_cond_t changed;	 /* a batch has ended, or UCX has sent a message */
	atomic_uint waiting;	 /* threads that wait for the lock */
	atomic_uint times_locked;
	atomic_uint drives;	 /* times that sl_ucx_drive has stepped the worker */
	/* the holder of the lock polls afterwards: no need to wake the poller */
	int caller_polls;
	int pending; /* there may be work since the thread's last step: it must not sleep */
	int asleep;  /* the thread has armed the worker, and sleeps or is about to */
	int stalled; /* held messages wait for pages that are being replaced: the thread polls */
	int paused; /* the thread pauses, and UCX is not armed, since a caller steps the worker */
	uint64_t ticked; /* when sl_ucx_tick was last called, ns */
	struct sl_ucx_conn **conns; /* by the low bits of their id */
	uint32_t conns_len, conns_live;
	struct sl_ucx_conn *closing_conns;
	struct sl_ucx_batch *batches, *free;
	uint64_t batches_live; /* batches that have not ended */
	struct sl_ucx_message *small, *large; /* free ones */
	struct sl_ucx_inbox controls, notifs;
	uint32_t hellos; /* of controls: those from senders that are not known */
	struct sl_ring *ring;
};

struct sl_ucx_context {
	struct sl_ucx_config config;
	ucp_context_h handle;
	atomic_int stop;
	int closed;
	struct sl_ucx_worker *workers;
	pthread_mutex_t lock; /* of the table of memory; before any worker's */
	_Atomic(struct sl_ucx_memory *) chunks[SL_UCX_CHUNKS];
};

/* clock.c */
uint64_t sl_ucx_monotonic(uint64_t at); /* when it is that by CLOCK_MONOTONIC */
/* progress.c */
void sl_ucx_lock(struct sl_ucx_worker *w);
/* -ETIMEDOUT: the caller does not have the lock */
int sl_ucx_lock_by(struct sl_ucx_worker *w, uint64_t deadline);
void sl_ucx_unlock(struct sl_ucx_worker *w);
/* Lets a waiting thread lock first. To be called between an unlock and the next lock. */
void sl_ucx_yield_lock(struct sl_ucx_worker *w);
void *sl_ucx_progress(void *worker); /* the main function of the worker's thread */
/* Under the lock, each: */
void sl_ucx_wake_thread(struct sl_ucx_worker *w);
void sl_ucx_wake_poller(struct sl_ucx_worker *w); /* writes to wake_fd, if Go has armed it */
/*
 * Both progress UCX until a request of it is over, and free the request. They release the lock
 * between two steps. -ETIMEDOUT: the request is not over; await keeps it then, finish frees it all
 * the same.
 */
int sl_ucx_finish(struct sl_ucx_worker *w, ucs_status_ptr_t request, uint64_t ns);
int sl_ucx_await(struct sl_ucx_worker *w, ucs_status_ptr_t request, uint64_t ns);
/* One call of UCX's progress, and a quantum of each connection's batches. 0: nothing to do. */
unsigned sl_ucx_step(struct sl_ucx_worker *w);
/* Waits for w->changed. -ETIMEDOUT: the deadline has passed. */
int sl_ucx_wait(struct sl_ucx_worker *w, uint64_t deadline);

/* memory.c */
struct sl_ucx_memory *sl_ucx_find(struct sl_ucx_context *c, uint32_t key); /* NULL: unknown */
void *sl_ucx_grow(void *table, uint32_t *len, size_t entry);
/*
 * Called around each write into memory, so that its provider replaces no pages meanwhile. enter
 * returns 0 while it does: try the write later. With w->stalled set the thread does so soon.
 */
int sl_ucx_enter(struct sl_ucx_memory *m);
void sl_ucx_leave(struct sl_ucx_memory *m);

/* under the lock of the connection's worker */
struct sl_ucx_import *sl_ucx_import_of(const struct sl_ucx_conn *n, uint32_t slot); /* or NULL */
void sl_ucx_free_dropped_imports(struct sl_ucx_conn *n); /* imports that no batch uses */

/* conn.c; under the lock */
struct sl_ucx_conn *sl_ucx_conn_of(struct sl_ucx_worker *w, uint64_t id);
void sl_ucx_leave_table(struct sl_ucx_conn *n);
void sl_ucx_free_conn(struct sl_ucx_conn *n);

/* end.c; under the lock */
void sl_ucx_lose(struct sl_ucx_conn *n); /* the peer is lost; tells Go, once */
/* The other end is proven to be over. */
void sl_ucx_note_proof(struct sl_ucx_conn *n);
int sl_ucx_refusal(const struct sl_ucx_conn *n); /* why it takes no batches: EBADF, EPIPE, or 0 */
/* Whether it sends, and handles what it receives. */
int sl_ucx_is_up(const struct sl_ucx_conn *n);
/* judge: this process did run, so peers that are silent are so themselves. */
void sl_ucx_tick(struct sl_ucx_worker *w, uint64_t now, int judge);
/* Frees ended connections that UCX lets go of by now. Returns how many are left. */
int sl_ucx_finish_closing(struct sl_ucx_worker *w, uint64_t deadline);
/*
 * Ends the endpoints that stay, whatever their peers have not read. Nobody may progress the worker
 * behind that, but destroy it (see close_endpoint). Returns how many stay, since UCX keeps our
 * messages.
 */
int sl_ucx_cut(struct sl_ucx_worker *w);

/* send.c, arrive.c; under the lock */
/* NULL: no memory */
struct sl_ucx_message *sl_ucx_new_message(struct sl_ucx_worker *w, size_t body);
void sl_ucx_free_message(struct sl_ucx_worker *w, struct sl_ucx_message *p);
/* Sends the head and len bytes of the body. The message is UCX's then, also after a failure. */
void sl_ucx_send(struct sl_ucx_conn *n, struct sl_ucx_message *p);
/* One without data. NULL: the connection is over, or now lost, since the peer waits for it. */
struct sl_ucx_message *sl_ucx_new_notice(struct sl_ucx_conn *n, uint8_t type);
/* 1: the peer asks for more than it receives, and is lost now. */
int sl_ucx_lose_backlogged(struct sl_ucx_conn *n);
/* Whether UCX has more unsent messages than there are for a peer that receives. */
int sl_ucx_has_backlog(const struct sl_ucx_conn *n);
void sl_ucx_forget_held(struct sl_ucx_conn *n);
/* sends a notice with a value */
void sl_ucx_send_value(struct sl_ucx_conn *n, uint8_t type, uint64_t value);
void sl_ucx_ping(struct sl_ucx_conn *n);
void sl_ucx_resume(struct sl_ucx_worker *w); /* handles stalled messages */
ucs_status_t sl_ucx_arrived(void *worker, const void *head, size_t head_len, void *data, size_t len,
			    const ucp_am_recv_param_t *param);

/* ages.c; under the lock */
void sl_ucx_begin_ages(struct sl_ucx_conn *n, uint64_t grace_ns); /* of the other end */
/* An upper bound of a message's age. If it exceeds n->limit the peer must confirm the message. */
uint64_t sl_ucx_age(const struct sl_ucx_conn *n, const struct sl_ucx_head *h, uint64_t now);
void sl_ucx_ask_confirm(struct sl_ucx_conn *n);				  /* asks the peer */
void sl_ucx_confirm(struct sl_ucx_conn *n, const struct sl_ucx_head *h);	  /* answers it */
void sl_ucx_confirmed(struct sl_ucx_conn *n, const struct sl_ucx_head *h); /* takes the answer */

/* inbox.c; under the lock */
/* -ENOMEM: it is dropped. */
int sl_ucx_put_control(struct sl_ucx_conn *n, const void *data, size_t len);
/* The first message of a connection, from an unknown sender: dropped where too many wait. */
void sl_ucx_put_hello(struct sl_ucx_worker *w, const void *data, size_t len);
struct sl_ucx_post *sl_ucx_make_loss(void);
void sl_ucx_put_loss(struct sl_ucx_conn *n); /* once */
void sl_ucx_put_notification(struct sl_ucx_conn *n, const void *data, size_t len);
void sl_ucx_free_inboxes(struct sl_ucx_worker *w);
void sl_ucx_count_received(struct sl_ucx_conn *n); /* a message of it was received */
void sl_ucx_return_credit(struct sl_ucx_conn *n); /* gives the credit back */

/* batch.c; under the lock */
void sl_ucx_end_batches(struct sl_ucx_conn *n); /* all of them, with the status that they have */
void sl_ucx_fail(struct sl_ucx_batch *b, int32_t status, int32_t piece);
void sl_ucx_end_if_over(struct sl_ucx_batch *b); /* nothing is outstanding, all sent or failed */
/* Sends nothing more of a batch. A write ends when what was sent is answered. */
void sl_ucx_cancel_batch(struct sl_ucx_batch *b, int32_t status);
/* Sends up to so many bytes of the batches, in order. Whether anything was sent. */
int sl_ucx_send_batches(struct sl_ucx_conn *n, uint64_t bytes);

/* move.c; under the lock */
void sl_ucx_acknowledged(struct sl_ucx_conn *n, const struct sl_ucx_head *h);
void sl_ucx_detach(struct sl_ucx_batch *b);
void sl_ucx_request_ack(struct sl_ucx_conn *n);
/* 1: more is left; 0: all was sent; -EAGAIN: the window is full */
int sl_ucx_send_batch(struct sl_ucx_batch *b, uint64_t *bytes);
/* -EAGAIN: later, the pages of our memory are being moved. */
int sl_ucx_answered(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		    size_t len);

/*
 * serve.c; under the lock. 0, or it must be held: -EAGAIN: the pages of its memory are being moved,
 * -ESTALE: it is too old.
 */
int sl_ucx_serve_write(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		       size_t len, uint64_t now);
void sl_ucx_acknowledge(struct sl_ucx_conn *n, uint32_t seq, int32_t status);
void sl_ucx_serve_read(struct sl_ucx_conn *n, const struct sl_ucx_head *h, const void *data,
		       size_t len);

#endif
