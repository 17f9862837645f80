// SPDX-License-Identifier: Apache-2.0
// Prints the nanoseconds of posting and waiting for 2,048 pages of 656 bytes, as many of 8, and 64
// bytes, for each line that it reads; argv[1] is how many rounds of argv[2] posts,
// argv[3] is "together" for post and wait in one call.
#include <time.h>

#include "check.h"

enum { COUNT = 2048, ENTRY = 656, STRIDE = 1024 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int together; // in one call, not two

static double measure(sluice_transfer t, long posts)
{
	double start = now();
	for (long i = 0; i < posts; i++) {
		if (together) {
			OK(sluice_post_and_wait(t, LIMIT));
			continue;
		}
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
	}
	return (now() - start) / (double)posts;
}

int main(int argc, char **argv)
{
	TRUE(argc == 4);
	together = !strcmp(argv[3], "together");
	long rounds = atol(argv[1]), posts = atol(argv[2]);
	struct end a = open_end("a", "shm", COUNT * STRIDE),
		   b = open_end("b", "shm", COUNT * STRIDE);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	static uint32_t from[COUNT], to[COUNT];
	for (uint32_t i = 0; i < COUNT; i++) {
		from[i] = (i * 7) % COUNT;
		to[i] = (i * 13) % COUNT;
	}
	struct sluice_pages pages = {.size = sizeof pages,
				     .count = COUNT,
				     .entry_length = ENTRY,
				     .local_stride = STRIDE,
				     .remote_stride = STRIDE,
				     .local = from,
				     .remote = to};
	sluice_transfer large = new_transfer(peer, SLUICE_WRITE),
			tiny = new_transfer(peer, SLUICE_WRITE),
			small = new_transfer(peer, SLUICE_WRITE);
	OK(sluice_transfer_add_pages(large, a.region, there, &pages));
	pages.entry_length = 8;
	OK(sluice_transfer_add_pages(tiny, a.region, there, &pages));
	add_one(small, a.region, there, 0, 0, 64);
	measure(large, 10), measure(tiny, 10), measure(small, 1000);
	char line[16];
	for (long i = 0; i < rounds && fgets(line, sizeof line, stdin);
	     i++) { // the reader says when
		printf("%.0f %.0f %.1f\n", measure(large, posts), measure(tiny, posts * 10),
		       measure(small, posts * 100));
		fflush(stdout);
	}
	close_end(&a);
	close_end(&b);
	return 0;
}
