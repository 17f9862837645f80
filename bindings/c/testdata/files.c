// SPDX-License-Identifier: Apache-2.0
// Memory to a file and back, by both ways to the kernel; ends of files; a peer's file by way of its
// engine.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

enum { LENGTH = 1 << 20, SKIPPED = 8192 };

static struct end open_with(const char *const *options)
{
	struct sluice_backend list[] = {{.name = "mem"}, {.name = "posix", .options = options}};
	struct sluice_config config = {.size = sizeof config,
				       .name = "files",
				       .backends = list,
				       .backends_count = 2};
	struct end e;
	OK(sluice_open(&config, &e.engine));
	OK(sluice_alloc(e.engine, NULL, LENGTH, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = e.memory};
	OK(sluice_register(e.engine, "data", &segment, &e.region));
	return e;
}

static sluice_region open_file(struct end *e, int fd)
{
	sluice_region file;
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_FILE,
					 .file = fd,
					 .offset = SKIPPED,
					 .length = LENGTH};
	OK(sluice_register(e->engine, "file", &segment, &file));
	return file;
}

static void once(sluice_peer peer, uint32_t op, struct end *e, sluice_remote there, uint64_t local,
		 uint64_t remote, uint64_t n)
{
	sluice_transfer t = new_transfer(peer, op);
	add_one(t, e->region, there, local, remote, n);
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	OK(sluice_transfer_close(t));
}

static void round_trip(const char *const *options, const char *name)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
	TRUE(fd >= 0 && !ftruncate(fd, SKIPPED + LENGTH));
	struct end e = open_with(options);
	sluice_region file = open_file(&e, fd);
	sluice_peer self;
	sluice_remote there;
	OK(sluice_self(e.engine, &self));
	OK(sluice_remote_find(self, "file", &there));
	for (size_t i = 0; i < LENGTH; i++)
		e.bytes[i] = (unsigned char)(i * 13 + 1);
	once(self, SLUICE_WRITE, &e, there, 4096, 0, 65536);
	once(self, SLUICE_WRITE, &e, there, 5, 70001, 999);
	unsigned char found[65536];
	TRUE(pread(fd, found, 65536, SKIPPED) == 65536 && !memcmp(found, e.bytes + 4096, 65536));
	TRUE(pread(fd, found, 1001, SKIPPED + 70000) == 1001 && !found[0] &&
	     !memcmp(found + 1, e.bytes + 5, 999) && !found[1000]);
	memset(e.bytes, 0, LENGTH);
	once(self, SLUICE_READ, &e, there, 3, 70001, 999);
	TRUE(!e.bytes[2] && !memcmp(e.bytes + 3, found + 1, 999) && !e.bytes[1002]);

	sluice_transfer t = new_transfer(self, SLUICE_READ);
	struct sluice_desc past = {0, LENGTH - 1, 2};
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add(t, e.region, there, &past, 1));
	add_one(t, e.region, there, 0, LENGTH - 4096, 4096);
	TRUE(!ftruncate(fd, SKIPPED + 100)); // cut behind our back
	OK(sluice_post(t));
	TRUE(sluice_wait(t, LIMIT) < 0 && sluice_error()[0]);
	OK(sluice_transfer_close(t));
	OK(sluice_remote_close(there));
	OK(sluice_region_close(file));
	TRUE(!close(fd));
	close_end(&e);
}

/* No backend reaches a file of another engine: their engines do, by way of memory. */
static void between(const char *name)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
	TRUE(fd >= 0 && !ftruncate(fd, SKIPPED + LENGTH));
	struct end a = open_with(NULL), b = open_with(NULL);
	open_file(&b, fd);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	OK(sluice_remote_find(peer, "file", &there));
	memset(a.bytes, 'f', 100000);
	once(peer, SLUICE_WRITE, &a, there, 0, 4096, 100000);
	char found[100000];
	TRUE(pread(fd, found, 100000, SKIPPED + 4096) == 100000 && found[0] == 'f' &&
	     found[99999] == 'f');
	close_end(&a);
	close_end(&b);
	TRUE(!close(fd));
}

static sluice_transfer durable(sluice_peer peer, const char *only)
{
	sluice_transfer t;
	struct sluice_route route = {.size = sizeof route, .flags = SLUICE_DURABLE, .only = only};
	OK(sluice_transfer_new_route(peer, SLUICE_WRITE, &route, &t));
	return t;
}

static void durably(struct end *e, sluice_peer peer, const char *only, sluice_remote there, int fd,
		    int fill)
{
	char found[5000];
	memset(e->bytes, fill, sizeof found);
	sluice_transfer t = durable(peer, only);
	add_one(t, e->region, there, 0, 3, sizeof found);
	if (!only) // files carry no messages: another backend does
		OK(sluice_transfer_message(t, "kept", 4));
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	TRUE(pread(fd, found, sizeof found, SKIPPED + 3) == sizeof found && found[0] == fill &&
	     found[sizeof found - 1] == fill);
	OK(sluice_transfer_close(t));
}

/* Done when the disk has it, to a file of ours and of a peer; what cannot say so is an error. */
static void on_disk(const char *name)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
	TRUE(fd >= 0 && !ftruncate(fd, SKIPPED + LENGTH));
	struct end a = open_with(NULL), b = open_with(NULL);
	open_file(&a, fd);
	open_file(&b, fd);
	sluice_peer self, peer;
	sluice_remote there, theirs, memory;
	OK(sluice_self(a.engine, &self));
	OK(sluice_remote_find(self, "file", &there));
	durably(&a, self, "posix", there, fd, 'd');
	peer = connect_ends(&a, &b, &memory);
	OK(sluice_remote_find(peer, "file", &theirs));
	durably(&a, peer, NULL, theirs, fd, 'D');

	struct sluice_desc desc = {0, 0, 8};
	struct sluice_route route = {.size = sizeof route, .flags = SLUICE_DURABLE};
	sluice_transfer t = durable(peer, NULL);
	WANT(SLUICE_ERR_NO_ROUTE, sluice_transfer_add(t, a.region, memory, &desc, 1));
	OK(sluice_transfer_close(t));
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_transfer_new_route(self, SLUICE_READ, &route, &t));
	route.flags = 6;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_new_route(self, SLUICE_WRITE, &route, &t));
	TEXT("SLUICE_DURABLE");
	route.size = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_new_route(self, SLUICE_WRITE, &route, &t));
	TEXT("sizeof(struct sluice_route)");
	OK(sluice_transfer_new_route(self, SLUICE_READ, NULL, &t));
	OK(sluice_transfer_close(t));
	close_end(&a);
	close_end(&b);
	TRUE(!close(fd));
}

int main(int argc, char **argv)
{
	TRUE(argc == 2);
	char name[4096];
	snprintf(name, sizeof name, "%s/file", argv[1]);
	const char *const threads[] = {"path=threads", "threads=4", "durable=true", NULL},
			  *const wrong[] = {"path=rong", NULL};
	struct sluice_backend list[] = {{.name = "posix", .options = wrong}};
	struct sluice_config config = {.size = sizeof config,
				       .backends = list,
				       .backends_count = 1};
	sluice_engine none;
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(&config, &none));
	TEXT("threads");
	round_trip(NULL, name);
	round_trip(threads, name);
	between(name);
	on_disk(name);
	TRUE(!unlink(name));
	puts("ok");
	return 0;
}
