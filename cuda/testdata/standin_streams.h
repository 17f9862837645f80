/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the stand-in's streams keep: copies between memories that the device sees, which happen
 * as late as a card may have them happen, and what is captured. One lock keeps it all together.
 */
#ifndef STANDIN_STREAMS_H
#define STANDIN_STREAMS_H

#include <pthread.h>

enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_UNMATCHED = 903, NOT_SUPPORTED = 801 };

#define ARGS_MAX 256

/* A copy, or a launch if there is a function. */
struct op {
	CUfunction f;
	CUdeviceptr to, from;
	size_t n;
	unsigned blocks, threads, shared;
	char args[ARGS_MAX];
};

struct CUgraph_st {
	int n;
	struct op ops[8];
};

struct CUgraphExec_st {
	struct CUgraph_st graph;
};

struct CUstream_st {
	struct op *late; /* those begun and not done are [done, begun) */
	size_t done, begun, room;
	CUgraph capture; /* NULL: nothing is captured */
	CUstream next;
};

struct CUevent_st {
	CUstream stream;
	size_t begun;
};

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static CUstream streams;

static void perform_launch(const struct op *o);

static void perform_op(const struct op *o)
{
	if (o->f)
		perform_launch(o);
	else
		memmove((void *)o->to, (void *)o->from, o->n);
}

static void flush_to(CUstream s, size_t until)
{
	for (; s->done < until; s->done++)
		perform_op(&s->late[s->done % s->room]);
}

/* What was begun on a stream happens now. */
static void flush(CUstream s)
{
	pthread_mutex_lock(&order);
	flush_to(s, s->begun);
	pthread_mutex_unlock(&order);
}

static void flush_all(void)
{
	pthread_mutex_lock(&order);
	for (CUstream s = streams; s; s = s->next)
		flush_to(s, s->begun);
	pthread_mutex_unlock(&order);
}

#define LATE_MAX 512

/* Captures an operation, or begins it: at once, or as late as may be. */
static CUresult begin(CUstream s, const struct op *o, int late)
{
	if (s->capture && s->capture->n == 8)
		return NOT_SUPPORTED;
	if (s->capture) {
		s->capture->ops[s->capture->n++] = *o;
		return 0;
	}
	pthread_mutex_lock(&order);
	if (!s->late)
		s->late = calloc(s->room = LATE_MAX, sizeof *s->late);
	if (s->begun - s->done == s->room)
		flush_to(s, s->done + 1);
	s->late[s->begun++ % s->room] = *o;
	if (!late)
		flush_to(s, s->begun);
	pthread_mutex_unlock(&order);
	return 0;
}

static CUstream stream_open(void)
{
	CUstream s = calloc(1, sizeof *s);

	pthread_mutex_lock(&order);
	s->next = streams;
	streams = s;
	pthread_mutex_unlock(&order);
	return s;
}

static void stream_close(CUstream s)
{
	flush(s);
	pthread_mutex_lock(&order);
	for (CUstream *p = &streams; *p; p = &(*p)->next)
		if (*p == s) {
			*p = s->next;
			break;
		}
	pthread_mutex_unlock(&order);
	free(s->late);
	free(s);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s)
{
	struct op o = {.to = to, .from = from, .n = n};

	CONTEXT();
	return s && to && from ? begin(s, &o, 1) : INVALID_VALUE;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *n, size_t count, CUmemcpyAttributes *how, size_t *first,
			    size_t hows, size_t *failed, CUstream s)
{
	int rc = 0;

	CONTEXT();
	if (setting("STANDIN_DRIVER", 12040) < 12080)
		return NOT_SUPPORTED;
	if (!s || !count || hows != 1 || *first || how->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || how->flags)
		return INVALID_VALUE;
	if (s->capture)
		return NOT_SUPPORTED;
	for (*failed = 0; *failed < count && !rc; ++*failed)
		rc = n[*failed] ? cuMemcpyAsync(to[*failed], from[*failed], n[*failed], s) : INVALID_VALUE;
	return rc;
}

CUresult cuEventCreate(CUevent *e, unsigned flags)
{
	CONTEXT();
	*e = calloc(1, sizeof **e);
	return flags == CU_EVENT_DISABLE_TIMING ? 0 : INVALID_VALUE;
}

CUresult cuEventRecord(CUevent e, CUstream s)
{
	CONTEXT();
	*e = (struct CUevent_st){s, s->begun};
	return 0;
}

CUresult cuEventSynchronize(CUevent e)
{
	CONTEXT();
	if (!e->stream)
		return 0;
	pthread_mutex_lock(&order);
	flush_to(e->stream, e->begun);
	pthread_mutex_unlock(&order);
	return 0;
}

CUresult cuEventDestroy_v2(CUevent e)
{
	CONTEXT();
	free(e);
	return 0;
}

CUresult cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode mode)
{
	CONTEXT();
	if (!s || s->capture || mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
		return INVALID_VALUE;
	s->capture = calloc(1, sizeof *s->capture);
	return 0;
}

CUresult cuStreamEndCapture(CUstream s, CUgraph *g)
{
	CONTEXT();
	*g = s->capture;
	s->capture = NULL;
	return *g ? 0 : CAPTURE_UNMATCHED;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *e, CUgraph g, unsigned long long flags)
{
	CONTEXT();
	if (!g->n || flags)
		return INVALID_VALUE;
	*e = malloc(sizeof **e);
	(*e)->graph = *g;
	return 0;
}

CUresult cuGraphLaunch(CUgraphExec e, CUstream s)
{
	int rc = 0;

	CONTEXT();
	if (!e || !s || s->capture)
		return INVALID_VALUE;
	for (int i = 0; i < e->graph.n; i++)
		if (e->graph.ops[i].f && e->graph.ops[i].shared > e->graph.ops[i].f->shared)
			return INVALID_VALUE;
	for (int i = 0; i < e->graph.n && !rc; i++)
		rc = begin(s, &e->graph.ops[i], 1);
	return rc;
}

CUresult cuGraphExecDestroy(CUgraphExec e)
{
	CONTEXT();
	free(e);
	return 0;
}

CUresult cuGraphDestroy(CUgraph g)
{
	CONTEXT();
	free(g);
	return 0;
}

#endif
