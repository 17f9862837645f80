/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the kernels of sparse.cu on the CPU and compares all that they write with csrc/sparse, which
 * looks the same batches up in a table of the same contents. Built with sanitizers: each list is a
 * heap block of exactly its size. With an argument it plants an error that must come out.
 */
#define SL_HOST
#include "../sparse.cu"

#include "block_host.h"

#include "../../csrc/sparse/sparse.h"

static uint32_t below(uint32_t n) { return n ? (uint32_t)rand() % n : 0; }

static uint32_t word(void) { return (uint32_t)rand() << 16 ^ (uint32_t)rand(); }

/* Lists of one side, which the other has, too. */
enum { TAGS, STAMPS, BEYOND, CLOCKS, SLOTS, COUNTS, INTO, FROM, PLACE, LISTS };

struct side {
	char *list[LISTS];
};

struct test {
	uint32_t groups, all, count, n, shift, nblocks, range, crowd;
	uint32_t *sets, *entries, *blocks, *starts; /* of the batch */
	uint16_t *used;
	size_t bytes[LISTS];
	struct side c, k; /* of csrc/sparse, and of the kernels */
	struct sl_lookup_bad bad;
};

static uint64_t ticks, missed, refused;

static void both(struct test *t, int list, size_t bytes, int fill)
{
	free(t->c.list[list]);
	free(t->k.list[list]);
	t->bytes[list] = bytes;
	t->c.list[list] = malloc(bytes);
	t->k.list[list] = malloc(bytes);
	memset(t->c.list[list], fill, bytes);
	memset(t->k.list[list], fill, bytes);
}

static uint32_t home_of(const struct test *t, uint32_t entry)
{
	return (uint32_t)((uint64_t)(entry * 0x9e3779b1u) * t->groups >> 32);
}

/* A table in which nothing is, or, wild, with stamps and counts that no lookup has made. */
static void draw_table(struct test *t, int wild)
{
	size_t slots;

	t->groups = 2 + below(below(12) ? 3 : 24);
	t->all = 1 + below(4);
	slots = (size_t)t->all * t->groups * SL_SPARSE_WAYS;
	both(t, TAGS, slots * 4, 0xff);
	both(t, STAMPS, slots * 2, 0);
	both(t, BEYOND, slots / SL_SPARSE_WAYS, 0);
	both(t, CLOCKS, t->all * 2, 0);
	for (uint32_t i = 0; i < t->all; i++) /* the last tick is near, or not */
		((uint16_t *)t->c.list[CLOCKS])[i] = (uint16_t)(below(2) ? 65535 - below(6) : 0);
	for (size_t i = 0; wild && i < slots; i++)
		((uint16_t *)t->c.list[STAMPS])[i] = (uint16_t)word();
	for (size_t i = 0; wild && i < t->bytes[BEYOND]; i++)
		t->c.list[BEYOND][i] = (char)(below(2) ? 250 + below(6) : below(3));
	for (int i = TAGS; i <= CLOCKS; i++)
		memcpy(t->k.list[i], t->c.list[i], t->bytes[i]);
	t->used = calloc(t->groups, sizeof *t->used);
	t->range = 1 + below(t->groups * SL_SPARSE_WAYS * (1 + below(6)));
	t->crowd = below(3) ? 0 : 1 + below(t->groups);
}

static uint32_t draw_entry(const struct test *t)
{
	uint32_t entry = below(t->range);

	if (below(20) == 0)
		return SL_SPARSE_NONE;
	while (t->crowd && home_of(t, entry) != t->crowd - 1) /* all of one home */
		entry++;
	return entry;
}

static void draw_batch(struct test *t)
{
	uint32_t each;

	t->sets = realloc(t->sets, t->all * 4);
	t->count = 0;
	for (uint32_t i = 0; i < t->all; i++)
		if (below(3) || (i + 1 == t->all && !t->count))
			t->sets[t->count++] = i;
	t->sets = realloc(t->sets, t->count * 4);
	t->n = 1 + below(t->groups * SL_SPARSE_WAYS / (below(3) ? 2 : 1));
	t->entries = realloc(t->entries, (size_t)t->count * t->n * 4);
	t->shift = below(8);
	each = ((t->range + 64 * t->groups) >> t->shift) + 1; /* a crowd goes past the range */
	t->nblocks = t->count * each;
	t->blocks = realloc(t->blocks, (size_t)t->nblocks * 4);
	t->starts = realloc(t->starts, (t->count + 1) * 4);
	for (uint32_t i = 0; i <= t->count; i++)
		t->starts[i] = i * each;
	for (uint32_t i = 0; i < t->nblocks; i++)
		t->blocks[i] = word() >> below(2) * 8;
	for (uint32_t i = 0; i < t->count * t->n; i++)
		t->entries[i] = draw_entry(t);
	if (below(12) == 0) { /* one behind its blocks, or two */
		t->entries[below(t->count * t->n)] = each << t->shift;
		t->entries[below(t->count * t->n)] = below(2) ? SL_SPARSE_NONE - 1 : 0;
	}
	both(t, SLOTS, (size_t)t->count * t->n * 4, 0x5a);
	both(t, COUNTS, t->count * 4, 0x5a);
	for (int i = INTO; i <= PLACE; i++)
		both(t, i, (size_t)t->count * t->n * 4, 0x5a);
}

static void run_sets(const void *args) { sl_lookup_sets(*(const struct sl_lookup *)args); }

static void launch(struct test *t)
{
	char **k = t->k.list;
	struct sl_lookup a = {(uint64_t)k[TAGS], (uint64_t)k[STAMPS], (uint64_t)k[BEYOND],
			      (uint64_t)k[CLOCKS], (uint64_t)t->sets, (uint64_t)t->entries,
			      (uint64_t)t->blocks, (uint64_t)t->starts, (uint64_t)k[SLOTS],
			      (uint64_t)k[COUNTS], (uint64_t)k[INTO], (uint64_t)k[FROM],
			      (uint64_t)k[PLACE], (uint64_t)&t->bad, t->groups, t->all, t->count,
			      t->n, t->shift, t->nblocks};

	t->bad = (struct sl_lookup_bad){SL_SKIP, SL_SKIP};
	sl_at = (struct sl_at){0, 0, 32 * (1 + below(3)), 1 + below(3)};
	for (sl_at.bid = 0; sl_at.bid < sl_at.gdim; sl_at.bid++)
		for (sl_at.tid = 0; sl_at.tid < sl_at.bdim; sl_at.tid++)
			sl_lookup_check(a);
	sl_at.tid = 0;
	for (sl_at.bid = 0; sl_at.bid < sl_at.gdim; sl_at.bid++)
		block_run(run_sets, &a);
}

/* Each list of the kernels' side is that of csrc/sparse, whose misses stand compact. */
static void compare(struct test *t)
{
	static const char *const names[LISTS] = {"tags",   "stamps",   "beyond", "clocks", "slots",
						 "counts", "miss_slots", "miss_from", "miss_at"};
	uint32_t *counts = (uint32_t *)t->c.list[COUNTS], from = 0;

	for (int i = TAGS; i <= COUNTS; i++)
		if (memcmp(t->c.list[i], t->k.list[i], t->bytes[i]))
			FAIL("%s differ: %u sets of %u groups, %u entries each", names[i], t->count,
			     t->groups, t->n);
	for (uint32_t i = 0; i < t->count; i++) {
		for (int list = INTO; list <= PLACE; list++)
			if (memcmp(t->c.list[list] + from * 4,
				   t->k.list[list] + (size_t)i * t->n * 4, counts[i] * 4))
				FAIL("%s of set %u differ", names[list], i);
		from += counts[i];
	}
	missed += from;
	ticks += t->count;
}

static void unchanged(const struct test *t, const struct side *before)
{
	for (int i = 0; i < LISTS; i++)
		if (memcmp(before->list[i], t->k.list[i], t->bytes[i]))
			FAIL("a batch that was refused has changed list %d", i);
	refused++;
}

static void look_up(struct test *t)
{
	char **c = t->c.list;
	struct sl_sparse_table table = {(uint32_t *)c[TAGS], (uint16_t *)c[STAMPS],
					(uint8_t *)c[BEYOND], (uint16_t *)c[CLOCKS], t->groups};
	struct sl_sparse_batch b = {t->sets, t->entries, t->blocks, t->starts,
				    (uint32_t *)c[SLOTS], (uint32_t *)c[COUNTS], t->count, t->n,
				    t->shift};
	struct sl_sparse_misses m = {(uint32_t *)c[INTO], (uint32_t *)c[FROM],
				     (uint32_t *)c[PLACE], t->used};
	int64_t got;

	got = sl_sparse_lookup(&table, &b, &m, SL_SPARSE_BEST);
	launch(t);
	if (t->bad.set != SL_SKIP || t->bad.entry != (got < 0 ? (uint64_t)(-1 - got) : SL_SKIP))
		FAIL("set %lld, entry %lld refused, csrc/sparse says %lld", (long long)t->bad.set,
		     (long long)t->bad.entry, (long long)got);
	if (got < 0)
		unchanged(t, &t->c);
	else
		compare(t);
}

/* Empties slots, as Table.Forget, of both. */
static void forget(struct test *t)
{
	uint32_t *tags = (uint32_t *)t->c.list[TAGS], slots = t->groups * SL_SPARSE_WAYS;
	uint8_t *beyond = (uint8_t *)t->c.list[BEYOND];

	for (uint32_t some = below(slots); some; some--) {
		uint32_t slot = below(t->all * slots), set = slot / slots;

		if (tags[slot] == SL_SPARSE_NONE)
			continue;
		for (uint32_t h = home_of(t, tags[slot]); h != slot % slots / SL_SPARSE_WAYS;
		     h = h + 1 == t->groups ? 0 : h + 1)
			if (beyond[set * t->groups + h] != UINT8_MAX)
				beyond[set * t->groups + h]--;
		tags[slot] = SL_SPARSE_NONE;
	}
	memcpy(t->k.list[TAGS], tags, t->bytes[TAGS]);
	memcpy(t->k.list[BEYOND], beyond, t->bytes[BEYOND]);
}

/* Sets and blocks that Go refuses, and here the kernel must. */
static void check_sets(struct test *t)
{
	uint32_t at = below(t->count), good = t->sets[at], start = t->starts[at + 1];
	uint64_t want = at;

	switch (below(4)) {
	case 0:
		t->sets[at] = t->all + below(2) * (word() >> 1);
		break;
	case 1:
		if (!at)
			return;
		t->sets[at] = t->sets[at - 1] - below(2 * (t->sets[at - 1] > 0));
		break;
	case 2:
		t->starts[at + 1] = t->nblocks + 1;
		break;
	case 3:
		if (!t->starts[at])
			return;
		t->starts[at + 1] = t->starts[at] - 1;
		break;
	}
	launch(t);
	if (t->bad.set != want)
		FAIL("set %lld refused, want %lld", (long long)t->bad.set, (long long)want);
	t->sets[at] = good, t->starts[at + 1] = start;
	unchanged(t, &t->c);
}

static void let_go(struct test *t)
{
	for (int i = 0; i < LISTS; i++) {
		free(t->c.list[i]);
		free(t->k.list[i]);
	}
	free(t->sets);
	free(t->entries);
	free(t->blocks);
	free(t->starts);
	free(t->used);
}

static void check(void)
{
	struct test t = {0};

	draw_table(&t, below(4) == 0);
	for (uint32_t tick = 0; tick < 6; tick++) {
		draw_batch(&t);
		if (below(10) == 0)
			check_sets(&t);
		look_up(&t);
		if (below(3) == 0)
			forget(&t);
	}
	let_go(&t);
}

/* Lies about the number of sets, of blocks or of entries, or has no barrier. */
static void plant(const char *what)
{
	struct test t = {0};

	block.no_barrier = strcmp(what, "barrier") == 0;
	for (int i = 0; block.no_barrier && i < 100; i++)
		check();
	draw_table(&t, 0);
	t.all = 1;
	draw_batch(&t);
	for (uint32_t i = 0; i < t.count * t.n; i++)
		t.entries[i] = (t.nblocks << t.shift) - 1;
	if (strcmp(what, "sets") == 0) {
		both(&t, TAGS, (size_t)t.groups * SL_SPARSE_WAYS * 4, 0xff);
		t.all = 2, t.sets[0] = 1;
	}
	if (strcmp(what, "blocks") == 0)
		t.blocks = realloc(t.blocks, (t.nblocks - 1) * 4);
	if (strcmp(what, "entries") == 0)
		t.entries = realloc(t.entries, (t.n - 1) * 4);
	if (strcmp(what, "misses") == 0)
		t.k.list[INTO] = realloc(t.k.list[INTO], 2);
	launch(&t);
	FAIL("no check saw the planted %s", what);
}

int main(int argc, char **argv)
{
	srand(1);
	if (argc > 1)
		plant(argv[1]);
	for (int i = 0; i < 400; i++)
		check();
	printf("%llu sets, %llu misses, %llu refused\n", (unsigned long long)ticks,
	       (unsigned long long)missed, (unsigned long long)refused);
	return 0;
}
