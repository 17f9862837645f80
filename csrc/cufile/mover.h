/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcufile, opened at run time, and requests that a few threads hand to it: one by one or
 * as batches. A request has a number, its slot, and ends once, in the ends: with the
 * bytes that were moved, or minus an errno, or minus an error of cuFile (from 5000 on).
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

/* All set, but for what is optional, or all NULL. Written once, by sl_cufile_load. */
extern struct sl_cufile_api sl_cufile;

/*
 * Opens the library and its driver: all of it or nothing. After sl_cuda_load, since it looks for
 * devices at once. -ENOENT: dlopen failed; -ENOSYS: a function is missing; -ENODEV:
 * cuFileDriverOpen failed. why is then the reason in words.
 */
int sl_cufile_load(const char *path, char *why, size_t size);

/* What the library says of itself. -1: it does not say. */
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
	uint64_t handle, base, offset; /* memory: base as it was registered, and where in it */
	uint64_t at, len;	       /* in the file */
	uint32_t slot;
	int32_t fd; /* for an edge: a descriptor without O_DIRECT */
	uint16_t kind, device; /* device: whose context is made current */
	uint32_t reserved;
};

/*
 * What a request is. An edge is a write of less than whole blocks, of at most SL_CUFILE_EDGE_MAX
 * bytes: cuFile would write the rest of the blocks, too, as it was before, and undo what others
 * write there meanwhile. It goes by way of the host.
 */
enum sl_cufile_kind {
	SL_CUFILE_READ,
	SL_CUFILE_WRITE,
	SL_CUFILE_EDGE
};
#define SL_CUFILE_EDGE_MAX 8192

struct sl_cufile_mover;

/* A thread. All but `mover` is its own. */
struct sl_cufile_worker {
	struct sl_cufile_mover *mover;
	pthread_t thread;
	bool runs;
	unsigned most; /* requests at a time; less after the library took no more */
	struct sl_cufile_request taken[SL_CUFILE_BATCH_MAX];
	CUfileBatchHandle_t batch; /* NULL: to be made */
	CUfileIOParams_t *params;
	CUfileIOEvents_t *events;
	/* of each entry of a batch. 0: not told yet; 1: its end; below: its error, until all end */
	ssize_t *told;
	CUstream stream[SL_CUFILE_DEVICES]; /* NULL: to be made */
	char edge[SL_CUFILE_EDGE_MAX];
};

struct sl_cufile_mover {
	struct sl_cuda_ends *ends;
	uint32_t slots, workers;
	uint32_t *cancel; /* by slot: not to be begun any more; written by Go */
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct sl_cufile_request *queue; /* a ring of `slots` */
	uint32_t head, count;
	bool stop;
	CUcontext context[SL_CUFILE_DEVICES]; /* NULL: not in use */
	/* times that a batch was cut, or given up for single calls */
	uint64_t lessened;
	struct sl_cufile_worker *worker;
};

/*
 * slots is a power of two, those of the ends. -ENOMEM, or minus another errno: then there is
 * nothing to close.
 */
int sl_cufile_mover_open(struct sl_cufile_mover **mover, struct sl_cuda_ends *ends, uint32_t slots,
			 uint32_t workers, unsigned most);
/* Nothing is under way. */
void sl_cufile_mover_close(struct sl_cufile_mover *m);

/* Takes requests, whose slots are free: there is always room. */
void sl_cufile_put(struct sl_cufile_mover *m, const struct sl_cufile_request *r, size_t n);

/* Makes a device known, whose number is below SL_CUFILE_DEVICES: 0 or what the driver says. */
int sl_cufile_device(struct sl_cufile_mover *m, int device);
/* Whether all of [at, at + bytes) is memory of a device, and of which. */
int sl_cufile_whose(struct sl_cufile_mover *m, int device, uint64_t at, uint64_t bytes, int *whose,
		    uint64_t *until);

CUfileError_t sl_cufile_open(int fd, uint64_t *handle);
void sl_cufile_close(uint64_t handle);
CUfileError_t sl_cufile_register(struct sl_cufile_mover *m, int device, uint64_t base,
				 uint64_t bytes);
CUfileError_t sl_cufile_deregister(struct sl_cufile_mover *m, int device, uint64_t base);

/* For the threads. */
void *sl_cufile_attend(void *worker);
void sl_cufile_discard(struct sl_cufile_worker *l);

#endif
