// SPDX-License-Identifier: Apache-2.0
// Blocks whose heads and tokens lie in another order at the peer, by a nest of loops.
#include "check.h"

enum { BLOCKS = 8, HEADS = 4, TOKENS = 16, CELL = 64, BLOCK = HEADS * TOKENS * CELL };

// Where a cell lies: here heads within tokens, there tokens within heads.
static size_t here(size_t block, size_t head, size_t token)
{
	return block * BLOCK + (token * HEADS + head) * CELL;
}
static size_t there(size_t block, size_t head, size_t token)
{
	return block * BLOCK + (head * TOKENS + token) * CELL;
}

static void wrong(sluice_transfer t, struct end *a, sluice_remote remote, struct sluice_pattern p)
{
	struct sluice_pattern q = p;
	q.loops_count = 4;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, remote, &q));
	TEXT("4 loops, at most 3");
	q = p, q.count = 0;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, remote, &q));
	q = p, q.loops[0].n = BLOCKS * TOKENS + 1;
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add_pattern(t, a->region, remote, &q));
	q = p, q.loops[1].n = 0;
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add_pattern(t, a->region, remote, &q));
	q = p, q.remote.base = UINT64_MAX;
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add_pattern(t, a->region, remote, &q));
	q = p, q.local.first = 1;
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add_pattern(t, a->region, remote, &q));
	q = p, q.loops[0].reserved = 1;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, remote, &q));
	q = p, q.size = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, remote, &q));
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, remote, NULL));
	WANT(SLUICE_ERR_BOUNDS, sluice_post(t)); // nothing is listed
}

int main(void)
{
	struct end a = open_end("a", "shm", BLOCKS * BLOCK),
		   b = open_end("b", "shm", BLOCKS * BLOCK);
	sluice_remote remote;
	sluice_peer peer = connect_ends(&a, &b, &remote);
	uint32_t from[] = {5, 0, 7}, to[] = {1, 6, 2};
	for (size_t i = 0; i < BLOCKS * BLOCK; i++)
		a.bytes[i] = (unsigned char)(i / CELL * 31 + i);
	struct sluice_pattern p = {.size = sizeof p,
				   .count = 3,
				   .run = CELL,
				   .loops_count = 2,
				   .loops = {{.n = HEADS, .local = CELL, .remote = TOKENS * CELL},
					     {.n = TOKENS, .local = HEADS * CELL, .remote = CELL}},
				   .local = {.stride = BLOCK, .list = from},
				   .remote = {.stride = BLOCK, .list = to}};
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	wrong(t, &a, remote, p);
	OK(sluice_transfer_add_pattern(t, a.region, remote, &p));
	OK(sluice_post_and_wait(t, LIMIT));
	for (size_t i = 0; i < 3; i++)
		for (size_t head = 0; head < HEADS; head++)
			for (size_t token = 0; token < TOKENS; token++)
				TRUE(!memcmp(b.bytes + there(to[i], head, token),
					     a.bytes + here(from[i], head, token), CELL));
	TRUE(b.bytes[0] == 0 && b.bytes[3 * BLOCK + 9] == 0);

	// Slots of two entries here, of one there, from the second entry of the first slot on.
	OK(sluice_reset(t));
	struct sluice_pattern halves =
	    {.size = sizeof halves,
	     .count = 3,
	     .run = CELL,
	     .local = {.stride = BLOCK, .step = BLOCK / 2, .first = 1, .per = 2, .list = from},
	     .remote = {.base = 3 * BLOCK, .stride = CELL}};
	OK(sluice_transfer_add_pattern(t, a.region, remote, &halves));
	OK(sluice_post_and_wait(t, LIMIT));
	size_t want[] = {5 * BLOCK + BLOCK / 2, 0, BLOCK / 2};
	for (size_t i = 0; i < 3; i++)
		TRUE(!memcmp(b.bytes + 3 * BLOCK + i * CELL, a.bytes + want[i], CELL));
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
