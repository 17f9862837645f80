/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of the stand-in: each has a thread that does its work in order, beside the others and
 * after the call has returned, so that what is not ordered shows. Copies of memory that is not
 * pinned are like the driver's: the source is read before the call returns, the destination is
 * written before it does.
 */
#ifndef STANDIN_STREAMS_H
#define STANDIN_STREAMS_H

struct CUevent_st {
	unsigned long recorded, reached;
	int users; /* operations, and the program until it destroys the event */
	int captured;
};

enum { CAPTURE_UNSUPPORTED = 900, CAPTURED_EVENT = 907 };

struct operation {
	struct operation *next;
	enum { COPY, RUN, RECORD, AWAIT, STOP } kind;
	void *to;
	const void *from;
	size_t bytes;
	void *staged; /* to be freed */
	struct CUevent_st *event;
	unsigned long mark;
	CUfunction kernel;
	unsigned grid, block, shared;
	char args[256]; /* one struct by value */
};

struct CUstream_st {
	struct operation *first, *last;
	int busy;
	int device;
	int waited; /* for an event, which may be one of a stream that is captured */
	pthread_t thread;
	struct CUstream_st *next;
};

/* One lock for streams and events: a stand-in need not be fast. */
static pthread_mutex_t works = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t kernels = PTHREAD_MUTEX_INITIALIZER; /* they are functions over globals */
static struct CUstream_st *streams;

static void unuse(struct CUevent_st *e)
{
	if (--e->users == 0)
		free(e);
}

static void quiet(void)
{
	pthread_mutex_lock(&works);
	for (struct CUstream_st *s = streams; s;) {
		if (!s->first && !s->busy) {
			s = s->next;
			continue;
		}
		pthread_cond_wait(&moved, &works);
		s = streams;
	}
	pthread_mutex_unlock(&works);
}

static void run(const struct operation *o)
{
	pthread_mutex_lock(&kernels);
	ring_begin(o->shared, 1);
	sl_at = (struct sl_at){0, 0, o->block, o->grid};
	for (sl_at.bid = 0; sl_at.bid < o->grid; sl_at.bid++)
		for (sl_at.tid = 0; sl_at.tid < o->block; sl_at.tid++)
			o->kernel->run(o->args), ring_thread(o->kernel->name);
	ring_end();
	pthread_mutex_unlock(&kernels);
}

/* What a device does, outside of the lock. */
static void carry_out(const struct operation *o)
{
	unsigned us = WORD(delay_us);

	if (us && (o->kind == COPY || o->kind == RUN))
		usleep(us);
	while (o->kind == COPY && o->bytes == 13 && WORD(hold))
		usleep(200);
	if (sick[0]) /* a device that has faulted does nothing any more */
		return;
	if (o->kind == RUN)
		run(o);
	if (o->kind == COPY)
		memcpy(o->to, o->from, o->bytes);
}

/* An operation that is told to fail ends the use of the device, as a fault does. */
static void chance(const struct operation *o)
{
	if ((o->kind == COPY || o->kind == RUN) && WORD(fault_after) && COUNT(fault_after, -1) == 1)
		sick[0] = (int)WORD(fault_result);
}

static void *stream_thread(void *arg)
{
	struct CUstream_st *s = arg;

	for (int stop = 0; !stop;) {
		struct operation *o;

		pthread_mutex_lock(&works);
		while (!s->first)
			pthread_cond_wait(&moved, &works);
		o = s->first;
		s->busy = 1;
		while (o->kind == AWAIT && o->event->reached < o->mark)
			pthread_cond_wait(&moved, &works);
		pthread_mutex_unlock(&works);
		chance(o);
		carry_out(o);
		pthread_mutex_lock(&works);
		s->first = o->next;
		s->busy = 0;
		stop = o->kind == STOP;
		if (o->kind == RECORD && o->event->reached < o->mark)
			o->event->reached = o->mark;
		if (o->event)
			unuse(o->event);
		pthread_cond_broadcast(&moved);
		pthread_mutex_unlock(&works);
		free(o->staged);
		free(o);
	}
	return NULL;
}

/* The lock is held. */
static void push(struct CUstream_st *s, struct operation o)
{
	struct operation *own = malloc(sizeof *own);

	*own = o;
	own->next = NULL;
	if (own->event)
		own->event->users++;
	if (s->first)
		s->last->next = own;
	else
		s->first = own;
	s->last = own;
	pthread_cond_broadcast(&moved);
}

/* Of what waits for an event while the program's streams are captured, until that ends. */
enum { CAPTURED_STREAMS = 3 };

static int joined(const struct CUstream_st *s)
{
	return s->waited && WORD(capture) == CAPTURED_STREAMS;
}

static CUresult enqueue(struct CUstream_st *s, struct operation o)
{
	if (!s)
		return INVALID_VALUE;
	if (joined(s) && o.kind != STOP)
		return 0; /* it is recorded, and does not run */
	pthread_mutex_lock(&works);
	push(s, o);
	pthread_mutex_unlock(&works);
	return 0;
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
	struct CUstream_st *s;

	CONTEXT();
	if (flags != CU_STREAM_NON_BLOCKING || priority > 0 || priority < -5)
		return INVALID_VALUE;
	s = calloc(1, sizeof *s);
	s->device = current->device;
	pthread_mutex_lock(&works);
	s->next = streams;
	streams = s;
	pthread_mutex_unlock(&works);
	if (pthread_create(&s->thread, NULL, stream_thread, s))
		return OUT_OF_MEMORY;
	COUNT(streams, 1);
	*out = s;
	return 0;
}

CUresult cuStreamDestroy_v2(CUstream s)
{
	if (!s)
		return INVALID_VALUE;
	enqueue(s, (struct operation){.kind = STOP});
	pthread_join(s->thread, NULL);
	pthread_mutex_lock(&works);
	for (struct CUstream_st **p = &streams; *p; p = &(*p)->next)
		if (*p == s) {
			*p = s->next;
			break;
		}
	pthread_mutex_unlock(&works);
	free(s);
	COUNT(streams, -1);
	return 0;
}

static _Thread_local CUstreamCaptureMode capture_mode;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUstreamCaptureMode was = capture_mode;

	capture_mode = *mode;
	*mode = was;
	return 0;
}

/* Whether a capture forbids a call that waits. */
static int forbidden(void)
{
	return WORD(capture) != CAPTURED_STREAMS &&
	       WORD(capture) > (capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
}

CUresult cuStreamSynchronize(CUstream s)
{
	CONTEXT();
	if (forbidden())
		return CAPTURE_UNSUPPORTED;
	if (!s || joined(s))
		return s ? CAPTURE_UNSUPPORTED : INVALID_VALUE;
	pthread_mutex_lock(&works);
	while (s->first || s->busy)
		pthread_cond_wait(&moved, &works);
	pthread_mutex_unlock(&works);
	return (CUresult)sick[0];
}

CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status)
{
	CONTEXT();
	if (!s)
		return INVALID_VALUE;
	*status = joined(s);
	return 0;
}

CUresult cuEventCreate(CUevent *e, unsigned flags)
{
	CONTEXT();
	if (flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
		return INVALID_VALUE;
	*e = calloc(1, sizeof **e);
	(*e)->users = 1;
	COUNT(events, 1);
	return 0;
}

CUresult cuEventDestroy_v2(CUevent e)
{
	pthread_mutex_lock(&works);
	unuse(e);
	pthread_mutex_unlock(&works);
	COUNT(events, -1);
	return 0;
}

CUresult cuEventRecord(CUevent e, CUstream s)
{
	CONTEXT();
	if (!e || !s)
		return INVALID_VALUE;
	e->captured = joined(s);
	if (e->captured)
		return 0;
	pthread_mutex_lock(&works);
	push(s, (struct operation){.kind = RECORD, .event = e, .mark = ++e->recorded});
	pthread_mutex_unlock(&works);
	return 0;
}

CUresult cuEventSynchronize(CUevent e)
{
	unsigned long mark;

	CONTEXT();
	if (forbidden())
		return CAPTURE_UNSUPPORTED;
	if (e->captured)
		return CAPTURED_EVENT;
	pthread_mutex_lock(&works);
	for (mark = e->recorded; e->reached < mark;)
		pthread_cond_wait(&moved, &works);
	pthread_mutex_unlock(&works);
	return (CUresult)sick[0];
}

CUresult cuEventQuery(CUevent e)
{
	int over;

	CONTEXT();
	if (forbidden())
		return CAPTURE_UNSUPPORTED;
	if (e->captured || WORD(capture) == CAPTURED_STREAMS)
		return CAPTURED_EVENT;
	pthread_mutex_lock(&works);
	over = e->reached == e->recorded;
	pthread_mutex_unlock(&works);
	return over ? (CUresult)sick[0] : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamQuery(CUstream s)
{
	int over;

	CONTEXT();
	if (forbidden() || joined(s))
		return CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&works);
	over = !s->first && !s->busy;
	pthread_mutex_unlock(&works);
	return over ? (CUresult)sick[0] : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags)
{
	CONTEXT();
	if (!s || !e || flags)
		return INVALID_VALUE;
	s->waited = 1;
	if (joined(s))
		return 0;
	pthread_mutex_lock(&works);
	push(s, (struct operation){.kind = AWAIT, .event = e, .mark = e->recorded});
	pthread_mutex_unlock(&works);
	return 0;
}

/* Refused calls are told to the caller alone. */
static CUresult refused(void)
{
	return WORD(refuse_after) && COUNT(refuse_after, -1) == 1 ? (CUresult)WORD(refuse_result)
								  : 0;
}

static CUresult copy_from_host(CUdeviceptr to, const void *from, size_t n, CUstream s)
{
	struct operation o = {.kind = COPY, .to = (void *)to, .from = from, .bytes = n};

	if (!is(PINNED, (unsigned long)from, n)) {
		o.from = o.staged = malloc(n);
		memcpy(o.staged, from, n);
	}
	return enqueue(s, o);
}

static CUresult copy_to_host(void *to, CUdeviceptr from, size_t n, CUstream s)
{
	CUresult rc =
	    enqueue(s,
		    (struct operation){.kind = COPY, .to = to, .from = (void *)from, .bytes = n});

	return rc || is(PINNED, (unsigned long)to, n) ? rc : cuStreamSynchronize(s);
}

#define COPIES() \
	do { \
		CUresult no; \
		CONTEXT(); \
		no = refused(); \
		if (no) \
			return no; \
		COUNT(copies, 1); \
	} while (0)

/* Pinned memory has an address on the device as well. */
static int reached(CUdeviceptr at, size_t n) { return is(DEVICE, at, n) || is(PINNED, at, n); }

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s)
{
	COPIES();
	return reached(to, n) && !is(DEVICE, (unsigned long)from, 1)
		   ? copy_from_host(to, from, n, s)
		   : INVALID_VALUE;
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, CUstream s)
{
	COPIES();
	return reached(from, n) && !is(DEVICE, (unsigned long)to, 1) ? copy_to_host(to, from, n, s)
								     : INVALID_VALUE;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s)
{
	COPIES();
	if (!is(DEVICE, to, n) || !is(DEVICE, from, n))
		return INVALID_VALUE;
	return enqueue(s, (struct operation){.kind = COPY,
					     .to = (void *)to,
					     .from = (void *)from,
					     .bytes = n});
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s)
{
	COPIES();
	if (is(DEVICE, to, n) && is(DEVICE, from, n))
		return enqueue(s, (struct operation){.kind = COPY,
						     .to = (void *)to,
						     .from = (void *)from,
						     .bytes = n});
	if (is(DEVICE, to, n))
		return copy_from_host(to, (void *)from, n, s);
	return is(DEVICE, from, n) ? copy_to_host((void *)to, from, n, s) : INVALID_VALUE;
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
			unsigned by, unsigned bz, unsigned shared, CUstream s, void **params,
			void **extra)
{
	struct operation o = {.kind = RUN, .kernel = f, .grid = gx, .block = bx, .shared = shared};
	CUresult no;

	CONTEXT();
	if (!f || !gx || gy != 1 || gz != 1 || !bx || bx > f->threads || by != 1 || bz != 1 ||
	    shared > f->shared || !s || extra)
		return INVALID_VALUE;
	no = refused();
	if (no)
		return no;
	COUNT(launches, 1);
	memcpy(o.args, params[0], f->args);
	return enqueue(s, o);
}

#endif
