/* SPDX-License-Identifier: Apache-2.0 */
/* What the test under the race detector calls. */
#ifndef SLUICE_HAMMER_H
#define SLUICE_HAMMER_H

#include <stdint.h>

/* Calls of all threads, those that were answered with SLUICE_OK, and those of each code. */
struct hammer_counts {
	uint64_t calls;
	uint64_t codes[64];
};

/*
 * Has threads call the C ABI at random over handles that they share, so many times each, and
 * closes what is left. Sockets lie in the folder. 0, or the code of a close that failed.
 */
int hammer(unsigned seed, int rounds, const char *folder, struct hammer_counts *counts);

#endif
