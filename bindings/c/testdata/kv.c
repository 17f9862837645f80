// SPDX-License-Identifier: Apache-2.0
// A KV cache: misuse, blocks in a nest of loops, a cache of another process, which is killed, and
// what it has left.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { BLOCK = 8 << 10, BLOCKS = 16, RUNS = 4, RUN = BLOCK / RUNS };

static char folder[64] = "/dev/shm/sluice-kv-XXXXXX";

static const char *at(const char *name)
{
	static char path[4][128];
	static int next;
	char *p = path[next++ % 4];
	snprintf(p, sizeof path[0], "%s/%s", folder, name);
	return p;
}

static sluice_kv open_cache(sluice_engine engine)
{
	char path[160], disk[160];
	snprintf(path, sizeof path, "path=%s", at("memory"));
	snprintf(disk, sizeof disk, "disk=%s", at("disk"));
	const char *options[] = {path, "bytes=8MiB", "extent=64KiB", "policy=lru", disk,
				 "disk_bytes=8MiB", NULL};
	sluice_kv kv;
	OK(sluice_kv_open(engine, options, LIMIT, &kv));
	return kv;
}

static sluice_kv_namespace open_space(sluice_kv kv)
{
	struct sluice_kv_namespace_options o = {.size = sizeof o, .name = "model", .geometry = {1}};
	sluice_kv_namespace space, again;
	OK(sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	OK(sluice_kv_namespace_open(kv, &o, LIMIT, &again));
	TRUE(again == space);
	return space;
}

// An engine with the backends of an owner of a cache.
static sluice_engine open_owner(void)
{
	struct sluice_backend list[] = {{.name = "shm"}, {.name = "posix"}};
	struct sluice_config config = {.size = sizeof config, .name = "owner", .backends = list,
				       .backends_count = 2};
	sluice_engine engine;
	OK(sluice_open(&config, &engine));
	return engine;
}

static struct sluice_kv_key keys[BLOCKS];
static uint32_t slots[BLOCKS];

// A block is a run in each of RUNS layers, as in memory of shape (layers, slots, RUN).
static struct sluice_kv_place place_of(sluice_region region)
{
	struct sluice_kv_place p = {.size = sizeof p, .region = region, .stride = RUN, .run = RUN,
				    .loops_count = 1, .slots = slots};
	p.loops[0].n = RUNS;
	p.loops[0].by = BLOCKS * RUN;
	return p;
}

static void lists(void)
{
	for (int k = 0; k < BLOCKS; k++) {
		memset(keys[k].bytes, k + 1, sizeof keys[k].bytes);
		slots[k] = BLOCKS - 1 - k;
	}
}

static void fill(unsigned char *bytes, int by)
{
	for (int i = 0; i < BLOCKS * BLOCK; i++)
		bytes[i] = (unsigned char)(by * (i / RUN) + i % 7);
}

static void want_outcomes(sluice_kv_op op, int outcome)
{
	uint8_t list[BLOCKS];
	OK(sluice_kv_op_wait(op, LIMIT, list, BLOCKS));
	for (int k = 0; k < BLOCKS; k++)
		TRUE(list[k] == outcome);
	OK(sluice_kv_op_close(op));
}

// The blocks of the keys are as fill has made them.
static void want_bytes_by(sluice_kv_namespace space, struct end *e, int by)
{
	struct sluice_kv_place p = place_of(e->region);
	unsigned char *want = malloc(BLOCKS * BLOCK);
	sluice_kv_op op;
	uint8_t found[BLOCKS];
	size_t prefix;
	OK(sluice_kv_match(space, keys, BLOCKS, LIMIT, found, &prefix));
	TRUE(prefix == BLOCKS && found[BLOCKS - 1] & SLUICE_KV_IN_MEMORY);
	memset(e->bytes, 0, BLOCKS * BLOCK);
	OK(sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op));
	want_outcomes(op, SLUICE_KV_DONE);
	fill(want, by);
	TRUE(!memcmp(want, e->bytes, BLOCKS * BLOCK));
	free(want);
}

static void want_bytes(sluice_kv_namespace space, struct end *e) { want_bytes_by(space, e, 3); }

// Others take the place of the blocks, and the blocks theirs.
static void want_replaced(sluice_kv_namespace space, struct end *e)
{
	struct sluice_kv_place p = place_of(e->region);
	sluice_kv_op op;
	for (int by = 5; by >= 3; by -= 2) {
		fill(e->bytes, by);
		OK(sluice_kv_replace(space, keys, BLOCKS, &p, LIMIT, &op));
		want_outcomes(op, SLUICE_KV_DONE);
		want_bytes_by(space, e, by);
	}
}

// Hints and estimates know the blocks.
static void want_hinted(sluice_kv_namespace space)
{
	struct sluice_kv_hint_result hinted;
	OK(sluice_kv_hint(space, SLUICE_KV_RETAIN, 60 * SECOND, keys, BLOCKS, LIMIT, &hinted));
	TRUE(hinted.applied == BLOCKS && !hinted.missing && !hinted.refused);
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_hint(space, SLUICE_KV_RETAIN, 5, keys, BLOCKS, LIMIT, NULL));
	OK(sluice_kv_hint(space, SLUICE_KV_RELEASE, 0, keys, BLOCKS, LIMIT, NULL));
	const char *envelope = "{\"actions\":[{\"action_id\":\"a\",\"action_type\":\"kv.fly\"}]}";
	char text[1024];
	size_t n;
	OK(sluice_kv_hint_envelope(space, envelope, strlen(envelope), LIMIT, text, sizeof text, &n));
	TRUE(strstr(text, "\"status\":\"unsupported\""));
	struct sluice_kv_estimate estimate = {.size = sizeof estimate};
	OK(sluice_kv_estimate(space, keys, BLOCKS, LIMIT, &estimate));
	TRUE(estimate.memory_blocks == BLOCKS && estimate.memory_bytes == BLOCKS * BLOCK &&
	     !estimate.missing && estimate.time_ns > 0);
	sluice_kv_op op;
	OK(sluice_kv_prefetch(space, keys, BLOCKS, LIMIT, &op));
	want_outcomes(op, SLUICE_KV_DONE);
}

// owner stores the blocks, serves them and says so, then stores others until it is killed.
static int owner(void)
{
	struct end e = {.engine = open_owner()};
	OK(sluice_alloc(e.engine, NULL, BLOCKS * BLOCK, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment, .kind = SLUICE_MEMORY,
					 .flags = SLUICE_PRIVATE, .memory = e.memory};
	OK(sluice_register(e.engine, "blocks", &segment, &e.region));
	sluice_kv kv = open_cache(e.engine);
	sluice_kv_namespace space = open_space(kv);
	OK(sluice_kv_attach(kv, e.region, LIMIT));
	struct sluice_kv_place p = place_of(e.region);
	sluice_kv_op op;
	fill(e.bytes, 3);
	OK(sluice_kv_store(space, keys, BLOCKS, &p, LIMIT, &op));
	want_outcomes(op, SLUICE_KV_DONE);
	OK(sluice_kv_serve(kv));
	OK(sluice_kv_serve(kv));
	sluice_listener listener;
	OK(sluice_serve(e.engine, "unix", at("socket"), NULL, 0, &listener));
	puts("serves");
	fflush(stdout);
	for (uint32_t n = 1;; n = n % 64 + 1) {
		uint8_t outcome;
		memset(keys[0].bytes, 0xff, sizeof keys[0].bytes);
		memcpy(keys[0].bytes, &n, sizeof n);
		OK(sluice_kv_store(space, keys, 1, &p, LIMIT, &op));
		OK(sluice_kv_op_wait(op, LIMIT, &outcome, 1));
		OK(sluice_kv_op_close(op));
		memset(keys[0].bytes, 1, sizeof keys[0].bytes);
		OK(sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op));
		OK(sluice_kv_op_wait(op, LIMIT, NULL, 0));
		OK(sluice_kv_op_close(op));
	}
}

// start runs this program as another one, and waits until it serves.
static pid_t start(const char *program)
{
	int out[2];
	char said[8] = "";
	TRUE(!pipe(out));
	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(out[1], 1);
		close(out[0]);
		execl(program, program, folder, (char *)NULL);
		_exit(127);
	}
	close(out[1]);
	TRUE(read(out[0], said, 7) == 7 && !strcmp(said, "serves\n"));
	close(out[0]);
	return child;
}

static void others(const char *program)
{
	pid_t child = start(program);
	struct end e = open_end("user", "shm", BLOCKS * BLOCK);
	sluice_kv kv, second;
	OK(sluice_kv_dial(e.engine, "unix", at("socket"), LIMIT, &kv));
	WANT(SLUICE_ERR_BUSY, sluice_kv_dial(e.engine, "unix", at("socket"), LIMIT, &second));
	TEXT("open another engine");
	char message[8];
	struct sluice_notification note = {.size = sizeof note};
	WANT(SLUICE_ERR_BUSY, sluice_receive(e.engine, &note, message, sizeof message, 0));
	OK(sluice_kv_drain(kv, LIMIT));
	char text[1 << 16];
	size_t n;
	OK(sluice_kv_stats(kv, text, sizeof text, &n));
	TRUE(strstr(text, "\"clients\":1") && strstr(text, "\"attached\":{\"blocks\":"));
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_kv_serve(kv));
	sluice_kv_namespace space = open_space(kv);
	struct sluice_kv_namespace_options o = {.size = sizeof o, .name = "model", .priority = 1};
	sluice_kv_namespace wrong;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_namespace_open(kv, &o, LIMIT, &wrong));

	struct sluice_kv_place p = place_of(e.region);
	sluice_kv_op op;
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op));
	TEXT("attach it first");
	OK(sluice_kv_attach(kv, e.region, LIMIT));
	OK(sluice_kv_attach(kv, e.region, LIMIT));
	WANT(SLUICE_ERR_BUSY, sluice_region_close(e.region));
	want_bytes(space, &e);
	want_replaced(space, &e);
	want_hinted(space);
	for (int k = 0; k < 100; k++) { // a server has 64 of a client
		struct sluice_kv_namespace_options one = {.size = sizeof one, .name = "one",
							  .geometry = {k}};
		sluice_kv_namespace many;
		OK(sluice_kv_namespace_open(kv, &one, LIMIT, &many));
		OK(sluice_kv_namespace_open(kv, &one, LIMIT, &many));
		OK(sluice_kv_namespace_close(many));
		OK(sluice_kv_namespace_close(many));
	}

	TRUE(!kill(child, SIGKILL));
	TRUE(waitpid(child, NULL, 0) == child);
	uint8_t outcomes[BLOCKS];
	int code = sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op);
	OK(code);
	WANT(SLUICE_ERR_PEER_LOST, sluice_kv_op_wait(op, LIMIT, outcomes, BLOCKS));
	TRUE(outcomes[0] == SLUICE_KV_FAILED);
	OK(sluice_kv_op_close(op));
	WANT(SLUICE_ERR_PEER_LOST, sluice_kv_match(space, keys, 1, LIMIT, NULL, NULL));
	OK(sluice_kv_detach(kv, e.region, LIMIT)); // nothing lands there any more
	OK(sluice_kv_close(kv));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_close(kv));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_match(space, keys, 1, LIMIT, NULL, NULL));
	TEXT("the namespace was closed");
	TRUE(sluice_receive(e.engine, &note, message, sizeof message, 0) != SLUICE_ERR_BUSY);
	close_end(&e);
}

static size_t count_listed(sluice_kv_namespace space)
{
	struct sluice_kv_key listed[SLUICE_KV_LISTED_MAX];
	size_t count, all = 0;
	uint32_t at = 0;
	do {
		OK(sluice_kv_list(space, &at, LIMIT, listed, &count));
		all += count;
	} while (at);
	return all;
}

// What the killed process had committed is there, and goes when it is removed.
static void again(void)
{
	struct end e = {.engine = open_owner()};
	OK(sluice_alloc(e.engine, NULL, BLOCKS * BLOCK, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment, .kind = SLUICE_MEMORY,
					 .memory = e.memory};
	OK(sluice_register(e.engine, "data", &segment, &e.region));
	sluice_kv kv = open_cache(e.engine);
	sluice_kv_namespace space = open_space(kv);
	OK(sluice_kv_attach(kv, e.region, LIMIT));
	want_bytes(space, &e);
	want_replaced(space, &e);
	want_hinted(space);

	struct sluice_kv_place p = place_of(e.region);
	sluice_kv_op op;
	OK(sluice_kv_store(space, keys, BLOCKS, &p, LIMIT, &op));
	want_outcomes(op, SLUICE_KV_KNOWN);
	OK(sluice_kv_drain(kv, LIMIT));
	size_t all = count_listed(space);
	OK(sluice_kv_remove(space, keys, BLOCKS, LIMIT));
	TRUE(all >= BLOCKS && count_listed(space) == all - BLOCKS);
	size_t prefix;
	uint8_t found[BLOCKS];
	OK(sluice_kv_match(space, keys, BLOCKS, LIMIT, found, &prefix));
	TRUE(prefix == 0 && !found[3]);
	OK(sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op));
	int fd;
	OK(sluice_kv_op_fd(op, &fd));
	struct pollfd ended = {.fd = fd, .events = POLLIN};
	TRUE(poll(&ended, 1, 60000) == 1);
	TRUE(poll(&ended, 1, 0) == 1); // until it is closed
	want_outcomes(op, SLUICE_KV_MISSING);
	WANT(SLUICE_ERR_HANDLE, sluice_kv_op_close(op));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_op_fd(op, &fd));

	char text[1 << 16];
	size_t n;
	OK(sluice_kv_stats(kv, text, sizeof text, &n));
	TRUE(strlen(text) + 1 == n && strstr(text, "\"missing\":16") &&
	     strstr(text, "\"attached\":{\"blocks\":") && strstr(text, "\"namespaces\":{\"model\":"));
	WANT(SLUICE_ERR_SPACE, sluice_kv_stats(kv, text, 1, &n));
	sluice_kv_namespace other;
	struct sluice_kv_namespace_options named = {.size = sizeof named, .name = "other"};
	OK(sluice_kv_namespace_open(kv, &named, LIMIT, &other));
	sluice_kv_namespace again;
	OK(sluice_kv_namespace_open(kv, &named, LIMIT, &again));
	TRUE(again == other);
	OK(sluice_kv_namespace_close(other)); // one of two
	OK(sluice_kv_match(other, keys, BLOCKS, LIMIT, found, &prefix));
	OK(sluice_kv_namespace_close(other));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_match(other, keys, BLOCKS, LIMIT, found, &prefix));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_namespace_close(other));
	OK(sluice_kv_namespace_open(kv, &named, LIMIT, &again));
	TRUE(again != other);
	OK(sluice_kv_match(again, keys, BLOCKS, LIMIT, found, &prefix));

	OK(sluice_kv_detach(kv, e.region, LIMIT));
	OK(sluice_kv_detach(kv, e.region, LIMIT));
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op));
	TEXT("attach it first");
	OK(sluice_kv_attach(kv, e.region, LIMIT));
	OK(sluice_kv_load(space, keys, BLOCKS, &p, LIMIT, &op)); // and sluice_close ends all of it
	close_end(&e);
	WANT(SLUICE_ERR_HANDLE, sluice_kv_op_wait(op, LIMIT, NULL, 0));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_stats(kv, text, sizeof text, &n));
}

static void misuse(void)
{
	struct end e = open_end("a", "shm", BLOCKS * BLOCK), other = open_end("b", "mem", 4096);
	sluice_kv kv;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_open(e.engine, NULL, 0, &kv));
	const char *options[8] = {NULL};
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_open(e.engine, options, 0, &kv));
	TEXT("no path");
	options[0] = "speed=9";
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_open(e.engine, options, 0, &kv));
	TEXT("there are path, bytes, extent");
	options[0] = "disk_bytes=9";
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_open(e.engine, options, 0, &kv));
	TEXT("disk=PATH goes before it");
	options[0] = "path=/nowhere/at/all", options[1] = "bytes=many";
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_open(e.engine, options, 0, &kv));
	options[1] = "bytes=64MiB";
	WANT(SLUICE_ERR_SYSTEM, sluice_kv_open(e.engine, options, 0, &kv));
	options[2] = "policy=best";
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_open(e.engine, options, 0, &kv));
	TEXT("s3fifo, lru and arc");
	options[2] = "ops_max=2000000";
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_open(e.engine, options, 0, &kv));
	TEXT("ops_max");
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_dial(e.engine, "udp", "x", LIMIT, &kv));
	WANT(SLUICE_ERR_TIMEOUT, sluice_kv_dial(e.engine, "unix", "/nowhere/at/all", 0, &kv));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_close(e.engine));
	TEXT("is an engine, where a cache is wanted");

	char path[160];
	snprintf(path, sizeof path, "path=%s", at("misuse"));
	options[0] = path, options[1] = "bytes=1MiB", options[2] = "extent=64KiB";
	OK(sluice_kv_open(e.engine, options, 0, &kv));
	sluice_kv twice;
	WANT(SLUICE_ERR_TIMEOUT, sluice_kv_open(e.engine, options, 0, &twice));
	TEXT("another cache has it");
	struct sluice_kv_namespace_options o = {.size = sizeof o};
	sluice_kv_namespace space;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	TEXT("name is NULL");
	o.name = "";
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	o.name = "model", o.priority = 8;
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	o.priority = 7, o.size = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	o.size = sizeof o, o.memory_quota = 128 << 10;
	OK(sluice_kv_namespace_open(kv, &o, LIMIT, &space));

	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_match(space, NULL, 1, 0, NULL, NULL));
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_match(space, keys, SIZE_MAX, 0, NULL, NULL));
	TEXT("at most 65536 a call");
	OK(sluice_kv_match(space, NULL, 0, 0, NULL, NULL));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_match(kv, keys, 1, 0, NULL, NULL));
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_remove(space, NULL, 1, 0));
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_list(space, NULL, 0, NULL, NULL));
	struct sluice_kv_hint_result hinted;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_hint(space, 9, 0, keys, 1, 0, &hinted));
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_hint(space, SLUICE_KV_RETAIN, 0, keys, 1, 0, NULL));
	WANT(SLUICE_ERR_CORRUPT,
	     sluice_kv_hint_envelope(space, "hints", 5, 0, path, sizeof path, &(size_t){0}));
	struct sluice_kv_estimate estimate = {.size = 8};
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_estimate(space, keys, 1, 0, &estimate));
	o.flow = 3;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_namespace_open(kv, &o, LIMIT, &space));
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_attach(kv, other.region, LIMIT));
	TEXT("another engine");
	WANT(SLUICE_ERR_HANDLE, sluice_kv_attach(kv, e.memory, LIMIT));
	OK(sluice_kv_attach(kv, e.region, LIMIT));

	sluice_kv_op op;
	struct sluice_kv_place p = place_of(e.region);
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_load(space, keys, 1, NULL, 0, &op));
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_load(space, keys, 1, &p, 0, NULL));
	p.slots = NULL;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_load(space, keys, 1, &p, 0, &op));
	p.slots = slots, p.loops_count = 4;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_load(space, keys, 1, &p, 0, &op));
	p.loops_count = 1, p.loops[0].reserved = 1;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_load(space, keys, 1, &p, 0, &op));
	p.loops[0].reserved = 0, p.size = 16;
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_load(space, keys, 1, &p, 0, &op));
	p.size = sizeof p, p.run = UINT64_MAX;
	OK(sluice_kv_store(space, keys, 1, &p, LIMIT, &op));
	WANT(SLUICE_ERR_BOUNDS, sluice_kv_op_wait(op, LIMIT, NULL, 0));
	OK(sluice_kv_op_close(op));
	p.run = RUN, p.base = UINT64_MAX - 8; // outside of the region
	OK(sluice_kv_store(space, keys, 1, &p, LIMIT, &op));
	TRUE(sluice_kv_op_wait(op, LIMIT, NULL, 0) < 0);
	OK(sluice_kv_op_close(op));
	p.base = 0;
	OK(sluice_kv_store(space, keys, BLOCKS, &p, 0, &op)); // no time at all
	uint8_t outcomes[BLOCKS];
	WANT(SLUICE_ERR_TIMEOUT, sluice_kv_op_wait(op, LIMIT, outcomes, BLOCKS));
	TRUE(outcomes[0] == SLUICE_KV_LATE);
	WANT(SLUICE_ERR_ARGUMENT, sluice_kv_op_wait(op, LIMIT, outcomes, 3));
	TEXT("3 outcomes are wanted of an operation of 16 keys");
	OK(sluice_kv_op_cancel(op));
	OK(sluice_kv_op_close(op));
	OK(sluice_kv_close(kv));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_detach(kv, e.region, 0));
	WANT(SLUICE_ERR_HANDLE, sluice_kv_op_cancel(op));

	for (int i = 0; i < 3; i++) { // its lock and its region are given back
		OK(sluice_kv_open(e.engine, options, 0, &kv));
		OK(sluice_kv_close(kv));
	}
	close_end(&e);
	close_end(&other);
}

static void clean(void)
{
	const char *names[] = {"memory", "disk", "misuse", "socket"};
	for (int i = 0; i < 4; i++)
		unlink(at(names[i]));
	rmdir(folder);
}

int main(int argc, char **argv)
{
	lists();
	if (argc > 1) {
		snprintf(folder, sizeof folder, "%s", argv[1]);
		return owner();
	}
	TRUE(mkdtemp(folder));
	atexit(clean);
	misuse();
	others(argv[0]);
	again();
	puts("ok");
	return 0;
}
