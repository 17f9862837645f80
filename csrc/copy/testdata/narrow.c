/* SPDX-License-Identifier: Apache-2.0 */
/* Streams by the registers that each x86-64 has, between all places of a line. */
#include "../stream.h"

#include <stdio.h>

#if defined(__x86_64__)
#define GUARD 512
#define SIZE (2 * GUARD + 2048)

static uint8_t from[SIZE], to[SIZE], want[SIZE];
#endif

int main(void)
{
#if defined(__x86_64__)
	for (int i = 0; i < SIZE; i++)
		from[i] = (uint8_t)(i * 31 + i / 256);
	for (uint64_t n = 0; n < 1200; n += n < 600 ? 1 : 7)
		for (uint64_t at = 0; at < 64; at++) {
			uint64_t dst = GUARD, src = GUARD + at, done;

			dst += -(uintptr_t)(to + dst) % SL_COPY_ALIGN;
			done = sl_copy_narrow(to + dst, from + src, n);
			sl_copy_fence(0);
			memcpy(want + dst, from + src, done);
			if (done != n / SL_COPY_TURN * SL_COPY_TURN || memcmp(to, want, SIZE)) {
				printf("%d bytes from %d: other bytes\n", (int)n, (int)at);
				return 1;
			}
			memset(to, 0, SIZE);
			memset(want, 0, SIZE);
		}
#endif
	return 0;
}
