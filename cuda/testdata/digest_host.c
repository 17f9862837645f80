/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the kernel of digest.cu on the CPU, thread after thread, and compares with csrc/digest.
 * Built with sanitizers: each memory is a heap block of exactly its size. With an argument it
 * plants an error that they must catch.
 */
#define SL_HOST
#include "../digest.cu"

#include <errno.h>

#include "ring_host.h"

#include "../../csrc/digest/digest.h"

static uint64_t below(uint64_t n) { return n ? (uint64_t)rand() % n : 0; }

static uint64_t word(void) { return (uint64_t)rand() << 42 ^ (uint64_t)rand() << 21 ^ rand(); }

/* Cells in a memory, as csrc/digest takes them, and as the kernel does. */
struct test {
	struct sl_digest_cells c;
	struct sl_cells k;
	uint64_t *keys, *pieces; /* of csrc/digest; of the kernel */
	uint32_t *list;
	uint8_t *mem;
	uint64_t len;
};

static void draw_keys(struct test *t)
{
	uint64_t pairs = (t->c.cell + 7) / 8, padded = (t->c.cell + 15) / 16 * 2;

	t->keys = malloc(2 * pairs * 8);
	t->pieces = aligned_alloc(16, 2 * padded * 8);
	memset(t->pieces, 0x5a, 2 * padded * 8); /* what pads them is of no cell */
	for (uint64_t i = 0; i < pairs; i++) {
		t->pieces[2 * i] = t->keys[i] = word();
		t->pieces[2 * i + 1] = t->keys[pairs + i] = word();
	}
}

/* Cells that lie within a memory of the size that they take, but for slots that are too far. */
static void draw(struct test *t, uint64_t cell, uint64_t unit)
{
	struct sl_digest_cells *c = &t->c;
	uint64_t extent, slots, most, far = 0;

	*c = (struct sl_digest_cells){.cell = cell, .coord = word(), .turn = word(),
				      .s = {word(), word()}, .on = {word(), word()}};
	c->count = 1 + below(9);
	c->n[0] = 1 + below(4);
	c->n[1] = 1 + below(40);
	c->by[1] = (cell + unit - 1) / unit * unit + below(3) * unit;
	c->by[0] = c->n[1] * c->by[1] + below(3) * unit;
	if (below(3) == 0)
		c->by[0] = unit * below(5); /* rows that overlap */
	c->base = below(4) * unit;
	c->per = below(4);
	if (c->per > 1) {
		c->first = below(c->per);
		c->step = below(600) * unit;
	}
	c->stride = below(900) * unit;
	most = c->per > 1 ? c->per : 1;
	slots = (c->first + c->count + most - 1) / most;
	t->list = below(3) ? malloc(4 * slots) : NULL;
	for (uint64_t i = 0; i < slots; i++) {
		uint64_t slot = i;

		if (t->list)
			slot = t->list[i] = (uint32_t)below(12);
		far = slot > far ? slot : far;
	}
	extent = cell + (c->n[0] - 1) * c->by[0] + (c->n[1] - 1) * c->by[1];
	t->len = c->base + far * c->stride + (most - 1) * c->step + extent;
	if (t->list && below(4) == 0)
		t->list[below(slots)] = (uint32_t)word();
	if (posix_memalign((void **)&t->mem, 16, t->len))
		FAIL("no memory");
	for (uint64_t i = 0; i < t->len; i++)
		t->mem[i] = (uint8_t)(rand() >> 7);
	draw_keys(t);
	t->k.room = t->len - c->base - extent;
}

/* What Go fills in. */
static void fill(struct test *t, uint64_t unit)
{
	const struct sl_digest_cells *c = &t->c;
	uint64_t room = t->k.room, cells = c->count * c->n[0] * c->n[1];

	t->k = (struct sl_cells){.at = (uint64_t)t->mem + c->base, .room = room,
				 .list = (uint64_t)t->list, .stride = c->stride, .step = c->step,
				 .first = c->first, .per = c->per > 1 ? c->per : 1,
				 .coord = c->coord, .turn = c->turn, .n = {c->n[0], c->n[1]},
				 .by = {c->by[0], c->by[1]}, .on = {c->on[0], c->on[1]},
				 .cells = cells, .keys = (uint64_t)t->pieces,
				 .s = {c->s[0], c->s[1]}, .cell = (uint32_t)c->cell,
				 .width = unit == 2 ? 1 : (uint32_t)unit,
				 .threads = 1u << below(4)};
	t->k.slots = c->stride ? room / c->stride + 1 : ~0ull;
}

static struct sl_digest_total launch(struct sl_cells *list, uint32_t n)
{
	struct sl_digest_total total = {{0, 0}, 0};
	struct sl_digest d = {(uint64_t)list, (uint64_t)&total, n, 0};

	sl_at = (struct sl_at){0, 0, 32 * (1 + (uint32_t)below(3)), 1 + (uint32_t)below(3)};
	for (sl_at.bid = 0; sl_at.bid < sl_at.gdim; sl_at.bid++)
		for (sl_at.tid = 0; sl_at.tid < sl_at.bdim; sl_at.tid++)
			sl_digest_cells(d);
	return total;
}

static void let_go(struct test *t)
{
	free(t->keys);
	free(t->pieces);
	free(t->list);
	free(t->mem);
}

static int refused, summed;

/* Some tests by one launch. */
static void check(uint32_t n)
{
	static const uint64_t sizes[] = {1,   2,   3,	8,   12,  16,  24,  64,	 100,
					 128, 130, 132, 256, 576, 584, 656, 1152};
	struct test tests[4] = {0};
	struct sl_cells list[4];
	struct sl_digest_total want = {{0, 0}, 0}, got;
	int outside = 0;

	for (uint32_t i = 0; i < n; i++) {
		struct test *t = &tests[i];
		uint64_t unit = 1ull << below(5), out[3] = {0, 0, 0};

		draw(t, sizes[below(sizeof sizes / sizeof *sizes)], unit);
		fill(t, unit);
		list[i] = t->k;
		outside |= sl_digest(t->mem, t->len, t->list, &t->c, t->keys, SL_DIGEST_BEST,
				     out) == -ERANGE;
		want.sum[0] += out[0];
		want.sum[1] += out[1];
	}
	got = launch(list, n);
	if (!got.outside != !outside)
		FAIL("%llu cells outside, csrc/digest says %d", got.outside, outside);
	if (!outside && memcmp(&got, &want, sizeof got))
		FAIL("%u kinds of cells, the first of %u bytes: the sums differ", n, list[0].cell);
	for (uint32_t i = 0; i < n; i++)
		let_go(&tests[i]);
	*(outside ? &refused : &summed) += 1;
}

/* Lies about the room, the slots, the length of a list, that of the keys, or the alignment. */
static void plant(const char *what)
{
	struct test t = {0};
	struct sl_cells *k = &t.k;

	t.c = (struct sl_digest_cells){.cell = 656, .stride = 656, .count = 1, .n = {1, 1}};
	t.len = 656;
	if (posix_memalign((void **)&t.mem, 16, t.len))
		FAIL("no memory");
	t.list = malloc(4);
	t.list[0] = 0;
	draw_keys(&t);
	fill(&t, 16);
	if (strcmp(what, "room") == 0)
		k->room = k->step = 1, k->per = 2, k->first = 1, k->width = 1;
	if (strcmp(what, "slots") == 0)
		t.list[0] = 1, k->slots = 2, k->room = 656;
	if (strcmp(what, "list") == 0)
		k->cells = 2;
	if (strcmp(what, "keys") == 0)
		k->cell = 655, t.pieces = realloc(t.pieces, 81 * 16), k->keys = (uint64_t)t.pieces;
	if (strcmp(what, "alignment") == 0)
		k->at += 8, k->cell = 640;
	launch(k, 1);
	FAIL("no check saw the planted %s", what);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		plant(argv[1]);
	srand(1);
	for (int i = 0; i < 1000; i++)
		check(1 + (uint32_t)below(4));
	printf("%d summed, %d refused\n", summed, refused);
	return 0;
}
