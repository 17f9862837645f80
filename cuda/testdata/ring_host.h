/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels need of a card and the CPU has not: where a thread stands, and copies ahead. */
#ifndef RING_HOST_H
#define RING_HOST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sl_at sl_at;

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

/*
 * Asynchronous copies into shared memory: they happen when they are issued, or as late as a card
 * may have them happen, when the thread waits.
 */
static struct {
	char *memory;
	uint32_t size;
	int late;
} ring;

/* Those under way, and to which group of the thread each belongs. */
#define COPIES_MAX 1024
static struct {
	uint64_t from;
	uint32_t to, width, group;
} copies[COPIES_MAX];
static uint32_t ncopies, groups;

static inline void ring_begin(uint32_t size, int late)
{
	ring.size = size;
	ring.late = late;
	ring.memory = aligned_alloc(16, (size_t)size + 16);
	memset(ring.memory, 0xa5, (size_t)size + 16);
}

static inline void ring_end(void) { free(ring.memory); }

/* A thread has ended, or one begins. */
static inline void ring_thread(const char *what)
{
	if (ncopies)
		FAIL("%s: a thread ended with copies under way", what);
	groups = 0;
}

static char *column(uint32_t at, uint32_t width)
{
	if (at % width || at + width > ring.size || at / 16 % 32 != sl_at.tid % 32)
		FAIL("thread %u: no place of its own at %u of %u", sl_at.tid, at, ring.size);
	return ring.memory + at;
}

/* The copies of all groups but the last `but`. */
static void land(uint32_t but)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < ncopies; i++)
		if (copies[i].group + but >= groups)
			copies[kept++] = copies[i];
		else
			memcpy(ring.memory + copies[i].to, (void *)copies[i].from, copies[i].width);
	ncopies = kept;
}

sl_u32 sl_ring(void) { return 0; }

void sl_ahead(sl_u32 slot, sl_u64 at, sl_u32 width, sl_u32 on)
{
	if (!on)
		return;
	if (at % width || ncopies == COPIES_MAX)
		FAIL("a copy of %u bytes from %llx, behind %u others", width, at, ncopies);
	column(slot, width);
	if (!ring.late) {
		sl_u32 r[4];

		sl_load(r, at, width, 1);
		memcpy(ring.memory + slot, r, width);
		return;
	}
	copies[ncopies].from = at;
	copies[ncopies].to = slot;
	copies[ncopies].width = width;
	copies[ncopies++].group = groups;
}

void sl_ahead_group(void) { groups++; }
void sl_ahead_wait(void) { land(SL_AHEAD - 1); }

void sl_onward(sl_u64 at, sl_u32 slot, sl_u32 width, sl_u32 on)
{
	sl_u32 r[4];

	if (!on)
		return;
	memcpy(r, column(slot, width), width);
	sl_store(at, r, width, 1);
}

#endif
