/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A context, its rails, and the memory of this process. pair.h has the connections. Nothing here
 * calls Go.
 */
#ifndef SLUICE_VERBS_CONTEXT_H
#define SLUICE_VERBS_CONTEXT_H

#include "verbs.h"
#include "load.h"

#include <pthread.h>
#include <stdatomic.h>

/* Bytes that a request may carry itself: to copy more costs more than the NIC takes to fetch it. */
#define SL_VERBS_INLINE 256

#define SL_VERBS_CHUNK 1024  /* keys in one chunk of the table */
#define SL_VERBS_CHUNKS 4096 /* chunks */

/* Requests of a queue pair, and receives of a connection, that carry no data. */
#define SL_VERBS_SPARE 16

/* Bytes of a receive buffer: a message and its header. */
#define SL_VERBS_HEAD_MAX 64
#define SL_VERBS_BUFFER_SIZE (SL_VERBS_NOTIF_MAX + SL_VERBS_HEAD_MAX)

struct sl_verbs_batch;
struct sl_verbs_traffic;      /* of a context, see pair.h */
struct sl_verbs_rail_traffic; /* of a rail, see pair.h */

/* So many receive buffers, which are registered together, when connections need them. */
#define SL_VERBS_BUFFERS 64
struct sl_verbs_buffers {
	uint8_t *at;
	struct ibv_mr *mr;
};

/* A rail. Set by rail_open and freed with the context, except for what is under the lock. */
struct sl_verbs_rail {
	struct sl_verbs_context *context;
	uint32_t index;			    /* in context.rails */
	struct sl_verbs_rail_config config; /* device is NULL: the string was the caller's */
	struct ibv_context *device;	    /* its async_fd does not block */
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel; /* of both queues; its fd does not block */
	struct ibv_cq *send_cq, *receive_cq;
	struct ibv_srq *srq;
	struct ibv_device_attr limits;
	struct sl_verbs_rail_info info; /* at open */
	/* Receives; the wr_id of each is the number of its buffer. */
	uint32_t receives_max;
	pthread_mutex_t grow_lock; /* taken before the context's lock; guards receives_posted */
	struct sl_verbs_buffers *buffers; /* each is set once, before its receives are posted */
	uint32_t buffers_len, buffers_max;
	uint32_t receives_posted; /* buffers that were posted at least once, from number 0 on */
	/* Under the lock: */
	uint32_t receives_reserved; /* for messages that peers may send over the queue pairs */
	uint32_t sends_reserved;    /* of send_cq, for requests that are posted */
	uint32_t send_events, receive_events; /* of the channel, not acknowledged to it yet */
	int down;   /* the port is: its queue pairs are given nothing new */
	int gone;   /* the device failed or was removed: nothing is begun on it */
	int pulled; /* the device was removed: the kernel has ended all of its objects */
	struct sl_verbs_counters counters;
	struct sl_verbs_rail_traffic *traffic;
};

/* A range that a NIC knows for local use. */
struct sl_verbs_pin {
	struct sl_verbs_pin *prev, *next; /* in context.pins; under the lock */
	struct sl_verbs_rail *rail;
	struct ibv_mr *mr;
	uint8_t *base;
	uint64_t len;
	uint32_t flags;
	struct sl_verbs_dmabuf dmabuf;
	uint32_t users; /* memories, and grants being made; under the lock */
};

/* Memory of this process, by its key. Under the lock; pins do not change while it is mapped. */
struct sl_verbs_memory {
	uint8_t *base;
	uint64_t len;
	uint32_t key, flags;   /* flags: READ_ONLY when a pin is */
	uint32_t prefer;       /* a bit for each rail that suits it */
	uint32_t pinned_rails; /* a bit for each rail that it is pinned on */
	uint32_t users; /* runs of pieces of batches (held_runs); grants being made or ended */
	struct sl_verbs_pin *pins[SL_VERBS_RAILS];
	struct ibv_mr *grants[SL_VERBS_RAILS];
	uint32_t changing; /* a bit for each rail whose grant is being made or ended */
};

struct sl_verbs_context {
	struct sl_verbs_config config;
	pthread_mutex_t lock;
	/*
	 * Signalled under the lock when a batch ended, a grant was made or ended, or a queue pair
	 * was drained. Its clock is CLOCK_MONOTONIC.
	 */
	pthread_cond_t changed;
	int closed;
	/* Under the lock; nothing is removed before close. */
	struct sl_verbs_rail *rails[SL_VERBS_RAILS];
	uint32_t rails_len;
	struct sl_verbs_memory **chunks[SL_VERBS_CHUNKS]; /* by key; each of SL_VERBS_CHUNK */
	struct sl_verbs_pin *pins;
	uint32_t registering; /* calls that use a rail without the lock: close waits for them */
	struct sl_ring *ring;
	struct sl_verbs_traffic *traffic;
};

/* lock.c */
uint64_t sl_verbs_now(void); /* CLOCK_MONOTONIC, in ns */
/* Spins for some microseconds before it sleeps: the thread holds the lock for about so long. */
void sl_verbs_lock(struct sl_verbs_context *c);
void sl_verbs_unlock(struct sl_verbs_context *c);

/* rail.c */
/* Under the lock. NULL: unknown. */
static inline struct sl_verbs_rail *sl_verbs_rail_of(struct sl_verbs_context *c, uint32_t rail)
{
	return rail < c->rails_len ? c->rails[rail] : NULL;
}
/* At the end: no queue pair is left on it. */
void sl_verbs_rail_close(struct sl_verbs_rail *p);

/* receive.c */
/* Posts receives until there are as many as are reserved. Without the lock. 0 or -errno. */
int sl_verbs_grow_receives(struct sl_verbs_rail *p);
static inline uint8_t *sl_verbs_buffer(const struct sl_verbs_rail *p, uint32_t number)
{
	return p->buffers[number / SL_VERBS_BUFFERS].at +
	       (size_t)(number % SL_VERBS_BUFFERS) * SL_VERBS_BUFFER_SIZE;
}
int sl_verbs_post_receive(struct sl_verbs_rail *p, uint32_t number); /* once more; 0 or errno */
void sl_verbs_free_receives(struct sl_verbs_rail *p); /* at the end, without its queue */

/* pin.c */
/*
 * With the lock. Until end_registering the rails stay open, also while the lock is released.
 * -EBADF: the context is closed.
 */
int sl_verbs_begin_registering(struct sl_verbs_context *c);
void sl_verbs_end_registering(struct sl_verbs_context *c);
/*
 * Registers memory with a NIC, which may take long: its driver walks all pages. Called without the
 * lock. Requests name the memory by addresses from at on, which is as far within a page as base.
 * NULL: errno says why.
 */
struct ibv_mr *sl_verbs_register(struct sl_verbs_rail *p, void *base, uint64_t len, uint64_t at,
				 unsigned access, uint32_t flags, const struct sl_verbs_dmabuf *d);
/*
 * The error of a call that ended a registration or a queue pair: 0 where a device that was removed
 * answers EIO, since the kernel has ended all of its objects before.
 */
int sl_verbs_end_error(const struct sl_verbs_rail *p, int error);

/* memory.c; under the lock */
struct sl_verbs_memory *sl_verbs_memory_of(struct sl_verbs_context *c, uint32_t key); /* or NULL */
/* The key by which a request on a rail names the memory, which has a pin there. */
static inline uint32_t sl_verbs_lkey(const struct sl_verbs_memory *m, uint32_t rail)
{
	return m->pins[rail]->mr->lkey;
}
void sl_verbs_deregister_all(struct sl_verbs_context *c); /* at the end: all memory and pins */

/* traffic.c: what connections add to a context and to a rail. 0 or -errno. */
int sl_verbs_traffic_open(struct sl_verbs_context *c); /* sets c->traffic, starts the thread */
/* Ends all connections, then the thread; without the lock. -errno: a device keeps a queue pair. */
int sl_verbs_traffic_stop(struct sl_verbs_context *c);
void sl_verbs_traffic_free(struct sl_verbs_context *c);
/* Sets p->traffic of a new rail, and makes the thread watch its descriptors. Under the lock. */
int sl_verbs_rail_traffic_open(struct sl_verbs_rail *p);
void sl_verbs_rail_traffic_close(struct sl_verbs_rail *p); /* the reverse */

#endif
