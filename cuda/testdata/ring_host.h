/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels need of a card and the CPU has not: where a thread stands, and bulk copies. */
#ifndef RING_HOST_H
#define RING_HOST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sl_at sl_at;

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))

/*
 * Bulk copies. Loads and stores happen when they are issued, or as late as a card may have
 * them happen: when a caller waits.
 */
static struct {
	char *memory;
	uint32_t size;
	int late_loads, late_stores;
} ring;

struct copy {
	uint64_t from, to;
	uint32_t bytes, bar;
};
static struct copy loads[16], stores[16];
static int nloads, nstores;

struct head {
	uint32_t armed, phase; /* of the barrier */
	uint64_t kept;
};

static struct head *head(uint32_t at)
{
	if (at % 16 || at + SL_SLOT_HEAD > ring.size)
		FAIL("no slot of the ring at %u of %u", at, ring.size);
	return (struct head *)(ring.memory + at);
}

static void perform(struct copy *list, int *n, int keep)
{
	int done = *n - keep;

	if (done <= 0)
		return;
	for (int i = 0; i < done; i++)
		memcpy((void *)list[i].to, (void *)list[i].from, list[i].bytes);
	memmove(list, list + done, (*n - done) * sizeof *list);
	*n -= done;
}

static void aligned(uint64_t global, uint32_t slot, uint32_t bytes)
{
	if (global % 16 || slot % 16 || bytes % 16 || slot + bytes > ring.size)
		FAIL("bulk copy of %u bytes, %llx and slot %x: a card would fault", bytes,
		     (sl_u64)global, slot);
}

sl_u32 sl_ring(void) { return 0; }
void sl_ring_keep(sl_u32 at, sl_u64 v) { head(at - 8)->kept = v; }
sl_u64 sl_ring_kept(sl_u32 at) { return head(at - 8)->kept; }
void sl_ring_barrier(sl_u32 bar) { *head(bar) = (struct head){0, 0, 0}; }
void sl_ring_fence(void) {}

void sl_ring_load(sl_u32 slot, sl_u64 src, sl_u32 bytes, sl_u32 bar)
{
	aligned(src, slot, bytes);
	if (head(bar)->armed || nloads == 16)
		FAIL("a slot is loaded that is being loaded");
	head(bar)->armed = 1;
	loads[nloads++] = (struct copy){src, (uint64_t)(ring.memory + slot), bytes, bar};
	if (!ring.late_loads)
		perform(loads, &nloads, 0);
}

void sl_ring_wait(sl_u32 bar, sl_u32 phase)
{
	struct head *h = head(bar);

	if (!h->armed || h->phase != phase)
		FAIL("nothing would end this wait: armed %u, phase %u, want %u", h->armed, h->phase,
		     phase);
	perform(loads, &nloads, 0);
	h->armed = 0;
	h->phase ^= 1;
}

void sl_ring_store(sl_u64 dst, sl_u32 slot, sl_u32 bytes)
{
	aligned(dst, slot, bytes);
	if (nstores == 16)
		FAIL("16 stores are under way");
	stores[nstores++] = (struct copy){(uint64_t)(ring.memory + slot), dst, bytes, 0};
	if (!ring.late_stores)
		perform(stores, &nstores, 0);
}

void sl_ring_reuse(void) { perform(stores, &nstores, SL_LAG); }
void sl_ring_drain(void) { perform(stores, &nstores, 0); }

#endif
