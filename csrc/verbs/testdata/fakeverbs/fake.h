/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libibverbs, for tests on machines without RDMA: devices whose reliable queue pairs
 * move bytes within one process, by a thread of each device, with the answers, the order
 * and the asynchrony of real ones. It never talks to hardware, and it is for tests alone.
 *
 * One lock guards all of it. It is held for at most CHUNK bytes at a time, and never while
 * anything is waited for.
 */
#ifndef FAKEVERBS_FAKE_H
#define FAKEVERBS_FAKE_H

#include "control.h"
#include "abi.h"

#define EXPORT __attribute__((visibility("default")))

#define CHUNK (64u << 10)
#define MTU IBV_MTU_1024
#define GIDS 2
#define NONE UINT64_MAX

/* Something that a descriptor tells of: a completion event or an asynchronous one. */
struct mail {
	struct mail *next;
	void *about;
	enum ibv_event_type type;
	int port;
};

struct mailbox {
	int fd; /* a semaphore */
	struct mail *first;
};

/* A packet that was given up, and is still on its way. */
struct straggler {
	struct straggler *next;
	uint64_t due;
	uint32_t from, to, key;
	uint64_t remote, len;
	enum ibv_wr_opcode opcode;
	uint8_t data[];
};

struct device {
	struct ibv_device base;
	int index;
	struct fake_panel *panel;
	union ibv_gid gids[GIDS];
	struct context *contexts;
	struct pair *pairs;
	struct straggler *stragglers;
	uint32_t link, fatal; /* as they were last told of */
	struct cq *looked;    /* at which completion queue a look was last */
	uint64_t busy_until;  /* ns: its rate is used up until then */
	pthread_t thread;
	pthread_cond_t kick;
	int open; /* contexts */
	int stop;
};

struct context {
	struct ibv_context base;
	struct device *device;
	struct context *next;
	struct mailbox events;
};

struct domain {
	struct ibv_pd base;
	uint32_t users;
};

struct region {
	struct ibv_mr base;
	struct domain *domain;
	uint8_t *at;   /* where the bytes are */
	uint64_t iova; /* what a request calls it by */
	unsigned access;
	void *mapping; /* of a file that stands in for a dma-buf, or NULL */
	size_t mapping_len;
	int lost;      /* its device was taken away */
};

struct channel {
	struct ibv_comp_channel base;
	struct mailbox events;
};

struct cqe {
	struct ibv_wc wc;
	uint32_t pair;
	uint64_t upto; /* requests of the pair that are over with it */
};

struct cq {
	struct ibv_cq base;
	struct cqe *ring;
	uint64_t head, tail;
	uint32_t size, users;
	int armed;
	uint32_t delivered; /* events that were got */
	int receives;	    /* it has had some of them */
};

struct receive {
	uint64_t wr_id;
	struct ibv_sge sge[4];
	int sges;
};

struct srq {
	struct ibv_srq base;
	struct receive *ring;
	uint64_t head, tail;
	uint32_t size, users;
};

enum fault { FAULT_NONE, FAULT_FAIL, FAULT_LOSE, FAULT_LATE, FAULT_MUTE };

struct request {
	uint64_t wr_id, remote, len, posted;
	enum ibv_wr_opcode opcode;
	unsigned flags;
	uint32_t key;
	int sges;
	struct ibv_sge *sge;
	uint8_t *inlined;
};

struct pair {
	struct ibv_qp base;
	struct pair *next; /* of the device */
	struct device *device;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct request *ring;
	struct ibv_sge *sges;
	uint8_t *inlines;
	uint64_t posted, done, reclaimed;
	uint32_t unheard; /* requests that have landed, and of which nothing is known here */
	/* The first request behind those: */
	int begun;
	enum fault fault;
	uint64_t moved, due, give_up;
	uint32_t unready;
};

/* device.c */
void lock(void);
void unlock(void);
void yield_to_others(void);
uint64_t now(void);
void pause_us(uint32_t us); /* without the lock */
int take_one(_Atomic uint32_t *left); /* one of so many faults of a panel: whether there was one */
struct device *device_at(int index);
static inline struct context *context_of(struct ibv_context *c) { return (struct context *)c; }
static inline struct device *device_of(struct ibv_context *c) { return context_of(c)->device; }
/* of the port, to all contexts; under the lock */
void tell(struct device *d, enum ibv_event_type type);
void tell_of(struct ibv_context *c, enum ibv_event_type type, void *about);
void forget(struct ibv_context *c, void *about);

/* queue.c; under the lock */
int mailbox_open(struct mailbox *b);
void mailbox_close(struct mailbox *b);
void mailbox_put(struct mailbox *b, void *about, enum ibv_event_type type, int port);
void mailbox_purge(struct mailbox *b, const void *about);
/* without the lock */
int mailbox_get(struct mailbox *b, struct mail *out, void (*taken)(void *about));
void complete(struct ibv_cq *q, const struct ibv_wc *wc, uint32_t pair, uint64_t upto);
void purge(struct ibv_cq *q, uint32_t pair); /* its completions are not found any more */
int poll_cq(struct ibv_cq *q, int n, struct ibv_wc *wc);
int req_notify_cq(struct ibv_cq *q, int solicited);
int post_srq_recv(struct ibv_srq *s, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);

/* memory.c; under the lock */
/* Where the bytes are, or NULL: no such key, too long, another domain, or a right is missing. */
uint8_t *reach(uint32_t key, struct ibv_pd *pd, uint64_t at, uint64_t len, unsigned rights);

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr);

/* pair.c */
int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct pair *pair_of(uint32_t number); /* under the lock; NULL: gone */
void fail_pair(struct pair *p);	       /* to the error state; under the lock */

/* wire.c; under the lock */
/* Does a piece of work of the device. Otherwise *wake is when there may be some. */
int work(struct device *d, uint64_t *wake);

#endif
