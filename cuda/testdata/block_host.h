/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads of a block that wait for one another, on the CPU: each has a stack of its own. Which one
 * goes on is drawn whenever one waits, so that what misses a barrier comes out wrong.
 */
#ifndef BLOCK_HOST_H
#define BLOCK_HOST_H

#include <ucontext.h>

#include "ring_host.h"

enum { BLOCK_MOST = 1024, BLOCK_STACK = 64 << 10, HALF = 16 };

/* Where threads wait for one another. What they have said is there until all have come again. */
struct meeting {
	const char *what;
	uint32_t come, turn;
	sl_u32 said[2][HALF];
};

static struct {
	ucontext_t scheduler, thread[BLOCK_MOST];
	char *stacks;
	uint32_t ready[BLOCK_MOST], nready, running;
	void (*run)(const void *args);
	const void *args;
	struct meeting all, half[BLOCK_MOST / HALF];
	int no_barrier; /* planted */
} block;

static const sl_u32 *meet(struct meeting *m, const char *what, uint32_t size, sl_u32 v)
{
	uint32_t me = sl_at.tid, turn = m->turn % 2;

	if (m->come && strcmp(m->what, what))
		FAIL("thread %u is at a %s, others at a %s", me, what, m->what);
	m->what = what;
	m->said[turn][me % HALF] = v;
	if (++m->come == size) {
		m->come = 0;
		m->turn++;
		for (uint32_t i = 0; i < size; i++)
			block.ready[block.nready++] = me / size * size + i;
	}
	swapcontext(&block.thread[me], &block.scheduler);
	return m->said[turn];
}

static const sl_u32 *meet_half(const char *what, sl_u32 v)
{
	return meet(&block.half[sl_at.tid / HALF], what, HALF, v);
}

void sl_barrier(void)
{
	if (!block.no_barrier)
		meet(&block.all, "barrier", sl_at.bdim, 0);
}

void sl_half_barrier(void) { meet_half("barrier of half a warp", 0); }

sl_u32 sl_half_ballot(sl_u32 v)
{
	const sl_u32 *said = meet_half("ballot", v);
	sl_u32 all = 0;

	for (int i = 0; i < HALF; i++)
		all |= (sl_u32)!!said[i] << i;
	return all;
}

sl_u32 sl_half_max(sl_u32 v)
{
	const sl_u32 *said = meet_half("maximum", v);

	for (int i = 0; i < HALF; i++)
		v = said[i] > v ? said[i] : v;
	return v;
}

static void block_thread(void)
{
	block.run(block.args);
	block.running--;
}

static void block_start(uint32_t i)
{
	ucontext_t *c = &block.thread[i];

	getcontext(c);
	c->uc_stack.ss_sp = block.stacks + (size_t)i * BLOCK_STACK;
	c->uc_stack.ss_size = BLOCK_STACK;
	c->uc_link = &block.scheduler;
	makecontext(c, block_thread, 0);
	block.ready[i] = i;
}

/* Runs all threads of block sl_at.bid to their ends. */
static void block_run(void (*run)(const void *args), const void *args)
{
	if (!block.stacks)
		block.stacks = malloc((size_t)BLOCK_MOST * BLOCK_STACK);
	block.run = run, block.args = args;
	block.running = block.nready = sl_at.bdim;
	for (uint32_t i = 0; i < sl_at.bdim; i++)
		block_start(i);
	while (block.nready) {
		uint32_t i = (uint32_t)rand() % block.nready;

		sl_at.tid = block.ready[i];
		block.ready[i] = block.ready[--block.nready];
		swapcontext(&block.scheduler, &block.thread[sl_at.tid]);
	}
	if (block.running)
		FAIL("%u threads of a block wait for others that do not come", block.running);
	sl_at.tid = 0;
}

#endif
