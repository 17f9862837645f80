/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Drives the verbs side from many threads, over the stand-in for libibverbs and while its devices
 * fail: built with the thread sanitizer, which sees what Go's race detector does not.
 *
 *	verbs_race LIBRARY CONTROL
 */
#define _GNU_SOURCE
#include "ends.h"

#include <stdatomic.h>

#define PAIRS 2
#define BYTES (1u << 20)
#define ROUND_US 400000

static struct fake_control *control;
static struct sl_verbs_context *near, *far;
static struct sl_verbs_conn *conn, *back;
static uint32_t slot;
static atomic_int stop;
static atomic_ulong tags;
static atomic_long under_way;
static unsigned long finished;

static void *map(struct sl_verbs_context *c, uint32_t key, size_t bytes, struct sl_verbs_pin **pins)
{
	void *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (uint32_t i = 0; i < PAIRS; i++)
		MUST(sl_verbs_pin(c, i, mem, bytes, 0, NULL, &pins[i]) == 0);
	MUST(sl_verbs_map(c, key, mem, bytes, pins, 0) == 0);
	return mem;
}

/* As the control plane does it. 0, or it is to be done again. */
static int make_pair(uint32_t pair)
{
	struct sl_verbs_end mine, theirs;

	if (sl_verbs_pair_end(back, pair) != 0)
		return -1;
	/* the first time there is nothing to settle */
	(void)sl_verbs_pair_settle(conn, pair, sl_verbs_seen(back));
	if (sl_verbs_pair_make(conn, pair, pair, &mine) != 0 ||
	    sl_verbs_pair_make(back, pair, pair, &theirs) != 0 ||
	    sl_verbs_pair_begin(back, pair, &mine) != 0)
		return -1;
	return sl_verbs_pair_begin(conn, pair, &theirs);
}

static void *mend(void *arg)
{
	int failed[PAIRS] = {0};
	struct sl_verbs_news n;

	while (!atomic_load(&stop)) {
		while (sl_verbs_news(near, &n))
			if (n.kind == SL_VERBS_PAIR_FAILED)
				failed[n.pair] = 1;
		while (sl_verbs_news(far, &n))
			;
		for (uint32_t i = 0; i < PAIRS; i++)
			if (failed[i])
				failed[i] = make_pair(i) != 0;
		usleep(300);
	}
	return arg;
}

static void *submit(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)arg;

	while (!atomic_load(&stop)) {
		uint64_t tag = atomic_fetch_add(&tags, 1) + 1;
		/* 0: a read; 1: a write; 2: a write with a message */
		int what = rand_r(&seed) % 3;
		int write = what > 0;
		struct sl_desc d[3];

		for (int i = 0; i < 3; i++) {
			uint64_t n = 1 + (uint64_t)rand_r(&seed) % 50000;

			/* Reads land where no write takes its bytes from. */
			uint64_t at =
			    (write ? 0 : BYTES / 2) + (uint64_t)rand_r(&seed) % (BYTES / 2 - n);

			d[i] =
			    (struct sl_desc){at, (uint64_t)rand_r(&seed) % (BYTES - n), n, 1, slot};
		}
		atomic_fetch_add(&under_way, 1);
		if (sl_verbs_submit(conn, write, tag, d, 3, NULL, NULL, NULL, NULL,
				    what == 2 ? (uint8_t *)&tag : NULL,
				    what == 2 ? sizeof(tag) : 0) != 0)
			atomic_fetch_sub(&under_way, 1);
		if (rand_r(&seed) % 8 == 0)
			sl_verbs_cancel(conn, tag);
		if (rand_r(&seed) % 4 == 0)
			sl_verbs_drive(near);
		if (rand_r(&seed) % 16 == 0)
			sl_verbs_resume_thread(near);
		usleep(rand_r(&seed) % 300);
	}
	return arg;
}

static void *poll_both(void *arg)
{
	struct sl_ring *ring = sl_verbs_ring(near), *notifs = sl_verbs_ring(far);
	uint8_t notif[SL_VERBS_NOTIF_MAX];

	while (!atomic_load(&stop) || atomic_load(&under_way) > 0) {
		uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE), tail = ring->tail;

		for (; tail != head; tail++) {
			MUST(ring->done[tail & ring->mask].tag <= atomic_load(&tags));
			atomic_fetch_sub(&under_way, 1);
			finished++;
		}
		__atomic_store_n(&ring->tail, tail, __ATOMIC_RELEASE);
		while (__atomic_load_n(&notifs->notifs, __ATOMIC_SEQ_CST))
			sl_verbs_notif_take(far, notif);
		usleep(50);
	}
	return arg;
}

static void *harm(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)arg;
	struct sl_verbs_counters counters;
	struct sl_verbs_rail_info rail;

	while (!atomic_load(&stop)) {
		struct fake_panel *p = &control->device[rand_r(&seed) % PAIRS * 2].panel;

		p->late_us = 2000;
		p->fail_status = IBV_WC_RETRY_EXC_ERR;
		p->delay_us = (uint32_t)rand_r(&seed) % 300;
		*(rand_r(&seed) % 2 ? &p->lose : rand_r(&seed) % 2 ? &p->late : &p->fail) = 1;
		usleep(3000);
		MUST(sl_verbs_rail_counters(near, 0, &counters) == 0 &&
		     sl_verbs_rail_info(near, 1, &rail) == 0);
	}
	for (int i = 0; i < PAIRS; i++)
		control->device[2 * i].panel.lose = control->device[2 * i].panel.late =
		    control->device[2 * i].panel.fail = 0;
	return arg;
}

/* Memory comes and goes beside all that. */
static void *register_memory(void *arg)
{
	while (!atomic_load(&stop)) {
		struct sl_verbs_pin *pins[SL_VERBS_RAILS] = {NULL};
		void *mem = map(near, 7, 65536, pins);
		uint32_t key;

		MUST(sl_verbs_grant(near, 7, 0, 0, 0, &key) == 0 && sl_verbs_revoke(near, 7) == 0);
		MUST(sl_verbs_unmap(near, 7) == 0);
		for (int i = 0; i < PAIRS; i++)
			MUST(sl_verbs_unpin(pins[i]) == 0);
		munmap(mem, 65536);
		usleep(1000);
	}
	return arg;
}

static void run(int round)
{
	static void *(*const work[])(void *) = {mend, submit,	       submit,
						harm, register_memory, poll_both};
	const struct sl_verbs_config config = {
	    .slice = 64 << 10, .flight = 1 << 20, .spin_ns = 20000};
	struct sl_verbs_pin *pins[SL_VERBS_RAILS] = {NULL}, *others[SL_VERBS_RAILS] = {NULL};
	uint32_t keys[PAIRS];
	pthread_t threads[6];
	void *local, *remote;

	atomic_store(&stop, 0);
	near = open_end(config, "fake0", "fake2");
	far = open_end(config, "fake1", "fake3");
	local = map(near, 1, BYTES, pins);
	remote = map(far, 1, BYTES, others);
	MUST(sl_verbs_connect(near, 1, 8, &conn) == 0 && sl_verbs_connect(far, 0, 0, &back) == 0);
	for (uint32_t i = 0; i < PAIRS; i++)
		MUST(make_pair(i) == 0 &&
		     sl_verbs_grant(far, 1, i, (uintptr_t)remote, 0, &keys[i]) == 0);
	MUST(sl_verbs_import(conn, (uintptr_t)remote, BYTES, 0, keys, PAIRS, &slot) == 0);
	for (uintptr_t i = 0; i < 6; i++)
		MUST(pthread_create(&threads[i], NULL, work[i], (void *)(i + 1)) == 0);
	usleep(ROUND_US);
	atomic_store(&stop, 1);
	for (int i = 0; i < 5; i++)
		pthread_join(threads[i], NULL);
	if (round > 0)
		(void)sl_verbs_drain(conn, 1000000);
	sl_verbs_end(conn, round > 0 ? SL_VERBS_CLOSED : SL_VERBS_LOST, 0);
	pthread_join(threads[5], NULL);
	if (round < 2) { /* or the context does it */
		sl_verbs_disconnect(conn);
		sl_verbs_disconnect(back);
	}
	sl_verbs_close(near);
	sl_verbs_close(far);
	sl_verbs_free(near);
	sl_verbs_free(far);
	munmap(local, BYTES);
	munmap(remote, BYTES);
}

int main(int argc, char **argv)
{
	char why[256];

	MUST(argc == 3);
	control = set_up_devices(argv[2]);
	MUST(sl_verbs_load(argv[1], why, sizeof(why)) == 0);
	for (int round = 0; round < 3; round++)
		run(round);
	for (int i = 0; i < 2 * PAIRS; i++) {
		struct fake_panel *p = &control->device[i].panel;

		MUST(!(p->contexts | p->pds | p->mrs | p->channels | p->cqs | p->srqs | p->qps));
		MUST(!(p->overruns | p->unready));
	}
	printf("%lu batches\n", finished);
	return 0;
}
