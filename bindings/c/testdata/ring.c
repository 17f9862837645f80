// SPDX-License-Identifier: Apache-2.0
// A ring: misuse, a reader of this process, one of another that is killed, and the child of a fork.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { BYTES = 64 << 10 };

static char folder[64] = "/tmp/sluice-ring-XXXXXX";
static char path[128];

static struct sluice_ring_config config(void)
{
	return (struct sluice_ring_config){.size = sizeof(struct sluice_ring_config),
					   .flags = SLUICE_RING_SUMS, .path = path,
					   .bytes = BYTES, .note = "secret", .note_length = 6};
}

static int put(sluice_ring ring, const char *key, uint64_t n, int64_t timeout,
	       struct sluice_ring_handle *handle)
{
	static char bytes[BYTES + 1];
	memset(bytes, key[0], sizeof bytes);
	struct sluice_ring_part parts[] = {{bytes, n / 2}, {bytes, n - n / 2}};
	return sluice_ring_put(ring, key, parts, 2, timeout, handle);
}

static void misuse(void)
{
	sluice_ring ring, other;
	sluice_ring_reader reader;
	sluice_ring_view view;
	struct sluice_ring_handle handle, nonsense = {.generation = 7, .row = 1u << 31};
	const void *at;
	uint64_t n;
	struct sluice_ring_config c = config();
	c.size = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_open(&c, &ring));
	TEXT("sluice_ring_config.size is 8");
	c = config(), c.path = NULL;
	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_open(&c, &ring));
	c = config(), c.flags = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_open(&c, &ring));
	c = config(), c.bytes = 0;
	WANT(SLUICE_ERR_BOUNDS, sluice_ring_open(&c, &ring));
	c = config(), c.note_length = 513;
	WANT(SLUICE_ERR_BOUNDS, sluice_ring_open(&c, &ring));
	c = config(), c.objects = UINT32_MAX;
	WANT(SLUICE_ERR_BOUNDS, sluice_ring_open(&c, &ring));
	WANT(SLUICE_ERR_TIMEOUT, sluice_ring_join(path, SECOND / 20, &reader));
	c = config();
	OK(sluice_ring_open(&c, &ring));
	WANT(SLUICE_ERR_SYSTEM, sluice_ring_open(&c, &other));
	OK(sluice_ring_join(path, LIMIT, &reader));

	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_put(ring, NULL, NULL, 0, 0, &handle));
	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_put(ring, "a", NULL, 1, 0, &handle));
	struct sluice_ring_part part = {NULL, 1};
	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_put(ring, "a", &part, 1, 0, &handle));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_put(reader, "a", NULL, 0, 0, &handle));
	TEXT("is a reader of a ring, where a ring is wanted");
	WANT(SLUICE_ERR_BOUNDS, put(ring, "a", BYTES + 1, 0, &handle));
	WANT(SLUICE_ERR_MISSING, sluice_ring_find(ring, "a", &handle));
	TEXT("no object of this key");
	WANT(SLUICE_ERR_MISSING, sluice_ring_hand_out(ring, "a", &handle));
	WANT(SLUICE_ERR_MISSING, sluice_ring_touch(ring, "a"));
	WANT(SLUICE_ERR_MISSING, sluice_ring_remove(ring, "a"));
	WANT(SLUICE_ERR_MISSING, sluice_ring_get(reader, &nonsense, &at, &n, &view));
	WANT(SLUICE_ERR_ARGUMENT, sluice_ring_get(reader, NULL, &at, &n, &view));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_get(42, &nonsense, &at, &n, &view));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_view_close(reader));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_verify(0));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_leave(ring));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_close(reader));
	OK(sluice_ring_leave(reader));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_leave(reader));
	OK(sluice_ring_close(ring));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_clear(ring));
	TEXT("the ring was closed");
}

static void objects(void)
{
	sluice_ring ring;
	sluice_ring_reader reader;
	sluice_ring_view view, own;
	struct sluice_ring_handle a, b;
	const void *at;
	uint64_t n;
	size_t length;
	char text[512];
	int gone;
	struct sluice_ring_config c = config();
	OK(sluice_ring_open(&c, &ring));
	OK(sluice_ring_join(path, LIMIT, &reader));
	WANT(SLUICE_ERR_SPACE, sluice_ring_note(reader, NULL, 0, &length));
	OK(sluice_ring_note(reader, text, sizeof text, &length));
	TRUE(length == 6 && !memcmp(text, "secret", 6));
	OK(put(ring, "a", 5000, 0, &a));
	WANT(SLUICE_ERR_BUSY, put(ring, "a", 9, 0, &b));
	OK(sluice_ring_get(reader, &a, &at, &n, &view));
	TRUE(n == 5000 && ((const char *)at)[0] == 'a' && ((const char *)at)[4999] == 'a');
	OK(sluice_ring_verify(view));
	WANT(SLUICE_ERR_BUSY, sluice_ring_leave(reader));
	WANT(SLUICE_ERR_FULL, put(ring, "b", BYTES, SECOND / 50, &b));
	TEXT("holds 1 of 5000 bytes");
	OK(sluice_ring_get(ring, &a, &at, &n, &own)); // the writer reads its own
	WANT(SLUICE_ERR_BUSY, sluice_ring_close(ring));
	OK(sluice_ring_view_close(own));
	OK(sluice_ring_view_close(view));
	WANT(SLUICE_ERR_HANDLE, sluice_ring_view_close(view));
	OK(sluice_ring_hand_out(ring, "a", &b));
	TRUE(b.row == a.row && b.generation == a.generation);
	OK(sluice_ring_touch(ring, "a"));
	OK(sluice_ring_end_touches(ring));
	OK(sluice_ring_remove(ring, "a"));
	WANT(SLUICE_ERR_MISSING, sluice_ring_get(reader, &a, &at, &n, &view));
	OK(put(ring, "b", BYTES, 0, &b));
	OK(sluice_ring_clear(ring));
	OK(put(ring, "b", 0, 0, &b));
	OK(sluice_ring_stats(ring, text, sizeof text, &length));
	TRUE(strstr(text, "\"objects\":1,") && strstr(text, "\"puts\":3,"));
	OK(sluice_ring_gone(reader, &gone));
	TRUE(!gone);
	OK(sluice_ring_close(ring));
	while (!gone)
		OK(sluice_ring_gone(reader, &gone));
	OK(sluice_ring_get(reader, &b, &at, &n, &view)); // what was there can be got still
	TRUE(n == 0);
	OK(sluice_ring_view_close(view));
	OK(sluice_ring_leave(reader));
}

// Holds an object until it is killed.
static int hold(char **argv)
{
	sluice_ring_reader reader;
	sluice_ring_view view;
	struct sluice_ring_handle handle = {.generation = strtoull(argv[2], NULL, 10),
					    .row = (uint32_t)atoi(argv[3])};
	const void *at;
	uint64_t n;
	OK(sluice_ring_join(argv[1], LIMIT, &reader));
	OK(sluice_ring_get(reader, &handle, &at, &n, &view));
	puts("held");
	fflush(stdout);
	for (;;)
		pause();
}

static void killed(char *self)
{
	sluice_ring ring;
	struct sluice_ring_handle a, b;
	char generation[32], row[16], said[8] = "";
	int ends[2], status;
	struct sluice_ring_config c = config();
	c.awaited = 1;
	OK(sluice_ring_open(&c, &ring));
	OK(put(ring, "a", BYTES, 0, &a));
	snprintf(generation, sizeof generation, "%llu", (unsigned long long)a.generation);
	snprintf(row, sizeof row, "%u", a.row);
	TRUE(pipe(ends) == 0);
	pid_t child = fork();
	TRUE(child >= 0);
	if (!child) {
		alarm(60); // a call that hangs is a failure, too
		WANT(SLUICE_ERR_FORK, put(ring, "c", 1, SLUICE_FOREVER, &b));
		WANT(SLUICE_ERR_FORK, sluice_ring_join(path, SLUICE_FOREVER, &ring));
		WANT(SLUICE_ERR_FORK, sluice_ring_view_close(1));
		alarm(0);
		dup2(ends[1], 1);
		execl("/proc/self/exe", self, path, generation, row, (char *)NULL);
		_exit(1);
	}
	TRUE(read(ends[0], said, 5) == 5 && !strcmp(said, "held\n"));
	WANT(SLUICE_ERR_FULL, put(ring, "b", BYTES, 0, &b));
	TRUE(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child);
	OK(put(ring, "b", BYTES, LIMIT, &b));
	OK(sluice_ring_find(ring, "b", &a));
	TRUE(a.generation == b.generation);
} // exit closes it, and removes the socket

static void clean(void) { rmdir(folder); }

int main(int argc, char **argv)
{
	if (argc > 1)
		return hold(argv);
	TRUE(mkdtemp(folder));
	atexit(clean);
	snprintf(path, sizeof path, "%s/ring", folder);
	misuse();
	objects();
	killed(argv[0]);
	puts("ok");
	return 0;
}
