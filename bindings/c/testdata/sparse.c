// SPDX-License-Identifier: Apache-2.0
// A pool: misuse, steps whose entries are compared with what all entries have, and their failures.
#include <poll.h>

#include "check.h"

enum { SETS = 2, SLOTS = 64, ENTRY = 656, STRIDE = 672, SHIFT = 4, PER_SET = 1024, N = 24 };

static struct end all; // of "data": all entries, each of its number
static sluice_region near_region;
static unsigned char near_bytes[SETS * SLOTS * ENTRY];
static sluice_peer self;
static sluice_remote far;

// Each set has its blocks backwards.
static uint32_t sets[SETS] = {0, 1}, starts[SETS + 1], blocks[SETS * (PER_SET >> SHIFT)];
static uint32_t entries[SETS * N], slots[SETS * N], missed[SETS * N], counts[SETS];
static uint64_t base;

static struct sluice_sparse_config config(void)
{
	return (struct sluice_sparse_config){.size = sizeof(struct sluice_sparse_config),
					     .region = near_region, .entry = ENTRY, .sets = SETS,
					     .slots = SLOTS - 3};
}

static struct sluice_sparse_batch batch(void)
{
	return (struct sluice_sparse_batch){
	    .size = sizeof(struct sluice_sparse_batch), .sets_count = SETS, .entries_count = N,
	    .shift = SHIFT, .sets = sets, .entries = entries, .blocks = blocks, .starts = starts,
	    .slots = slots, .missed = missed, .counts = counts};
}

static unsigned char *entry(uint32_t i) // of all, counted over the sets
{
	uint32_t set = i / N, e = entries[i];
	uint32_t block = blocks[starts[set] + (e >> SHIFT)];
	return all.bytes + (size_t)(block << SHIFT | (e & ((1 << SHIFT) - 1))) * STRIDE;
}

static void check(void)
{
	for (uint32_t i = 0; i < SETS * N; i++) {
		if (entries[i] == SLUICE_SPARSE_NONE) {
			TRUE(slots[i] == SLUICE_SPARSE_NONE);
			continue;
		}
		TRUE(slots[i] / SLOTS == i / N);
		TRUE(!memcmp(near_bytes + (size_t)slots[i] * ENTRY, entry(i), ENTRY));
	}
}

static void misuse(void)
{
	sluice_sparse pool;
	sluice_sparse_step step, other;
	struct sluice_sparse_batch b;
	struct sluice_route route = {.size = sizeof route, .flags = 8};
	uint32_t have;
	size_t count;
	struct sluice_sparse_config c = config();
	c.size = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_open(&c, &pool, &have));
	c = config(), c.region = 0;
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_open(&c, &pool, &have));
	c = config(), c.entry = 655;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_open(&c, &pool, &have));
	c = config(), c.sets = 3;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_open(&c, &pool, &have));
	c = config(), c.sets = UINT32_MAX, c.slots = UINT32_MAX, c.layers = UINT32_MAX;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_open(&c, &pool, &have));
	c = config();
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_open(&c, &pool, NULL));
	OK(sluice_sparse_open(&c, &pool, &have));
	TRUE(have == SLOTS);
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_reset(pool, SETS));
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_step_new(pool, self, STRIDE, NULL, &step));
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_step_new(pool, far, ENTRY - 1, NULL, &step));
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_step_new(pool, far, 0, &route, &step));
	OK(sluice_sparse_step_new(pool, far, 0, NULL, &other));
	OK(sluice_sparse_step_new(pool, far, STRIDE, NULL, &step));
	WANT(SLUICE_ERR_BUSY, sluice_sparse_close(pool));
	TEXT("it has 2 steps");

	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_lookup(step, NULL, &count));
	b = batch();
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_lookup(step, &b, NULL));
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_lookup(pool, &b, &count));
	TEXT("is a pool, where a step of a pool is wanted");
	b.entries = NULL;
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_lookup(step, &b, &count));
	TEXT("sluice_sparse_batch.entries is NULL");
	b = batch(), b.blocks = NULL;
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_lookup(step, &b, &count));
	b = batch(), b.missed = NULL;
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_lookup(step, &b, &count));
	b = batch(), b.sets_count = UINT32_MAX, b.entries_count = 0, b.counts = NULL;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_lookup(step, &b, &count));
	b = batch(), b.entries_count = SLOTS + 1;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_lookup(step, &b, &count));
	b = batch(), b.sets_count = 0;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_lookup(step, &b, &count));
	b = batch(), b.page = UINT64_MAX;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_lookup(step, &b, &count));
	b = batch(), b.shift = 32;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_lookup(step, &b, &count));
	b = batch();
	entries[3] = PER_SET;
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_lookup(step, &b, &count));
	TEXT("entry 1024 of set 0 lies behind its blocks");
	entries[3] = 0;
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_warm(step, &b, 0, &count));
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_warm(step, &b, SIZE_MAX, &count));
	OK(sluice_sparse_fetch(step, NULL, 0)); // nothing was missed
	OK(sluice_sparse_lookup(step, &b, &count));
	TRUE(count > 0);
	WANT(SLUICE_ERR_BUSY, sluice_sparse_lookup(other, &b, &count));
	TEXT("what another step has missed of it has not come");
	WANT(SLUICE_ERR_BUSY, sluice_sparse_reset(pool, 0));
	WANT(SLUICE_ERR_ARGUMENT, sluice_sparse_fetch(step, NULL, 1));
	WANT(SLUICE_ERR_BOUNDS, sluice_sparse_fetch(step, NULL, 0));
	OK(sluice_sparse_step_close(step));
	OK(sluice_sparse_step_close(other));
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_wait(step, 0));
	OK(sluice_sparse_close(pool));
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_close(pool));
	TEXT("the pool was closed");
}

static void run_steps(void)
{
	sluice_sparse pool;
	sluice_sparse_step step;
	struct sluice_sparse_batch b = batch();
	struct sluice_sparse_config c = config();
	struct pollfd ready = {.events = POLLIN};
	uint32_t have, windows[2 * SETS * N];
	size_t count;
	int code;
	OK(sluice_sparse_open(&c, &pool, &have));
	OK(sluice_sparse_step_new(pool, far, STRIDE, NULL, &step));
	for (uint32_t i = 0; i < SETS * N; i++)
		entries[i] = i * 7 % PER_SET;
	OK(sluice_sparse_fd(step, &ready.fd));
	for (uint32_t round = 0; round < 50; round++) {
		entries[5] = SLUICE_SPARSE_NONE;
		b.page = round % 2 ? STRIDE << SHIFT : 0;
		OK(sluice_sparse_lookup(step, &b, &count));
		TRUE(counts[0] + counts[1] == count);
		TRUE(round ? count <= 2 : count == SETS * N - 1);
		OK(sluice_sparse_fetch(step, &base, 1));
		do // also where nothing was missed
			TRUE(poll(&ready, 1, 60000) == 1);
		while ((code = sluice_sparse_wait(step, 0)) == SLUICE_PENDING);
		OK(code);
		check();
		entries[round % N] = round * 131 % PER_SET;
		entries[N + round % N] = round * 71 % PER_SET;
	}

	// New entries: their bytes go into their slots, and from there to all others.
	OK(sluice_sparse_reset(pool, 0));
	b.counts = NULL;
	OK(sluice_sparse_lookup(step, &b, &count));
	TRUE(count > N / 2);
	for (size_t k = 0; k < count; k++)
		memset(near_bytes + (size_t)slots[missed[k]] * ENTRY, (int)(0xa0 + k), ENTRY);
	OK(sluice_sparse_store(step, &base, 1));
	OK(sluice_sparse_wait(step, SLUICE_FOREVER));
	TRUE(entry(missed[1])[ENTRY - 1] == 0xa1);
	check();

	// What a warm-up has brought is there.
	OK(sluice_sparse_reset(pool, 0));
	OK(sluice_sparse_reset(pool, 1));
	for (uint32_t i = 0; i < 2 * SETS * N; i++)
		windows[i] = i < SETS * N ? i * 5 % PER_SET : entries[i - SETS * N];
	b.entries = windows, b.missed = NULL;
	OK(sluice_sparse_warm(step, &b, 2, &count));
	TRUE(count > SETS * N);
	OK(sluice_sparse_fetch(step, &base, 1));
	OK(sluice_sparse_wait(step, LIMIT));
	b = batch();
	OK(sluice_sparse_lookup(step, &b, &count));
	TRUE(count == 0);
	check();

	// A lookup misses again what the step has aborted, or has not fetched.
	OK(sluice_sparse_reset(pool, 1));
	OK(sluice_sparse_lookup(step, &b, &count));
	OK(sluice_sparse_fetch(step, &base, 1));
	OK(sluice_sparse_abort(step, LIMIT));
	size_t before = count;
	OK(sluice_sparse_lookup(step, &b, &count));
	TRUE(count == before);
	OK(sluice_sparse_lookup(step, &b, &count));
	TRUE(count == before);

	// The engine ends, and with it all handles.
	OK(sluice_close(all.engine));
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_lookup(step, &b, &count));
	WANT(SLUICE_ERR_HANDLE, sluice_sparse_close(pool));
	TEXT("the pool was closed, or its engine was");
}

int main(void)
{
	all = open_end("node", "mem", (uint64_t)SETS * PER_SET * STRIDE);
	for (uint32_t i = 0; i < SETS * PER_SET; i++)
		memset(all.bytes + (size_t)i * STRIDE, (int)(i * 37 % 251), ENTRY);
	for (uint32_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
		blocks[i] = (uint32_t)(sizeof blocks / sizeof *blocks) - 1 - i;
	for (uint32_t i = 0; i <= SETS; i++)
		starts[i] = i * (PER_SET >> SHIFT);
	struct sluice_segment segment = {.size = sizeof segment, .kind = SLUICE_HOST,
					 .host = near_bytes, .length = sizeof near_bytes};
	OK(sluice_register(all.engine, "near", &segment, &near_region));
	OK(sluice_self(all.engine, &self));
	OK(sluice_remote_find(self, "data", &far));
	misuse();
	run_steps();
	OK(sluice_memory_close(all.memory));
	puts("ok");
	return 0;
}
