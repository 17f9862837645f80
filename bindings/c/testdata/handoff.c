// SPDX-License-Identifier: Apache-2.0
// Two prefill ranks with half of the heads each hand a request over to one decode rank, and every
// byte arrives. Then a request that the decode ends.
#include <poll.h>

#include "check.h"

enum { LAYERS = 2, BLOCKS = 4, TOKENS = 4, CELL = 64, RANKS = 2 }; // TOKENS of a block

// K alone, with tokens outside heads: a rank has HEADS of the RANKS heads.
static int side(char *text, size_t room, int rank, int heads)
{
	int n = snprintf(text, room,
			 "{\"version\": 1, \"model\": \"m\", \"rank\": %d, "
			 "\"regions\": [{\"name\": \"data\", \"bytes\": %d}], "
			 "\"groups\": [{\"blocks\": %d}], \"views\": [",
			 rank, LAYERS * BLOCKS * TOKENS * heads * CELL, BLOCKS);
	for (int layer = 0; layer < LAYERS; layer++)
		n += snprintf(text + n, room - n,
			      "%s{\"layer\": %d, \"part\": \"k\", \"dtype\": \"bytes\", "
			      "\"cell\": %d, \"units\": %d, \"first\": %d, \"count\": %d, "
			      "\"tokens\": %d, "
			      "\"base\": %d, \"block\": %d, \"unit\": %d, \"token\": %d}",
			      layer ? ", " : "", layer, CELL, RANKS, rank, heads, TOKENS,
			      layer * BLOCKS * TOKENS * heads * CELL, TOKENS * heads * CELL, CELL,
			      heads * CELL);
	return n + snprintf(text + n, room - n, "]}");
}

static void write_plan(char *text, size_t room)
{
	int n = snprintf(text, room, "{\"senders\": [");
	for (int rank = 0; rank < RANKS; rank++) {
		n += snprintf(text + n, room - n, "%s", rank ? ", " : "");
		n += side(text + n, room - n, rank, 1);
	}
	n += snprintf(text + n, room - n, "], \"receivers\": [");
	n += side(text + n, room - n, 0, RANKS);
	snprintf(text + n, room - n, "]}");
}

// Where a token's cell of a head lies on a rank with so many heads.
static unsigned char *cell(unsigned char *bytes, const uint32_t *table, int layer, int t, int head,
			   int heads)
{
	int block = layer * BLOCKS + (int)table[t / TOKENS];
	return bytes + ((block * TOKENS + t % TOKENS) * heads + head) * CELL;
}

static int value(int layer, int t, int head) { return 1 + layer * 64 + t * 4 + head; }

int main(void)
{
	static char plan[1 << 14];
	write_plan(plan, sizeof plan);
	const char *options[] = {"window=1", "meet_timeout=60s", NULL};
	struct end decode = open_end("decode", "mem", LAYERS * BLOCKS * TOKENS * RANKS * CELL);
	struct end prefill[RANKS];
	sluice_peer senders[RANKS], receiver[RANKS];
	sluice_remote unused;
	for (int rank = 0; rank < RANKS; rank++) {
		prefill[rank] = open_end(rank ? "prefill-1" : "prefill-0", "mem",
					 LAYERS * BLOCKS * TOKENS * CELL);
		senders[rank] = connect_ends(&decode, &prefill[rank], &unused);
		receiver[rank] = connect_ends(&prefill[rank], &decode, &unused);
	}
	struct sluice_handoff_config config = {.size = sizeof config,
					       .role = SLUICE_HANDOFF_RECEIVER,
					       .plan = plan,
					       .regions = &decode.region,
					       .peers = senders,
					       .regions_count = 1,
					       .peers_count = RANKS,
					       .options = options};
	sluice_handoff to, from[RANKS];
	OK(sluice_handoff_open(decode.engine, &config, &to));
	config.role = SLUICE_HANDOFF_SENDER;
	config.peers_count = 1;
	for (int rank = 0; rank < RANKS; rank++) {
		config.index = rank;
		config.regions = &prefill[rank].region;
		config.peers = &receiver[rank];
		OK(sluice_handoff_open(prefill[rank].engine, &config, &from[rank]));
	}
	config.role = 3;
	WANT(SLUICE_ERR_ARGUMENT, sluice_handoff_open(decode.engine, &config, &to));
	config.plan = NULL;
	WANT(SLUICE_ERR_ARGUMENT, sluice_handoff_open(decode.engine, &config, &to));

	const uint32_t mine[RANKS][2] = {{3, 0}, {1, 2}}, theirs[2] = {2, 1};
	struct sluice_handoff_table table = {.blocks = theirs, .count = 2};
	sluice_handoff_request request, push[RANKS];
	OK(sluice_handoff_begin(to, 7, &table, 1, 0, 2 * TOKENS, &request));
	WANT(SLUICE_PENDING, sluice_handoff_wait(request, 0));
	WANT(SLUICE_ERR_BUSY, sluice_handoff_request_close(request));
	WANT(SLUICE_ERR_ARGUMENT, sluice_handoff_layer(request, 0));
	for (int rank = 0; rank < RANKS; rank++) {
		table.blocks = mine[rank];
		OK(sluice_handoff_begin(from[rank], 7, &table, 1, 0, 2 * TOKENS, &push[rank]));
	}
	for (int layer = 0; layer < LAYERS; layer++)
		for (int rank = 0; rank < RANKS; rank++) {
			for (int t = 0; t < 2 * TOKENS; t++)
				memset(cell(prefill[rank].bytes, mine[rank], layer, t, 0, 1),
				       value(layer, t, rank), CELL);
			OK(sluice_handoff_layer(push[rank], layer));
		}
	int fd;
	OK(sluice_handoff_fd(request, &fd));
	struct pollfd ended = {.fd = fd, .events = POLLIN};
	TRUE(poll(&ended, 1, LIMIT / 1000000) == 1);
	OK(sluice_handoff_wait(request, 0));
	for (int layer = 0; layer < LAYERS; layer++)
		for (int t = 0; t < 2 * TOKENS; t++)
			for (int head = 0; head < RANKS; head++) {
				unsigned char want[CELL];
				memset(want, value(layer, t, head), CELL);
				TRUE(!memcmp(cell(decode.bytes, theirs, layer, t, head, RANKS),
					     want, CELL));
			}
	OK(sluice_handoff_abort(request, LIMIT)); // of one that has ended
	OK(sluice_handoff_request_close(request));
	WANT(SLUICE_ERR_HANDLE, sluice_handoff_wait(request, 0));
	for (int rank = 0; rank < RANKS; rank++) {
		OK(sluice_handoff_wait(push[rank], LIMIT));
		OK(sluice_handoff_request_close(push[rank]));
	}

	table.blocks = theirs;
	OK(sluice_handoff_begin(to, 8, &table, 1, 0, 2 * TOKENS, &request));
	for (int rank = 0; rank < RANKS; rank++) {
		table.blocks = mine[rank];
		OK(sluice_handoff_begin(from[rank], 8, &table, 1, 0, 2 * TOKENS, &push[rank]));
	}
	OK(sluice_handoff_abort(request, LIMIT));
	WANT(SLUICE_ERR_ABORTED, sluice_handoff_wait(request, LIMIT));
	for (int rank = 0; rank < RANKS; rank++) {
		WANT(SLUICE_ERR_ABORTED, sluice_handoff_wait(push[rank], LIMIT));
		TEXT("cancelled by the receiver");
	}
	char stats[4096];
	size_t length;
	OK(sluice_handoff_stats(to, stats, sizeof stats, &length));
	TRUE(strstr(stats, "\"finished\":1"));
	OK(sluice_handoff_close(from[0]));
	WANT(SLUICE_ERR_HANDLE, sluice_handoff_wait(push[0], 0));
	for (int rank = 0; rank < RANKS; rank++)
		close_end(&prefill[rank]); // and the rank, and the request
	close_end(&decode);
	WANT(SLUICE_ERR_HANDLE, sluice_handoff_close(to));
	puts("ok");
	return 0;
}
