// SPDX-License-Identifier: Apache-2.0
// Many regions by one call: all or none; found, copied between and closed by one call each.
#include "check.h"

enum { COUNT = 100, EACH = 4096 };

static char names[COUNT][24];
static const char *list[COUNT];
static struct sluice_segment segments[COUNT];
static sluice_region regions[COUNT];

static void name_all(struct end *e)
{
	for (int i = 0; i < COUNT; i++) {
		snprintf(names[i], sizeof names[i], "part-%d", i);
		list[i] = names[i];
		segments[i] = (struct sluice_segment){.size = sizeof segments[i],
						      .kind = SLUICE_MEMORY,
						      .memory = e->memory,
						      .offset = i * EACH,
						      .length = EACH};
	}
}

/* Nothing of these is registered: each name is free. */
static void want_none(struct end *e)
{
	for (int i = 0; i < COUNT; i++)
		TRUE(!regions[i]);
	OK(sluice_register_many(e->engine, list, segments, COUNT, regions));
	OK(sluice_region_close_many(regions, COUNT));
}

static void refused(struct end *e)
{
	memset(regions, 1, sizeof regions);
	list[60] = list[59];
	WANT(SLUICE_ERR_BUSY, sluice_register_many(e->engine, list, segments, COUNT, regions));
	TEXT("segments[60]: ");
	list[60] = names[60];
	want_none(e);
	segments[COUNT - 1].length = EACH * COUNT;
	WANT(SLUICE_ERR_BOUNDS, sluice_register_many(e->engine, list, segments, COUNT, regions));
	segments[COUNT - 1].length = EACH;
	memset(regions, 0, sizeof regions);
	want_none(e);
	segments[7].size--;
	WANT(SLUICE_ERR_ARGUMENT, sluice_register_many(e->engine, list, segments, COUNT, regions));
	segments[7].size++;
	WANT(SLUICE_ERR_ARGUMENT, sluice_register_many(e->engine, list, NULL, COUNT, regions));
	TEXT("segments is NULL");
	OK(sluice_register_many(e->engine, NULL, NULL, 0, NULL));
	WANT(SLUICE_ERR_ARGUMENT, sluice_region_close_many(NULL, 1));
	WANT(SLUICE_ERR_HANDLE, sluice_region_close_many(regions, 1));
}

int main(void)
{
	struct end e = open_end("many", "mem", COUNT * EACH);
	sluice_peer self;
	sluice_remote remotes[COUNT];
	uint64_t lengths[COUNT];
	static struct sluice_copy copies[COUNT / 2];
	name_all(&e);
	refused(&e);
	OK(sluice_register_many(e.engine, list, segments, COUNT, regions));
	OK(sluice_self(e.engine, &self));
	OK(sluice_remote_find_many(self, list, COUNT, remotes, lengths));
	sluice_remote alone;
	OK(sluice_remote_find(self, "part-77", &alone));
	TRUE(alone == remotes[77] && lengths[77] == EACH);
	list[3] = "nothing";
	WANT(SLUICE_ERR_NO_ROUTE, sluice_remote_find_many(self, list, COUNT, remotes, lengths));
	WANT(SLUICE_ERR_ARGUMENT, sluice_remote_find_many(self, list, COUNT, remotes, NULL));

	for (int i = 0; i < COUNT / 2; i++) { /* part i to the part as far from the end, askew */
		memset(e.bytes + i * EACH, i + 1, EACH);
		copies[i] = (struct sluice_copy){
		    regions[i], remotes[COUNT - 1 - i], {.local = 0, .remote = i, .length = 100}};
	}
	sluice_transfer t = new_transfer(self, SLUICE_WRITE);
	OK(sluice_transfer_add_many(t, copies, COUNT / 2));
	copies[5].desc.remote = EACH - 99;
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add_many(t, copies + 4, 2));
	TEXT("copies[1]: ");
	copies[0].region = 0;
	WANT(SLUICE_ERR_HANDLE, sluice_transfer_add_many(t, copies, 1));
	OK(sluice_post_and_wait(t, LIMIT));
	for (int i = 0; i < COUNT / 2; i++) {
		unsigned char *there = e.bytes + (COUNT - 1 - i) * EACH + i;
		TRUE(there[0] == i + 1 && there[99] == i + 1 && !there[100] && (!i || !there[-1]));
	}
	/* those before the first that a transfer lists are closed */
	sluice_region order[] = {regions[60], regions[8], regions[61]};
	WANT(SLUICE_ERR_BUSY, sluice_region_close_many(order, 3));
	TEXT("regions[1]: ");
	WANT(SLUICE_ERR_HANDLE, sluice_region_close(order[0]));
	OK(sluice_region_close(order[2]));
	OK(sluice_transfer_close(t));
	close_end(&e);
	puts("ok");
	return 0;
}
