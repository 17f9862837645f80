/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the pages of a mapping before the first copy does, one by one. */
#define _GNU_SOURCE
#include "worker.h"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14; before it faults come one by one */
#endif

/* Pages that are looked at together. */
#define STRIDE 4096

/*
 * Only those that the owner has touched: it may have reserved far more than it uses. They
 * are in the page cache, which mincore tells although we have not mapped them yet.
 */
void sl_ucx_populate(void *at, uint64_t len)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint8_t *from = (uint8_t *)((uintptr_t)at & ~(page - 1));
	uint64_t pages = (len + (uint64_t)((uint8_t *)at - from) + page - 1) / page;
	unsigned char resident[STRIDE];

	for (uint64_t done = 0; done < pages;) {
		uint64_t n = pages - done < STRIDE ? pages - done : STRIDE;
		uint8_t *chunk = from + done * page;

		if (mincore(chunk, n * page, resident) != 0)
			return;
		for (uint64_t i = 0, run; i < n; i += run) {
			for (run = 1; i + run < n && (resident[i + run] & 1) == (resident[i] & 1);
			     run++)
				;
			if (resident[i] & 1 &&
			    madvise(chunk + i * page, run * page, MADV_POPULATE_WRITE) != 0)
				return;
		}
		done += n;
	}
}
