// SPDX-License-Identifier: Apache-2.0
// Prints the nanoseconds of posting and waiting for 2,048 pages and for 64 bytes, a line for each
// round; argv[1] is how many rounds of argv[2] posts.
#include <time.h>

#include "check.h"

enum { COUNT = 2048, ENTRY = 656, STRIDE = 1024 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static double measure(sluice_transfer t, long posts)
{
	double start = now();
	for (long i = 0; i < posts; i++) {
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
	}
	return (now() - start) / (double)posts;
}

int main(int argc, char **argv)
{
	TRUE(argc == 3);
	long rounds = atol(argv[1]), posts = atol(argv[2]);
	struct end a = open_end("a", "mem", COUNT * STRIDE), b = open_end("b", "mem", COUNT * STRIDE);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	static uint32_t from[COUNT], to[COUNT];
	for (uint32_t i = 0; i < COUNT; i++) {
		from[i] = (i * 7) % COUNT;
		to[i] = (i * 13) % COUNT;
	}
	struct sluice_pages pages = {.size = sizeof pages, .count = COUNT, .entry_length = ENTRY, .local_stride = STRIDE,
				     .remote_stride = STRIDE, .local = from, .remote = to};
	sluice_transfer large = new_transfer(peer, SLUICE_WRITE), small = new_transfer(peer, SLUICE_WRITE);
	OK(sluice_transfer_add_pages(large, a.region, there, &pages));
	add_one(small, a.region, there, 0, 0, 64);
	measure(large, 10), measure(small, 1000);
	char line[16];
	for (long i = 0; i < rounds && fgets(line, sizeof line, stdin); i++) { // who reads says when
		printf("%.0f %.1f\n", measure(large, posts), measure(small, posts * 100));
		fflush(stdout);
	}
	close_end(&a);
	close_end(&b);
	return 0;
}
