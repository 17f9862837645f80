/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the kernels of gather.cu on the CPU, thread after thread, and compares all of the
 * destination, gaps included, with the obvious loop. Built with sanitizers: each array has
 * a heap block of exactly its size. With an argument it plants an error that they must catch.
 */
#define SL_HOST
#include "../gather.cu"

#include "ring_host.h"

/* One memory: a heap block whose first place is `skew` bytes behind a line. */
struct memory {
	char *block;
	uint64_t bytes, skew;
};

static struct memory memory(uint64_t places, uint64_t stride, uint64_t entry, uint64_t skew)
{
	struct memory m = {0, skew + (places - 1) * stride + entry, skew};

	if (posix_memalign((void **)&m.block, 128, m.bytes))
		FAIL("no memory");
	for (uint64_t i = 0; i < m.bytes; i++)
		m.block[i] = (char)(rand() >> 7);
	return m;
}

enum { NONE, NARROW, WIDE, KINDS };

/* A list of n places of `places`, with a skip and bad ones where there is room. */
static void *list(int kind, uint64_t n, uint64_t places)
{
	uint64_t *order = calloc(places, 8), *wide = malloc(8 * n);
	uint32_t *narrow = malloc(4 * n);

	for (uint64_t i = 0; i < places; i++)
		order[i] = i;
	for (uint64_t i = 0; i < n; i++) {
		uint64_t j = i + (uint64_t)rand() % (places - i), v = order[j];

		order[j] = order[i];
		order[i] = v;
		if (i % 7 == 3)
			v = SL_SKIP;
		else if (i % 11 == 5)
			v = places + (uint64_t)rand() % 3 * places;
		else if (i % 13 == 6)
			v = 0xfffffffe;
		else if (i % 17 == 9 && kind == WIDE)
			v |= 1ull << 32; /* the lower half is a place */
		wide[i] = v;
		narrow[i] = (uint32_t)v;
	}
	free(order);
	free(kind == WIDE ? (void *)narrow : wide);
	if (kind == NONE)
		free(narrow);
	return kind == WIDE ? (void *)wide : kind == NARROW ? narrow : NULL;
}

static uint64_t index_of(const void *l, int kind, uint64_t i)
{
	if (kind == NONE)
		return i;
	if (kind == WIDE)
		return ((const uint64_t *)l)[i];
	return ((const uint32_t *)l)[i] == ~0u ? SL_SKIP : ((const uint32_t *)l)[i];
}

/* A case: what is moved, and what must come out. */
struct test {
	struct sl_move m;
	int dst_kind, src_kind;
	struct memory dst[2], src[2];
	char *want[2];
	struct sl_tally tally;
};

static void obvious(struct test *t)
{
	t->tally = (struct sl_tally){0, 0, SL_SKIP};
	for (uint64_t i = 0; i < t->m.count; i++) {
		uint64_t d = index_of((void *)t->m.dst_index, t->dst_kind, i),
			 s = index_of((void *)t->m.src_index, t->src_kind, i);

		if (d == SL_SKIP || s == SL_SKIP) {
			t->tally.skipped++;
		} else if (d >= t->m.dst_places || s >= t->m.src_places) {
			t->tally.bad++;
			t->tally.first_bad = i < t->tally.first_bad ? i : t->tally.first_bad;
		} else {
			for (uint32_t k = 0; k < t->m.parts; k++)
				memcpy(t->want[k] + t->dst[k].skew + d * t->m.part[k].dst_stride,
				       (char *)t->m.part[k].src + s * t->m.part[k].src_stride,
				       t->m.part[k].entry);
		}
	}
}

static void launch(struct test *t, void (*kernel)(struct sl_move), uint32_t blocks,
		   uint32_t threads, const char *what)
{
	struct sl_tally got = {0, 0, SL_SKIP};
	char *before[2];

	for (uint32_t k = 0; k < t->m.parts; k++) {
		before[k] = malloc(t->dst[k].bytes);
		memcpy(before[k], t->dst[k].block, t->dst[k].bytes);
	}
	t->m.tally = (uint64_t)&got;
	sl_at = (struct sl_at){0, 0, threads, blocks};
	for (sl_at.bid = 0; sl_at.bid < blocks; sl_at.bid++)
		for (sl_at.tid = 0; sl_at.tid < threads; sl_at.tid++) {
			kernel(t->m);
			ring_thread(what);
		}
	for (uint32_t k = 0; k < t->m.parts; k++) {
		if (memcmp(t->dst[k].block, t->want[k], t->dst[k].bytes))
			FAIL("%s: %llu entries of %u, strides %llu and %llu, lists %d and %d, %u x "
			     "%u threads: part %u differs",
			     what, t->m.count, t->m.part[k].entry, t->m.part[k].dst_stride,
			     t->m.part[k].src_stride, t->dst_kind, t->src_kind, blocks, threads, k);
		memcpy(t->dst[k].block, before[k], t->dst[k].bytes);
		free(before[k]);
	}
	if (memcmp(&got, &t->tally, sizeof got))
		FAIL("%s: %llu skipped, %llu bad, first %llu; want %llu, %llu, %llu", what,
		     got.skipped, got.bad, got.first_bad, t->tally.skipped, t->tally.bad,
		     t->tally.first_bad);
}

static int runs;

static void async(struct test *t)
{
	sl_u32 size = slot_of(&t->m.part[0]);

	if (t->m.parts > 1 && slot_of(&t->m.part[1]) > size)
		size = slot_of(&t->m.part[1]);
	for (int late = 0; late < 2; late++)
		for (uint32_t warps = 1; warps < 3; warps++) {
			ring_begin(warps * SL_AHEAD * size, late);
			launch(t, sl_move_async, 3 - warps, 32 * warps, "async");
			ring_end();
			runs++;
		}
}

static uint32_t width(uint64_t all) { return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : 4; }

/* Parts of the given sizes, the second 0 for none. */
static void check(const uint32_t *entry, uint32_t pad, uint32_t skew, uint64_t n, int dst_kind,
		  int src_kind)
{
	uint64_t places = 2 * n + 1;
	struct test t = {.dst_kind = dst_kind, .src_kind = src_kind};

	t.m.parts = entry[1] ? 2 : 1;
	t.m.count = n;
	t.m.dst_places = dst_kind == NONE && n > 4 ? n - 2 : places;
	t.m.src_places = places;
	t.m.dst_index = (uint64_t)list(dst_kind, n, t.m.dst_places < n ? n : t.m.dst_places);
	t.m.src_index = (uint64_t)list(src_kind, n, places);
	t.m.flags = (dst_kind == WIDE ? SL_DST_WIDE : 0) | (src_kind == WIDE ? SL_SRC_WIDE : 0) |
		    (n % 2 ? SL_FAR_DST : 0);
	for (uint32_t k = 0; k < t.m.parts; k++) {
		struct sl_part *p = &t.m.part[k];

		p->entry = entry[k];
		p->dst_stride = entry[k] + pad;
		p->src_stride = entry[k] + 2 * pad;
		p->width = width(entry[k] | pad | skew);
		t.dst[k] = memory(t.m.dst_places, p->dst_stride, entry[k], skew);
		t.src[k] = memory(places, p->src_stride, entry[k], skew);
		p->dst = (uint64_t)t.dst[k].block + skew;
		p->src = (uint64_t)t.src[k].block + skew;
		t.want[k] = malloc(t.dst[k].bytes);
		memcpy(t.want[k], t.dst[k].block, t.dst[k].bytes);
	}
	obvious(&t);
	launch(&t, sl_move_rows, 1, 32, "rows");
	launch(&t, sl_move_rows, 3, 64, "rows");
	runs += 2;
	async(&t);
	for (uint32_t k = 0; k < t.m.parts; k++) {
		free(t.dst[k].block);
		free(t.src[k].block);
		free(t.want[k]);
	}
	free((void *)t.m.dst_index);
	free((void *)t.m.src_index);
}

/* One side of a nest: its memory, its list, and where run `run` of entry `entry` lies. */
struct nest_side {
	uint64_t stride, step, loop[SL_LOOPS_MAX];
	uint32_t per, first;
	uint64_t places;
	uint32_t *list;
	struct memory m;
};

static uint64_t four(uint64_t below, uint32_t unit) { return (uint64_t)rand() % below * unit; }

/* Places in which nothing overlaps, where the side is written to. */
static struct nest_side nest_side(uint32_t count, const uint32_t *loop, uint64_t run, uint32_t unit)
{
	struct nest_side s = {0};
	uint64_t reach = run, order;

	for (int k = SL_LOOPS_MAX - 1; k >= 0; k--) {
		s.loop[k] = reach + four(3, unit);
		reach += (loop[k] - 1) * s.loop[k];
	}
	s.per = 1 + (uint32_t)rand() % 4;
	s.first = (uint32_t)rand() % s.per;
	s.step = reach + four(3, unit);
	reach += (s.per - 1) * s.step;
	s.stride = reach + four(5, unit);
	s.places = (s.first + count + s.per - 1) / s.per;
	s.m = memory(s.places, s.stride, reach, unit);
	if (rand() % 2)
		return s;
	s.list = malloc(s.places * sizeof *s.list);
	for (uint32_t i = 0; i < s.places; i++)
		s.list[i] = i;
	for (uint32_t i = 0; i < s.places; i++) {
		uint32_t j = (uint32_t)rand() % (uint32_t)s.places, was = s.list[i];

		s.list[i] = s.list[j];
		s.list[j] = was;
	}
	order = (uint64_t)rand() % 3;
	if (order == 0)
		s.list[(uint32_t)rand() % s.places] = ~0u;
	if (order == 1)
		s.list[(uint32_t)rand() % s.places] = (uint32_t)s.places;
	return s;
}

/* The index of a place, or what is none. */
static uint64_t nest_place(const struct nest_side *s, uint32_t entry)
{
	uint64_t place = (s->first + entry) / s->per;

	if (!s->list)
		return place;
	return s->list[place] == ~0u ? SL_SKIP : s->list[place];
}

static uint64_t nest_off(const struct nest_side *s, uint32_t entry, const uint32_t *round)
{
	uint64_t off =
	    s->m.skew + nest_place(s, entry) * s->stride + (s->first + entry) % s->per * s->step;

	for (int k = 0; k < SL_LOOPS_MAX; k++)
		off += round[k] * s->loop[k];
	return off;
}

static void obvious_nest(const struct sl_nested *n, const struct nest_side *dst,
			 const struct nest_side *src, char *want, struct sl_tally *tally)
{
	const uint32_t *loop = n->nest.loop;
	uint32_t round[SL_LOOPS_MAX];

	for (uint64_t e = 0; e < n->move.count; e++) {
		uint32_t entry = (uint32_t)e / n->nest.runs, run = (uint32_t)e % n->nest.runs;
		uint64_t d = nest_place(dst, entry), s = nest_place(src, entry);

		round[0] = run / loop[2] / loop[1];
		round[1] = run / loop[2] % loop[1];
		round[2] = run % loop[2];
		if (d == SL_SKIP || s == SL_SKIP) {
			tally->skipped++;
		} else if (d >= dst->places || s >= src->places) {
			tally->bad++;
			tally->first_bad = e < tally->first_bad ? e : tally->first_bad;
		} else {
			memcpy(want + nest_off(dst, entry, round),
			       src->m.block + nest_off(src, entry, round), n->move.part[0].entry);
		}
	}
}

/* A random nest, whose bytes must all come out as the obvious loops have it. */
static void check_nest(void)
{
	static const uint32_t units[] = {4, 8, 16};
	uint32_t unit = units[rand() % 3], run = (1 + (uint32_t)rand() % 50) * unit,
		 count = 1 + (uint32_t)rand() % 9;
	uint32_t threads = rand() % 2 ? 32 : 64, blocks = 1 + (uint32_t)rand() % 3;
	struct sl_nested n = {.move = {.parts = 1, .flags = rand() % 2 ? SL_FAR_DST : 0}};
	struct sl_tally want = {0, 0, SL_SKIP}, got = want;
	struct nest_side dst, src;
	char *expect;

	n.nest.runs = 1;
	for (int k = 0; k < SL_LOOPS_MAX; k++)
		n.nest.runs *= n.nest.loop[k] = 1 + (uint32_t)rand() % 4;
	dst = nest_side(count, n.nest.loop, run, unit);
	src = nest_side(count, n.nest.loop, run, unit);
	memcpy(n.nest.dst_loop, dst.loop, sizeof dst.loop);
	memcpy(n.nest.src_loop, src.loop, sizeof src.loop);
	n.nest.dst_step = dst.step, n.nest.dst_per = dst.per, n.nest.dst_first = dst.first;
	n.nest.src_step = src.step, n.nest.src_per = src.per, n.nest.src_first = src.first;
	n.move.part[0] = (struct sl_part){(uint64_t)dst.m.block + unit,
					  (uint64_t)src.m.block + unit,
					  dst.stride,
					  src.stride,
					  run,
					  unit};
	n.move.dst_places = dst.places, n.move.src_places = src.places;
	n.move.dst_index = (uint64_t)dst.list, n.move.src_index = (uint64_t)src.list;
	n.move.count = (uint64_t)count * n.nest.runs;
	n.move.tally = (uint64_t)&got;
	expect = malloc(dst.m.bytes);
	memcpy(expect, dst.m.block, dst.m.bytes);
	obvious_nest(&n, &dst, &src, expect, &want);
	sl_at = (struct sl_at){0, 0, threads, blocks};
	for (sl_at.bid = 0; sl_at.bid < blocks; sl_at.bid++)
		for (sl_at.tid = 0; sl_at.tid < threads; sl_at.tid++)
			sl_move_nest(n);
	if (memcmp(expect, dst.m.block, dst.m.bytes) || memcmp(&got, &want, sizeof got))
		FAIL("nest: %u entries of %u runs of %u bytes differ", count, n.nest.runs, run);
	free(expect);
	free(dst.m.block);
	free(src.m.block);
	free(dst.list);
	free(src.list);
	runs++;
}

/* Lies about the number of places of a side, the length of a list, or the alignment. */
static void plant(const char *what)
{
	struct memory dst = memory(4, 656, 656, 0), src = memory(4, 656, 656, 0);
	uint32_t *index = malloc(sizeof *index);
	struct sl_tally tally = {0, 0, SL_SKIP};
	struct sl_move m = {.dst_places = 5,
			    .src_places = 5,
			    .count = 1,
			    .parts = 1};
	void (*kernel)(struct sl_move) = strncmp(what, "async", 5) ? sl_move_rows : sl_move_async;

	*index = strstr(what, "index") ? 4 : 0;
	m.part[0] = (struct sl_part){(uint64_t)dst.block, (uint64_t)src.block, 656, 656, 656, 16};
	if (strcmp(what, "alignment") == 0) {
		m.part[0].src += 8;
		m.part[0].entry = 640;
	}
	if (strcmp(what, "list") == 0)
		m.count = 2;
	*(strstr(what, "dst") ? &m.dst_index : &m.src_index) = (uint64_t)index;
	m.tally = (uint64_t)&tally;
	ring_begin(SL_AHEAD * slot_of(&m.part[0]), 0);
	sl_at = (struct sl_at){0, 0, 32, 1};
	for (; sl_at.tid < 32; sl_at.tid++)
		kernel(m);
	FAIL("no check saw the planted %s", what);
}

int main(int argc, char **argv)
{
	static const uint32_t entries[][2] = {{4},	  {12},	      {16},	 {24},	 {128},
					      {132},	  {576},      {584},	 {640},	 {656},
					      {788},	  {1024},     {1040},	 {1152}, {656, 132},
					      {132, 656}, {512, 128}, {1152, 16}, {16, 1152}};
	static const uint64_t counts[] = {0, 3, 40};

	if (argc > 1)
		plant(argv[1]);
	srand(1);
	for (unsigned e = 0; e < sizeof entries / sizeof *entries; e++)
		for (uint32_t pad = 0; pad <= 112; pad += pad ? 104 : 8)
			for (uint32_t skew = 0; skew <= 112; skew += 56)
				for (unsigned c = 0; c < sizeof counts / sizeof *counts; c++)
					for (int kinds = 0; kinds < KINDS * KINDS; kinds++)
						check(entries[e], pad, skew, counts[c],
						      kinds / KINDS, kinds % KINDS);
	for (int i = 0; i < 400; i++)
		check_nest();
	printf("%d launches\n", runs);
	return 0;
}
