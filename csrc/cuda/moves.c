/* SPDX-License-Identifier: Apache-2.0 */
#include "moves.h"

#include <dlfcn.h>

/* Written once, before anything is opened that uses it. */
static struct {
#define X(name, args) CUresult(*name) args;
	SL_CUDA_CALLS(X)
	SL_CUDA_MOVER_CALLS(X)
	SL_CUDA_GRAPH_CALLS(X)
#undef X
	CUresult (*exchange)(CUstreamCaptureMode *); /* NULL: the driver is too old */
} cu;

#define TRY(call) \
	do { \
		int try_rc = (call); \
		if (try_rc) \
			return try_rc; \
	} while (0)

/* Whether the library is there, as it is after sl_cuda_load. */
static int look(const char *path)
{
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);

	if (!lib)
		return 0;
#define X(call, args) *(void **)&cu.call = dlsym(lib, #call);
	SL_CUDA_CALLS(X)
	SL_CUDA_MOVER_CALLS(X)
	SL_CUDA_GRAPH_CALLS(X)
#undef X
	*(void **)&cu.exchange = dlsym(lib, "cuThreadExchangeStreamCaptureMode");
	dlclose(lib); /* it stays, by RTLD_NODELETE of its opener */
	return 1;
}

int sl_cuda_moves(const char *path)
{
	int has = 0;

	if (!cu.cuInit && !look(path))
		return 0;
	if (cu.cuEventCreate && cu.cuEventRecord && cu.cuEventSynchronize && cu.cuEventDestroy_v2 &&
	    cu.cuMemcpyAsync)
		has |= SL_CUDA_COPIES;
	if (cu.cuStreamBeginCapture_v2 && cu.cuStreamEndCapture && cu.cuGraphInstantiateWithFlags &&
	    cu.cuGraphLaunch && cu.cuGraphExecDestroy && cu.cuGraphDestroy)
		has |= SL_CUDA_GRAPHS;
	return has;
}

int sl_cuda_copy(struct sl_cuda *c, const uint64_t *dst, const uint64_t *src,
		 const uint64_t *len, size_t n)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	for (size_t i = 0; i < n; i++)
		TRY(cu.cuMemcpyAsync(dst[i], src[i], len[i], c->stream));
	return 0;
}

/* Waits, also while a thread of the program captures a graph, and does not end the capture. */
static int settle(struct sl_cuda *c)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	int exchanged = cu.exchange && cu.exchange(&mode) == 0;
	int rc = cu.cuStreamSynchronize(c->stream);

	if (exchanged)
		cu.exchange(&mode);
	return rc;
}

int sl_cuda_sync(struct sl_cuda *c)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return settle(c);
}

int sl_cuda_mark_open(struct sl_cuda *c, CUevent *mark)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return cu.cuEventCreate(mark, CU_EVENT_DISABLE_TIMING);
}

int sl_cuda_mark(struct sl_cuda *c, CUevent mark)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return cu.cuEventRecord(mark, c->stream);
}

int sl_cuda_await(struct sl_cuda *c, CUevent mark)
{
	TRY(cu.cuCtxSetCurrent(c->context));
	return cu.cuEventSynchronize(mark);
}

void sl_cuda_mark_close(struct sl_cuda *c, CUevent mark)
{
	if (cu.cuCtxSetCurrent(c->context) == 0)
		cu.cuEventDestroy_v2(mark);
}

/* A launch in between may have allowed the kernel less. */
static int allow(struct sl_cuda *c, int kernel, unsigned shared)
{
	if (!shared)
		return 0;
	return cu.cuFuncSetAttribute(c->kernel[kernel],
				     CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared);
}

static int record(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads, unsigned shared,
		  const uint8_t *args)
{
	void *params[] = {(void *)args};

	return cu.cuLaunchKernel(c->kernel[kernel], blocks, 1, 1, threads, 1, 1, shared, c->stream,
				 params, NULL);
}

int sl_cuda_launch(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		   unsigned shared, const uint8_t *args, CUdeviceptr tally, uint8_t *host, size_t n)
{
	int rc, waited;

	TRY(cu.cuCtxSetCurrent(c->context));
	TRY(allow(c, kernel, shared));
	rc = record(c, kernel, blocks, threads, shared, args);
	if (!rc && n)
		rc = cu.cuMemcpyDtoHAsync_v2(host, tally, n, c->stream);
	waited = settle(c);
	return rc ? rc : waited;
}

int sl_cuda_capture(struct sl_cuda *c, int kernel, unsigned blocks, unsigned threads,
		    unsigned shared, const uint8_t *args, CUgraphExec *exec)
{
	CUgraph graph = NULL;
	int rc, ended;

	TRY(cu.cuCtxSetCurrent(c->context));
	TRY(allow(c, kernel, shared));
	/* By thread, so that what others do with the driver meanwhile does not spoil it. */
	TRY(cu.cuStreamBeginCapture_v2(c->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
	rc = record(c, kernel, blocks, threads, shared, args);
	/* whatever failed: a stream that captures is of no use */
	ended = cu.cuStreamEndCapture(c->stream, &graph);
	rc = rc ? rc : ended;
	if (!rc)
		rc = cu.cuGraphInstantiateWithFlags(exec, graph, 0);
	if (graph)
		cu.cuGraphDestroy(graph);
	return rc;
}

int sl_cuda_replay(struct sl_cuda *c, CUgraphExec graph, int kernel, unsigned shared)
{
	int rc, waited;

	TRY(cu.cuCtxSetCurrent(c->context));
	TRY(allow(c, kernel, shared));
	rc = cu.cuGraphLaunch(graph, c->stream);
	waited = settle(c);
	return rc ? rc : waited;
}

void sl_cuda_graph_close(struct sl_cuda *c, CUgraphExec graph)
{
	if (cu.cuCtxSetCurrent(c->context) == 0)
		cu.cuGraphExecDestroy(graph);
}
