/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcufile, opened at run time, and a mover: a queue of requests, and threads (workers) that hand
 * them to libcufile, one by one or as batches. Each request has a number of the caller's, its slot,
 * and completes once: the worker adds it to the ends of csrc/cuda, with the bytes that were moved,
 * minus an errno, or minus an error of cuFile (from 5000 on).
 *
 * load.c opens the library and registers memory and files; mover.c has the queue; worker.c is what
 * a worker does with requests.
 */
#ifndef SLUICE_CUFILE_MOVER_H
#define SLUICE_CUFILE_MOVER_H

#include <pthread.h>

#include "../cuda/mover.h"
#include "calls.h"

struct sl_cufile_api {
#define X(ret, name, args) ret(*name) args;
	SL_CUFILE_CALLS(X)
	SL_CUFILE_OPTIONAL_CALLS(X)
#undef X
};

/* Written once, by sl_cufile_load: before that all are NULL, afterwards only optional ones. */
extern struct sl_cufile_api sl_cufile;

/*
 * Opens the library and its driver. sl_cuda_load must have succeeded, since libcufile looks for
 * devices at once. After an error nothing has changed, and why is the reason in words. -ENOENT:
 * dlopen failed; -ENOSYS: a function is missing; -ENODEV: cuFileDriverOpen failed.
 */
int sl_cufile_load(const char *path, char *why, size_t size);

/* Properties that the library reports. -1: it does not report this one. */
struct sl_cufile_facts {
	int32_t version; /* 1140 for 1.14; 0: older than 1.8 */
	int32_t batches;
	int32_t force_compat, p2pdma;
	uint32_t nvfs_major, nvfs_minor;
	uint32_t batch_max;
	uint64_t direct_max, pinned_max, cache_max; /* bytes */
};
CUfileError_t sl_cufile_facts(struct sl_cufile_facts *f);

#define SL_CUFILE_DEVICES 64
#define SL_CUFILE_BATCH_MAX 256

struct sl_cufile_request {
	uint64_t handle;       /* of sl_cufile_open */
	uint64_t base, offset; /* memory: the address that was registered, and the offset from it */
	uint64_t at, len;	       /* in the file */
	uint32_t slot;
	int32_t fd; /* for an edge: a descriptor without O_DIRECT */
	uint16_t kind, device; /* device: the one whose context the worker makes current */
	uint32_t reserved;
};

/*
 * The kinds of a request. An edge is a write of less than whole blocks, of at most
 * SL_CUFILE_EDGE_MAX bytes. cuFile would read the blocks, change them and write them whole, which
 * undoes what others write there meanwhile: so the worker copies an edge to the host and writes it
 * with pwrite.
 */
enum sl_cufile_kind {
	SL_CUFILE_READ,
	SL_CUFILE_WRITE,
	SL_CUFILE_EDGE
};
#define SL_CUFILE_EDGE_MAX 8192

struct sl_cufile_mover;

/* A thread of a mover. No other thread uses it. */
struct sl_cufile_worker {
	struct sl_cufile_mover *mover;
	pthread_t thread;
	bool runs;
	unsigned most; /* requests that it takes at a time; lowered if the library refuses them */
	struct sl_cufile_request taken[SL_CUFILE_BATCH_MAX]; /* off the queue, not completed */
	CUfileBatchHandle_t batch; /* NULL: made when first needed */
	CUfileIOParams_t *params;
	CUfileIOEvents_t *events;
	/* by entry of a batch: 0: no event yet; 1: completed; negative: its error, until all are */
	ssize_t *told;
	CUstream stream[SL_CUFILE_DEVICES]; /* for edges; NULL: made when first needed */
	char edge[SL_CUFILE_EDGE_MAX];
};

struct sl_cufile_mover {
	struct sl_cuda_ends *ends;
	uint32_t slots, workers;
	uint32_t *cancel; /* by slot: not 0: a worker must not begin the request; written by Go */
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct sl_cufile_request *queue; /* a ring of `slots` */
	uint32_t head, count;
	bool stop;
	CUcontext context[SL_CUFILE_DEVICES]; /* NULL: not in use */
	uint64_t lessened; /* how often a worker has lowered its `most` */
	struct sl_cufile_worker *worker;
};

/*
 * slots is a power of two, and at most the places of the ends. Returns 0 or minus an errno; after
 * an error there is nothing to close.
 */
int sl_cufile_mover_open(struct sl_cufile_mover **mover, struct sl_cuda_ends *ends, uint32_t slots,
			 uint32_t workers, unsigned most);
/* All requests must have completed. */
void sl_cufile_mover_close(struct sl_cufile_mover *m);

/* Queues requests, whose slots must be free: so there is always room. */
void sl_cufile_put(struct sl_cufile_mover *m, const struct sl_cufile_request *r, size_t n);

/*
 * Retains the context of a device, whose number is below SL_CUFILE_DEVICES, until the mover is
 * closed. Returns 0 or a CUresult.
 */
int sl_cufile_device(struct sl_cufile_mover *m, int device);
/* As sl_cuda_whose, by the context of `device`. */
int sl_cufile_whose(struct sl_cufile_mover *m, int device, uint64_t at, uint64_t bytes, int *whose,
		    uint64_t *until);

CUfileError_t sl_cufile_open(int fd, uint64_t *handle);
void sl_cufile_close(uint64_t handle);
CUfileError_t sl_cufile_register(struct sl_cufile_mover *m, int device, uint64_t base,
				 uint64_t bytes);
CUfileError_t sl_cufile_deregister(struct sl_cufile_mover *m, int device, uint64_t base);

/* What a worker runs, and what frees its batch and streams. */
void *sl_cufile_attend(void *worker);
void sl_cufile_discard(struct sl_cufile_worker *l);

#endif
