/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A mover starts batches of copies, and kernels, on the streams of a device. Each stream has a
 * worker: a thread that waits for the events behind the copies. A batch has a number, below the
 * number of places of the ends, and completes once: its worker adds it to the ends
 * (sl_cuda_ended), a ring from which Go takes it. Every function makes the device's context
 * current first, and returns 0 or the driver's error, a positive number, unless its comment says
 * otherwise.
 *
 * mover.c has the workers and their threads, feed.c what puts a batch on a stream, stage.c the
 * gather by the CPU, memory.c memory of devices.
 */
#ifndef SLUICE_CUDA_MOVER_H
#define SLUICE_CUDA_MOVER_H

#include <pthread.h>

#include "device.h"
#include "../ring.h"

/* The ring of completed batches, for the movers of all devices. */
struct sl_cuda_ends {
	pthread_mutex_t lock;
	int wake_fd;   /* written to after a completion, once each time ring->armed is set */
	int heed_fd;   /* written to after each completion while heed is not 0 */
	uint32_t heed; /* batches for which a goroutine waits on heed_fd */
	struct sl_ring *ring;
};

/* places is a power of two. The caller closes the descriptors, after the ends. -ENOMEM. */
int sl_cuda_ends_open(struct sl_cuda_ends **ends, uint32_t places, int wake_fd, int heed_fd);
void sl_cuda_ends_close(struct sl_cuda_ends *e);
void sl_cuda_ended(struct sl_cuda_ends *e, uint32_t batch, int status, int piece);

/* From the host, to the host, within the device; SL_CUDA_ANY: the driver finds out. */
enum sl_cuda_way { SL_CUDA_UP, SL_CUDA_DOWN, SL_CUDA_WITHIN, SL_CUDA_ANY };

/* One copy. */
struct sl_cuda_piece {
	uint64_t dst, src, len;
	uint32_t way, index; /* index: the piece that an error is reported of */
};

/*
 * A batch goes on the stream in chunks, SL_CUDA_AHEAD at a time. So a cancel drops the chunks that
 * are not there yet, and other batches come between. SL_CUDA_CHUNK_CALLS bounds how long a
 * submitter is kept.
 */
#define SL_CUDA_AHEAD 2
#define SL_CUDA_CHUNK_BYTES (8u << 20)
#define SL_CUDA_CHUNK_CALLS 256
#define SL_CUDA_WAITS_MAX 64
#define SL_CUDA_ARGS_MAX 256
#define SL_CUDA_STAGE_BYTES (1u << 20)

struct sl_cuda_worker;
struct sl_cuda_mover;

/* A gather by the CPU: scattered entries in host memory, contiguous ones (dense) on the device. */
struct sl_cuda_entries {
	uint8_t *host;
	uint64_t host_len, host_base, host_stride, entry, dense;
	size_t count;
	int up; /* to the device */
};

struct sl_cuda_batch {
	struct sl_cuda_worker *worker;
	/* made when first needed; the last is for sl_cuda_follow */
	CUevent event[SL_CUDA_AHEAD + 1];
	/* the submitter's until sl_cuda_submit returns, then a copy, in kept */
	struct sl_cuda_piece *pieces;
	struct sl_cuda_piece *kept;
	uint32_t *list; /* of entries; a copy, freed when the batch completes */
	struct sl_cuda_entries entries;
	size_t n, at; /* pieces, and the first of which not all is on the stream */
	uint64_t off; /* bytes of that piece that are */
	int flying;   /* chunks on the stream */
	int turn, last;
	int status, piece;
	uint64_t serial; /* tells it from other batches with this number */
	uint64_t cancel; /* serial of the batch that was cancelled last, begun or not */
};

/* What a worker waits for before it goes on with a batch: an event, by index, or one of these. */
enum { SL_CUDA_NOTHING = -1, SL_CUDA_STREAM = -2 };
struct sl_cuda_note {
	uint32_t batch;
	int event;
};

/* A stream with its thread. */
struct sl_cuda_worker {
	struct sl_cuda_mover *mover;
	CUstream stream;
	pthread_t thread;
	pthread_mutex_t order; /* held to put work on the stream, and the note of that work */
	pthread_mutex_t lock;  /* guards what follows */
	pthread_cond_t more;
	struct sl_cuda_note *notes;
	uint32_t head, tail, mask;
	bool open, stop;
	bool captured; /* the stream was in a graph capture at the last look; guarded by order */
};

struct sl_cuda_mover {
	CUdevice device;
	CUcontext context;
	CUmodule module;
	CUfunction kernel[SL_CUDA_KERNELS];
	uint32_t shared[SL_CUDA_KERNELS]; /* bytes of shared memory that each kernel may use */
	pthread_mutex_t lock;
	struct sl_cuda_ends *ends;
	struct sl_cuda_batch *batches;
	uint8_t *stage; /* pinned, two halves; of the patient worker alone */
	uint32_t places;
	int workers; /* the last but `gated` is patient */
	int streams;
	struct sl_cuda_worker *worker;
};

/*
 * Opens the streams of a device of that number: `streams` that batches share; one whose thread
 * does all the work itself, which may wait (the patient worker, number `streams`); and `gated` for
 * batches that wait for events, made when first needed. After a failure there is nothing to close.
 */
int sl_cuda_mover_open(struct sl_cuda_mover **mover, int device, struct sl_cuda_ends *ends,
		       uint32_t places, int streams, int gated);

/* Waits for what is under way. */
void sl_cuda_mover_close(struct sl_cuda_mover *m);

/* Makes a worker that is not there yet. */
int sl_cuda_gated_open(struct sl_cuda_mover *m, int worker);

int sl_cuda_worker_open(struct sl_cuda_worker *l);
void sl_cuda_worker_close(struct sl_cuda_worker *l);
void sl_cuda_note(struct sl_cuda_worker *l, uint32_t batch, int event);

/* Loads PTX and finds the kernels, as sl_cuda_load_module does. */
int sl_cuda_mover_module(struct sl_cuda_mover *m, const char *ptx, const char *const *names);

/*
 * Starts a batch of copies in the order of the stream, after the events. pieces is read until
 * the call returns. What fails after the first copy is the end of the batch. serial is over 0
 * and unlike that of any earlier batch of the number. -ENOMEM.
 */
int sl_cuda_submit(struct sl_cuda_mover *m, int worker, uint32_t batch, uint64_t serial,
		   const struct sl_cuda_piece *pieces, size_t n, const uint64_t *events,
		   size_t waits);

/* The same on the patient worker by a processor; list may be NULL, and is copied. -ENOMEM. */
int sl_cuda_gather(struct sl_cuda_mover *m, uint32_t batch, uint64_t serial, uint64_t host,
		   uint64_t host_len, uint64_t base, uint64_t stride, uint64_t entry,
		   const uint32_t *list, size_t count, uint64_t dense, int up);

/*
 * Checks that memory is still that of a device, since a kernel that meets other memory ends the use
 * of the device; copies n bytes to device memory; and launches a kernel behind them, with args, one
 * struct by value. from stays as it is until the end.
 */
struct sl_cuda_run {
	uint64_t to;
	uint64_t from; /* host memory */
	uint64_t n;
	uint64_t own_at[2], own_len[2]; /* memory to look up before; a length of 0: none */
	uint32_t kernel, blocks, threads, shared;
	uint32_t args_len;
	uint8_t args[SL_CUDA_ARGS_MAX];
};
int sl_cuda_submit_run(struct sl_cuda_mover *m, int worker, uint32_t batch, uint64_t serial,
		       const struct sl_cuda_run *r, const uint64_t *events, size_t waits);

/*
 * Drops what is not yet on the stream: then the batch ends with -ECANCELED. It may be called
 * before the batch is begun, and after its end: another serial's batch is left alone.
 */
void sl_cuda_cancel(struct sl_cuda_mover *m, uint32_t batch, uint64_t serial);

/*
 * Has a stream of the caller wait for the end of a batch that was begun, all of which goes on
 * the stream now.
 * -EOPNOTSUPP: it is on the patient worker.
 */
int sl_cuda_follow(struct sl_cuda_mover *m, uint32_t batch, uint64_t stream);

/* Whether all of it is pinned, in one piece. */
bool sl_cuda_host_pinned(struct sl_cuda_mover *m, uint64_t at, uint64_t bytes);
/*
 * Whether [at, at + bytes) is memory of a device, and of which; `until` is where it ends otherwise.
 */
int sl_cuda_whose(struct sl_cuda_mover *m, uint64_t at, uint64_t bytes, int *device,
		  uint64_t *until);

/* Pinned host memory with memory of the device beside it. */
int sl_cuda_place_open(struct sl_cuda_mover *m, size_t bytes, void **host, CUdeviceptr *at);
void sl_cuda_place_close(struct sl_cuda_mover *m, void *host, CUdeviceptr at);

/* Memory of a device that outlives its mover. */
struct sl_cuda_block {
	CUdevice device;
	CUcontext context;
	CUdeviceptr at;
	size_t bytes, mapped; /* mapped: of the reserved range; 0: plain memory */
	CUmemGenericAllocationHandle handle; /* of what is mapped; one that was imported has none */
	bool owns;			     /* the handle */
};
int sl_cuda_block_open(int device, size_t bytes, struct sl_cuda_block *b);
int sl_cuda_block_close(struct sl_cuda_block *b);
/*
 * A dma-buf of all of it: a descriptor for the caller to close, or -1 and what the driver said, 0:
 * it has no such call.
 */
int sl_cuda_block_export(const struct sl_cuda_block *b, size_t page, int *fd, uint64_t *off);

/*
 * Memory of a device in other processes. A descriptor of the memory that is mapped now, the
 * caller's to close; -EOPNOTSUPP: memory, driver or device has no such thing.
 */
int sl_cuda_block_share(const struct sl_cuda_block *b, int *fd);
/*
 * Maps such memory of another process, `mapped` bytes; the descriptor stays the caller's.
 * -EOPNOTSUPP as above.
 */
int sl_cuda_block_import(int device, int fd, size_t mapped, struct sl_cuda_block *b);
/*
 * Puts other memory under the addresses of a block, with the content of the old, once all is done
 * that this process had begun on the device. Nothing of this process may use the block meanwhile. A
 * failure before anything was taken away leaves the block as it was; one after that leaves
 * addresses without memory.
 */
int sl_cuda_block_renew(struct sl_cuda_block *b);

/* What puts the work of a batch on the stream of a worker. The caller holds the worker's order. */

/* The next chunk, with the event of that index behind it, and a note. */
void sl_cuda_feed(struct sl_cuda_worker *l, struct sl_cuda_batch *b, uint32_t batch, int event);

/* Makes a batch ready for its work. No thread works on it yet, so nothing is held. */
int sl_cuda_begin(struct sl_cuda_mover *m, struct sl_cuda_worker *l, uint32_t batch,
		  uint64_t serial);

/* Whether the batch was cancelled: before it was begun, or since. */
bool sl_cuda_cancelled(const struct sl_cuda_batch *b);

/* All entries, to the end. */
void sl_cuda_stage(struct sl_cuda_worker *l, struct sl_cuda_batch *b);

#endif
