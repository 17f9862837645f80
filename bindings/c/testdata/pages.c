// SPDX-License-Identifier: Apache-2.0
// Scattered entries by index lists, both ways, and without a list.
#include "check.h"

enum { COUNT = 2048, ENTRY = 656, STRIDE = 1024 };

int main(void)
{
	struct end a = open_end("a", "mem", COUNT * STRIDE),
		   b = open_end("b", "mem", COUNT * STRIDE);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	static uint32_t from[COUNT], to[COUNT];
	for (uint32_t i = 0; i < COUNT; i++) {
		from[i] = (i * 7) % COUNT;
		to[i] = (i * 13) % COUNT;
		memset(a.bytes + i * STRIDE, (int)(1 + i % 255), ENTRY);
	}
	struct sluice_pages pages = {.size = sizeof pages,
				     .count = COUNT,
				     .entry_length = ENTRY,
				     .local_stride = STRIDE,
				     .remote_stride = STRIDE,
				     .local = from,
				     .remote = to};
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	OK(sluice_transfer_add_pages(t, a.region, there, &pages));
	for (int round = 0; round < 3; round++) {
		memset(b.bytes, 0, COUNT * STRIDE);
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
		for (uint32_t i = 0; i < COUNT; i++) {
			TRUE(!memcmp(b.bytes + to[i] * STRIDE, a.bytes + from[i] * STRIDE, ENTRY));
			TRUE(b.bytes[to[i] * STRIDE + ENTRY] == 0);
		}
	}
	OK(sluice_reset(t));
	pages.local = NULL;
	pages.remote = NULL;
	pages.local_base = 8;
	pages.count = COUNT - 1;
	memset(b.bytes, 0, COUNT * STRIDE);
	OK(sluice_transfer_add_pages(t, a.region, there, &pages));
	OK(sluice_post_and_wait(t, LIMIT));
	for (uint32_t i = 0; i < COUNT - 1; i++)
		TRUE(!memcmp(b.bytes + i * STRIDE, a.bytes + 8 + i * STRIDE, ENTRY));
	OK(sluice_reset(t));
	from[5] = COUNT;
	pages.local = from;
	pages.local_base = 0;
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add_pages(t, a.region, there, &pages));
	pages.count = 0;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pages(t, a.region, there, &pages));
	pages.count = UINT64_MAX;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pages(t, a.region, there, &pages));
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
