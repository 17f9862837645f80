// SPDX-License-Identifier: Apache-2.0
// A cache over two nodes: blocks by their keys and by their chain, one answer for two ranks, a node
// that is killed, and misuse. With three arguments the nodes are those of a directory that has them
// already: a folder for their sockets, "etcd", and its address.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { BLOCK = 8 << 10, BLOCKS = 32, PREFIX = 9 };

static char folder[64] = "/dev/shm/sluice-cluster-XXXXXX";
static struct sluice_kv_key keys[2 * BLOCKS]; // of two ranks
static uint32_t slots[BLOCKS];

static const char *at(const char *name, const char *ending)
{
	static char path[4][128];
	static int next;
	char *p = path[next++ % 4];
	snprintf(p, sizeof path[0], "%s/%s%s", folder, name, ending);
	return p;
}

// serve is a node, until it is killed.
static int serve(const char *name)
{
	sluice_engine engine = open_engine(name, "shm");
	char path[160];
	snprintf(path, sizeof path, "path=%s", at(name, ".memory"));
	const char *options[] = {path, "bytes=8MiB", "extent=64KiB", NULL};
	sluice_kv kv;
	sluice_listener listener;
	OK(sluice_kv_open(engine, options, LIMIT, &kv));
	OK(sluice_kv_serve(kv));
	OK(sluice_serve(engine, "unix", at(name, ".sock"), NULL, 0, &listener));
	puts("serves");
	fflush(stdout);
	for (;;)
		pause();
}

static pid_t start(const char *program, const char *name)
{
	int out[2];
	char said[8] = "";
	TRUE(!pipe(out));
	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(out[1], 1);
		execl(program, program, folder, name, (char *)NULL);
		_exit(127);
	}
	close(out[1]);
	TRUE(read(out[0], said, 7) == 7 && !strcmp(said, "serves\n"));
	close(out[0]);
	return child;
}

static struct sluice_kv_place place_of(sluice_region region)
{
	return (struct sluice_kv_place){.size = sizeof(struct sluice_kv_place), .region = region,
					.stride = BLOCK, .run = BLOCK, .slots = slots};
}

static void fill(struct end *e, const struct sluice_kv_key *of)
{
	for (int i = 0; i < BLOCKS * BLOCK; i++)
		e->bytes[i] = (unsigned char)(of[i / BLOCK].bytes[i % 16] + i / 16);
}

// Block k is that of its key.
static int is_right(struct end *e, const struct sluice_kv_key *of, int k)
{
	for (int i = k * BLOCK; i < (k + 1) * BLOCK; i++)
		if (e->bytes[i] != (unsigned char)(of[k].bytes[i % 16] + i / 16))
			return 0;
	return 1;
}

static void store(sluice_kv_namespace space, struct end *e, const struct sluice_kv_key *of,
		  int from, int n)
{
	struct sluice_kv_place p = place_of(e->region);
	uint8_t outcomes[BLOCKS];
	sluice_kv_op op;
	p.slots = slots + from;
	fill(e, of);
	OK(sluice_kv_store(space, of + from, n, &p, LIMIT, &op));
	OK(sluice_kv_op_wait(op, LIMIT, outcomes, n));
	OK(sluice_kv_op_close(op));
	for (int k = 0; k < n; k++)
		TRUE(outcomes[k] == SLUICE_KV_DONE);
}

// load returns how many blocks were there, each of which is right.
static int load(sluice_kv_namespace space, struct end *e, const struct sluice_kv_key *of, int n)
{
	struct sluice_kv_place p = place_of(e->region);
	uint8_t outcomes[BLOCKS];
	sluice_kv_op op;
	int there = 0;
	memset(e->bytes, 0, BLOCKS * BLOCK);
	OK(sluice_kv_load(space, of, n, &p, LIMIT, &op));
	OK(sluice_kv_op_wait(op, LIMIT, outcomes, n));
	OK(sluice_kv_op_close(op));
	for (int k = 0; k < n; k++) {
		TRUE(outcomes[k] != SLUICE_KV_UNDONE);
		TRUE(outcomes[k] != SLUICE_KV_DONE || is_right(e, of, k));
		there += outcomes[k] == SLUICE_KV_DONE;
	}
	return there;
}

static int load_pinned(sluice_kv_namespace space, const char *token, size_t length, int rank,
		       struct end *e, int n)
{
	struct sluice_kv_place p = place_of(e->region);
	sluice_kv_op op;
	memset(e->bytes, 0, BLOCKS * BLOCK);
	OK(sluice_kv_load_pinned(space, token, length, rank, keys + rank * BLOCKS, n, &p, LIMIT, &op));
	int code = sluice_kv_op_wait(op, LIMIT, NULL, 0);
	OK(sluice_kv_op_close(op));
	for (int k = 0; !code && k < n; k++)
		TRUE(is_right(e, keys + rank * BLOCKS, k));
	return code;
}

static sluice_kv_namespace open_space(sluice_kv kv, int geometry)
{
	struct sluice_kv_namespace_options o = {.size = sizeof o, .name = "model",
						.geometry = {geometry}};
	sluice_kv_namespace space;
	OK(sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	return space;
}

static void misuse(struct end *e)
{
	sluice_kv kv;
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_dial(e->engine, "nodes", "a", LIMIT, &kv));
	TEXT("want NAME=ADDRESS");
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_dial(e->engine, "etcd", "127.0.0.1:1", LIMIT, &kv));
	TEXT("want http://HOST:PORT");
	WANT(SLUICE_ERR_TIMEOUT, sluice_kv_dial(e->engine, "etcd", "http://127.0.0.1:1/x",
						SECOND / 10, &kv));
	TEXT("the directory does not answer");
	WANT(SLUICE_ERR_TIMEOUT, sluice_kv_dial(e->engine, "nodes", "a=unix:/nowhere/at/all",
						SECOND / 10, &kv));
	TEXT("no node of the cluster is reached, of 1: a (");
}

static void refused(sluice_kv kv, sluice_kv_namespace space, struct end *e)
{
	struct sluice_kv_place p = place_of(e->region);
	struct sluice_kv_namespace_options o = {.size = sizeof o, .name = "model", .priority = 1};
	sluice_kv_namespace other;
	sluice_kv_token token;
	sluice_kv_op op;
	size_t n;
	static struct sluice_kv_key listed[SLUICE_KV_LISTED_MAX];
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_kv_list(space, &(uint32_t){0}, LIMIT, listed, &n));
	TEXT("a cluster");
	OK(sluice_kv_replace(space, keys, 1, &p, LIMIT, &op));
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_kv_op_wait(op, LIMIT, NULL, 0));
	OK(sluice_kv_op_close(op));
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_kv_serve(kv));
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_namespace_open(kv, &o, LIMIT, &other));
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_match_pinned(space, keys, 1, 1, 5, LIMIT, &token, &n));
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_match_pinned(space, keys, 1, SIZE_MAX, SECOND, LIMIT, &token,
						       &n));
	WANT(SLUICE_ERR_CORRUPT, sluice_kv_load_pinned(space, "token", 5, 0, keys, 1, &p, LIMIT, &op));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_token_close(kv));
}

// The cache of one node has no tokens, and a chain of it is the namespace.
static void one_node(struct end *e)
{
	sluice_kv kv;
	sluice_kv_token token;
	size_t prefix;
	OK(sluice_kv_dial(e->engine, "unix", at("a", ".sock"), LIMIT, &kv));
	sluice_kv_namespace space = open_space(kv, 3), chain;
	WANT(SLUICE_ERR_NOT_SUPPORTED,
	     sluice_kv_match_pinned(space, keys, 1, 1, SECOND, LIMIT, &token, &prefix));
	OK(sluice_kv_chain(space, keys, 1, &chain));
	TRUE(chain == space);
	OK(sluice_kv_namespace_close(chain));
	OK(sluice_kv_namespace_close(space));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_chain(space, keys, 1, &chain));
	OK(sluice_kv_close(kv));
}

static void use(const char *network, const char *address, pid_t second)
{
	struct end e = open_end("user", "shm", BLOCKS * BLOCK),
		   rank = open_end("rank", "shm", BLOCKS * BLOCK);
	one_node(&e);
	misuse(&e);
	sluice_kv kv, its;
	OK(sluice_kv_dial(e.engine, network, address, LIMIT, &kv));
	OK(sluice_kv_dial(rank.engine, network, address, LIMIT, &its));
	OK(sluice_kv_attach(kv, e.region, LIMIT));
	OK(sluice_kv_attach(its, rank.region, LIMIT));
	char text[1 << 16];
	size_t n, prefix;
	do { // the second node may still be dialled
		usleep(1000);
		OK(sluice_kv_stats(kv, text, sizeof text, &n));
	} while (!strstr(text, "\"state\":\"serving\"") || strstr(text, "unreachable"));

	// By keys: any of them alone, and in any order.
	sluice_kv_namespace space = open_space(kv, 1);
	refused(kv, space, &e);
	store(space, &e, keys, 0, BLOCKS);
	OK(sluice_kv_match(space, keys + 5, BLOCKS - 5, LIMIT, NULL, &prefix));
	TRUE(prefix == BLOCKS - 5);
	TRUE(load(space, &e, keys, BLOCKS) == BLOCKS && load(space, &e, keys + 7, 3) == 3);
	struct sluice_kv_hint_result hinted;
	sluice_kv_op op;
	OK(sluice_kv_hint(space, SLUICE_KV_SESSION_END, 0, keys, BLOCKS, LIMIT, &hinted));
	TRUE(hinted.applied == BLOCKS);
	OK(sluice_kv_prefetch(space, keys, BLOCKS, LIMIT, &op));
	OK(sluice_kv_op_wait(op, LIMIT, NULL, 0));
	OK(sluice_kv_op_close(op));
	struct sluice_kv_estimate estimate = {.size = sizeof estimate};
	OK(sluice_kv_estimate(space, keys, BLOCKS, LIMIT, &estimate));
	TRUE(estimate.memory_blocks == BLOCKS && !estimate.missing && estimate.time_ns > 0);
	const char *envelope = "{\"actions\":[{\"action_id\":\"a\",\"action_type\":\"kv.fly\"}]}";
	OK(sluice_kv_hint_envelope(space, envelope, strlen(envelope), LIMIT, text, sizeof text, &n));
	TRUE(strstr(text, "\"status\":\"unsupported\""));
	OK(sluice_kv_drain(kv, LIMIT));
	OK(sluice_kv_remove(space, keys, 1, LIMIT));
	TRUE(load(space, &e, keys, 1) == 0);

	// By chains of two ranks, the second part of each behind the first.
	sluice_kv_namespace by_chain = open_space(kv, 2), chain, behind, chain_of_rank, again;
	OK(sluice_kv_chain(by_chain, NULL, 0, &chain));
	for (int r = 0; r < 2; r++) {
		store(chain, &e, keys + r * BLOCKS, 0, PREFIX);
		OK(sluice_kv_chain(chain, keys + r * BLOCKS, PREFIX, &behind));
		store(behind, &e, keys + r * BLOCKS, PREFIX, BLOCKS - PREFIX);
		OK(sluice_kv_namespace_close(behind));
		TRUE(load(chain, &e, keys + r * BLOCKS, BLOCKS) == BLOCKS);
	}
	WANT(SLUICE_ERR_HANDLE, sluice_kv_match(behind, keys, 1, LIMIT, NULL, NULL));

	// One answer, by which both ranks load.
	sluice_kv_token token;
	OK(sluice_kv_match_pinned(chain, keys, BLOCKS, 2, 60 * SECOND, LIMIT, &token, &prefix));
	TRUE(prefix == BLOCKS);
	WANT(SLUICE_ERR_SPACE, sluice_kv_token_bytes(token, text, 1, &n));
	OK(sluice_kv_token_bytes(token, text, sizeof text, &n));
	sluice_kv_namespace of_rank = open_space(its, 2);
	OK(sluice_kv_chain(of_rank, NULL, 0, &chain_of_rank));
	OK(load_pinned(chain, text, n, 0, &e, BLOCKS));
	OK(load_pinned(chain_of_rank, text, n, 1, &rank, BLOCKS));
	WANT(SLUICE_ERR_BOUNDS, load_pinned(chain_of_rank, text, n, 1, &rank, BLOCKS - 1));
	WANT(SLUICE_ERR_BOUNDS, load_pinned(chain, text, n, 2, &e, 0));

	// A node that is killed: what it has is missing, and no rank loads by the token.
	TRUE(!kill(second, SIGKILL));
	TRUE(waitpid(second, NULL, 0) == second);
	int left = load(space, &e, keys, BLOCKS);
	TRUE(left > 0 && left < BLOCKS - 1);
	WANT(SLUICE_ERR_MISSING, load_pinned(chain_of_rank, text, n, 1, &rank, BLOCKS));
	TEXT("not there as a whole");
	OK(sluice_kv_token_close(token));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_token_close(token));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_token_bytes(token, text, sizeof text, &n));
	OK(sluice_kv_stats(kv, text, sizeof text, &n));
	TRUE(strstr(text, "\"name\":\"a\"") && strstr(text, "\"requests\":"));

	OK(sluice_kv_namespace_close(by_chain)); // and its chain
	WANT(SLUICE_ERR_HANDLE, sluice_kv_chain(chain, NULL, 0, &again));
	OK(sluice_kv_detach(kv, e.region, LIMIT));
	OK(sluice_kv_close(kv));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_match(space, keys, 1, LIMIT, NULL, NULL));
	close_end(&e);
	close_end(&rank); // and its cache
}

static void clean(void)
{
	for (int i = 0; i < 2; i++) {
		unlink(at(i ? "a" : "b", ".memory"));
		unlink(at(i ? "a" : "b", ".sock"));
	}
	rmdir(folder);
}

int main(int argc, char **argv)
{
	char address[256];
	for (int k = 0; k < 2 * BLOCKS; k++)
		for (int i = 0; i < 16; i++)
			keys[k].bytes[i] = (unsigned char)((k + 1) * 37 + i * (k + 11));
	for (int k = 0; k < BLOCKS; k++)
		slots[k] = k;
	if (argc > 1)
		snprintf(folder, sizeof folder, "%s", argv[1]);
	if (argc == 3)
		return serve(argv[2]);
	if (argc == 1) {
		TRUE(mkdtemp(folder));
		atexit(clean);
	}
	start(argv[0], "a");
	pid_t second = start(argv[0], "b");
	snprintf(address, sizeof address, "a=unix:%s,b=unix:%s", at("a", ".sock"), at("b", ".sock"));
	use(argc > 3 ? argv[2] : "nodes", argc > 3 ? argv[3] : address, second);
	puts("ok");
	return 0;
}
