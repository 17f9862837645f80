/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What depends on time, by a clock that this program moves: a standstill of this process is not
 * taken for silence of a device. Link it with -Wl,--wrap=sl_verbs_now.
 *
 *	time LIBRARY CONTROL
 */
#define _GNU_SOURCE
#include "ends.h"

#include <stdatomic.h>

#define MS UINT64_C(1000000)
#define HOUR (3600 * 1000 * MS)
#define STALL (8000 * MS)
#define SLICE (1u << 20)
#define BYTES (16 * SLICE)

static _Atomic uint64_t clock_ns = 1000 * MS;

uint64_t __wrap_sl_verbs_now(void);
uint64_t __wrap_sl_verbs_now(void)
{
	return clock_ns;
}

static struct fake_control *control;
static struct sl_verbs_context *near, *far;
static struct sl_verbs_conn *conn, *back;
static uint32_t slot, keys[2];
static uint8_t *remote;

static uint8_t *map(struct sl_verbs_context *c)
{
	uint8_t *memory = aligned_alloc(4096, BYTES);
	struct sl_verbs_pin *pins[2];

	MUST(memory);
	for (uint32_t i = 0; i < 2; i++)
		MUST(sl_verbs_pin(c, i, memory, BYTES, 0, NULL, &pins[i]) == 0);
	MUST(sl_verbs_map(c, 1, memory, BYTES, pins, 0) == 0);
	return memory;
}

static void link_up(void)
{
	MUST(sl_verbs_connect(near, 1, 8, &conn) == 0 && sl_verbs_connect(far, 0, 0, &back) == 0);
	for (uint32_t i = 0; i < 2; i++)
		connect_pair(conn, back, i);
	MUST(sl_verbs_import(conn, (uintptr_t)remote, BYTES, 0, keys, 2, &slot) == 0);
}

static void set_up(const char *library)
{
	const struct sl_verbs_config config = {
	    .slice = SLICE, .flight = 2 * BYTES, .stall_ns = STALL};
	char why[256];

	MUST(sl_verbs_load(library, why, sizeof(why)) == 0);
	near = open_end(config, "fake0", "fake2");
	far = open_end(config, "fake1", "fake3");
	map(near);
	remote = map(far);
	for (uint32_t i = 0; i < 2; i++)
		MUST(sl_verbs_grant(far, 1, i, (uintptr_t)remote, 0, &keys[i]) == 0);
	link_up();
}

/* The devices of the near end do nothing, or go on. */
static void freeze(uint32_t frozen)
{
	control->device[0].panel.frozen = control->device[2].panel.frozen = frozen;
}

/* Posts a write that the devices do not begin. */
static void post(uint64_t len)
{
	struct sl_desc d = {0, 0, len, 1, slot};

	freeze(1);
	MUST(sl_verbs_submit(conn, 1, 1, &d, 1, NULL, NULL, NULL, NULL, NULL, 0) == 0);
}

/* What came back meanwhile is looked at before a queue pair is given up. */
static void stand_still_in_drain(void)
{
	struct sl_verbs_pair *l;
	uint32_t before;

	post(SLICE);
	before = control->device[0].panel.completions;
	sl_verbs_lock(near);
	l = conn->pairs[0];
	MUST(l->posted.first);
	sl_verbs_fail_pair(l, IBV_WC_RETRY_EXC_ERR);
	while (control->device[0].panel.completions == before)
		usleep(100);
	clock_ns += HOUR;
	sl_verbs_give_up_draining(near, clock_ns);
	MUST(l->state == SL_VERBS_FAILED && l->qp);
	sl_verbs_unlock(near);
}

/* A device that says nothing is given up in its time, of which a standstill is no part. */
static void stand_still_in_silence(void)
{
	struct sl_verbs_pair *l = conn->pairs[1];
	const uint64_t beat = STALL / SL_VERBS_STALL_CHECKS;
	uint64_t ran = 0;
	int looks, posted, live = 1;

	/* What the other queue pair held may not go over this one yet: it is not settled. */
	post(SLICE);
	sl_verbs_lock(near);
	posted = l->posted.first != NULL;
	sl_verbs_unlock(near);
	MUST(posted);
	for (looks = 0; live && looks < 1000; looks++) {
		sl_verbs_lock(near);
		if (looks % 3 == 2) {
			clock_ns += HOUR;
		} else {
			clock_ns += beat;
			ran += beat;
		}
		sl_verbs_fail_stalled(near, clock_ns);
		live = l->state == SL_VERBS_LIVE;
		sl_verbs_unlock(near);
	}
	MUST(!live && ran >= STALL);
}

/* Where this process stands still before each look, some of that time counts. */
static void stand_still_at_each_look(void)
{
	const uint64_t begin = clock_ns;
	int live = 1;

	freeze(0);
	link_up(); /* the queue pairs before have failed */
	post(SLICE);
	for (int looks = 0; live && looks < 1000; looks++) {
		sl_verbs_lock(near);
		clock_ns += STALL;
		sl_verbs_fail_stalled(near, clock_ns);
		live = conn->pairs[0]->state == SL_VERBS_LIVE &&
		       conn->pairs[1]->state == SL_VERBS_LIVE;
		sl_verbs_unlock(near);
	}
	MUST(!live && clock_ns - begin >= 8 * STALL);
}

int main(int argc, char **argv)
{
	MUST(argc == 3);
	control = set_up_devices(argv[2]);
	set_up(argv[1]);
	stand_still_in_drain();
	stand_still_in_silence();
	stand_still_at_each_look();
	return 0;
}
