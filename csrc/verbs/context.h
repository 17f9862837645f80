/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The context, its rails and its memory, as the files of the verbs side share them; nothing
 * here crosses into Go. Connections, queue pairs and batches: pair.h.
 */
#ifndef SLUICE_VERBS_CONTEXT_H
#define SLUICE_VERBS_CONTEXT_H

#include "verbs.h"
#include "load.h"

#include <pthread.h>
#include <stdatomic.h>

#define SL_VERBS_INLINE 256	/* bytes; more costs more to copy than the NIC takes to fetch */

#define SL_VERBS_CHUNK 1024  /* keys in one piece of the table */
#define SL_VERBS_CHUNKS 4096 /* pieces */

/* Requests of a queue pair, and receives of a connection, that carry no data. */
#define SL_VERBS_SPARE 16

/* Bytes of a receive: a message and what stands before it. */
#define SL_VERBS_HEAD_MAX 64
#define SL_VERBS_SLOT (SL_VERBS_NOTIF_MAX + SL_VERBS_HEAD_MAX)

struct sl_verbs_batch;
struct sl_verbs_traffic; /* what pair.h has of a context: connections, batches, inbox, thread */
struct sl_verbs_pairs;	 /* what pair.h has of a rail */

/* Room for so many receives, made when connections need them. */
#define SL_VERBS_TRAY 64
struct sl_verbs_tray {
	uint8_t *at;
	struct ibv_mr *mr;
};

/*
 * A rail. Set once by rail_open, gone with the context, but for what is said to be under the lock.
 */
struct sl_verbs_port {
	struct sl_verbs_context *context;
	uint32_t index;			   /* the number of the rail */
	struct sl_verbs_rail_config config; /* device is NULL: the string was the caller's */
	struct ibv_context *device;	   /* its async_fd does not block */
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel; /* of both queues; its fd does not block */
	struct ibv_cq *sends, *receives;
	struct ibv_srq *srq;
	struct ibv_device_attr limits;
	struct sl_verbs_rail info; /* at open */
	uint32_t slots; /* receives at most; the wr_id of each is its number */
	pthread_mutex_t growing; /* of trays; before the context's lock */
	struct sl_verbs_tray *trays; /* each is written once, before its receives are posted */
	uint32_t trays_len, trays_max;
	uint32_t slots_posted; /* of the trays, from the first on; under growing */
	/* Under the lock: */
	uint32_t slots_promised;  /* to connections, as messages that they may send us */
	uint32_t sends_promised;  /* places of the queue of sends, to queue pairs; of sends->cqe */
	uint32_t sends_events, receives_events; /* got and not acknowledged */
	int down;		  /* the port says so: its queue pairs are given nothing new */
	int gone;		  /* the device, for all that is to begin */
	int pulled;		  /* taken away: the kernel has ended all of it */
	struct sl_verbs_counters counters;
	struct sl_verbs_pairs *pairs;
};

/* A range that a NIC knows for local use. */
struct sl_verbs_pin {
	struct sl_verbs_pin *prev, *next; /* of the context's, under the lock */
	struct sl_verbs_port *port;
	struct ibv_mr *mr;
	uint8_t *base;
	uint64_t len;
	uint32_t flags;
	struct sl_verbs_dmabuf dmabuf;
	uint32_t users; /* maps, and grants being made; under the lock */
};

/* A key of ours. All under the lock; but pins do not change while it is mapped. */
struct sl_verbs_memory {
	uint8_t *base;
	uint64_t len;
	uint32_t key, flags; /* flags: READ_ONLY when a pin is */
	uint32_t prefer; /* a bit for each rail that suits it */
	uint32_t rails;	 /* a bit for each rail that it is pinned on */
	uint32_t users; /* batches that work on it, grants being made or ended */
	struct sl_verbs_pin *pins[SL_VERBS_RAILS];
	struct ibv_mr *grants[SL_VERBS_RAILS];
	uint32_t changing; /* a bit for each rail whose grant is being made or ended */
};

struct sl_verbs_context {
	struct sl_verbs_config config;
	pthread_mutex_t lock;
	/* CLOCK_MONOTONIC: a batch ended, a grant was made or ended, a queue pair was drained */
	pthread_cond_t news;
	int closed;
	/* under the lock; never removed before close */
	struct sl_verbs_port *ports[SL_VERBS_RAILS];
	uint32_t ports_len;
	uint32_t ports_busy; /* rail_open calls under way */
	struct sl_verbs_memory **chunks[SL_VERBS_CHUNKS]; /* each of SL_VERBS_CHUNK */
	struct sl_verbs_pin *pins;
	/* pins and grants being made or ended without the lock: close waits */
	uint32_t registering;
	struct sl_ring *ring;
	struct sl_verbs_traffic *traffic; /* of pair.h */
};

/* lock.c */
uint64_t sl_verbs_now(void); /* ns */
void sl_verbs_lock(struct sl_verbs_context *c);
void sl_verbs_unlock(struct sl_verbs_context *c);

/* rail.c */
/* Under the lock. NULL: unknown. */
static inline struct sl_verbs_port *sl_verbs_port_of(struct sl_verbs_context *c, uint32_t rail)
{
	return rail < c->ports_len ? c->ports[rail] : NULL;
}
/* At the end: nothing of pair.h is left on it. */
void sl_verbs_port_close(struct sl_verbs_port *p);

/* receive.c */
/* Sees to it that as many receives are posted as are promised. Without the lock. 0 or -errno. */
int sl_verbs_grow_receives(struct sl_verbs_port *p);
/* Where the bytes of a receive are. */
static inline uint8_t *sl_verbs_slot(const struct sl_verbs_port *p, uint32_t slot)
{
	return p->trays[slot / SL_VERBS_TRAY].at + (size_t)(slot % SL_VERBS_TRAY) * SL_VERBS_SLOT;
}
int sl_verbs_post_slot(struct sl_verbs_port *p, uint32_t slot); /* once more; 0 or errno */
/* At the end, without its queue. */
void sl_verbs_forget_receives(struct sl_verbs_port *p);

/* pin.c */
/* With the lock: the rails stay until free_rails, also while the lock is let go. -EBADF: gone. */
int sl_verbs_keep_rails(struct sl_verbs_context *c);
void sl_verbs_free_rails(struct sl_verbs_context *c);
/*
 * Without the lock: the NIC's driver walks all pages. Requests call the memory by addresses from at
 * on, which is as far within a page as base. NULL: errno says why.
 */
struct ibv_mr *sl_verbs_enroll(struct sl_verbs_port *p, void *base, uint64_t len, uint64_t at,
			       unsigned access, uint32_t flags, const struct sl_verbs_dmabuf *d);
/*
 * What the end of a registration or a queue pair has come to. A device that was taken away answers
 * EIO: the kernel has ended all that was its own before.
 */
int sl_verbs_ended(const struct sl_verbs_port *p, int error);

/* memory.c; under the lock */
struct sl_verbs_memory *sl_verbs_find(struct sl_verbs_context *c, uint32_t key); /* NULL: unknown */
/* What a request over that rail names it by. The memory must have a pin there. */
static inline uint32_t sl_verbs_lkey(const struct sl_verbs_memory *m, uint32_t rail)
{
	return m->pins[rail]->mr->lkey;
}
/* At the end: all memory and pins. */
void sl_verbs_forget_memory(struct sl_verbs_context *c);

/*
 * Of the other files, for open.c and rail.c. Those that return int: 0 or -errno.
 */
/* tables of batches, no thread yet; sets c->traffic */
int sl_verbs_traffic_open(struct sl_verbs_context *c);
int sl_verbs_traffic_start(struct sl_verbs_context *c); /* the thread; signals are blocked in it */
/* Ends all connections, then the thread; without the lock. -errno: a device keeps a queue pair. */
int sl_verbs_traffic_stop(struct sl_verbs_context *c);
/* what is left; the ring is not its business. */
void sl_verbs_traffic_free(struct sl_verbs_context *c);
/*
 * A new rail, that is not in c->ports yet: makes p->pairs, has the thread watch its descriptors.
 * Under the lock.
 */
int sl_verbs_pairs_open(struct sl_verbs_port *p);
void sl_verbs_pairs_close(struct sl_verbs_port *p); /* the reverse */

#endif
