/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fails an owner's queue pair, and begins an initiator's, while the list of requests that are built is
 * full: the mark and the probe find room.
 *
 *	room LIBRARY CONTROL
 */
#define _GNU_SOURCE
#include "control.h"
#include "pair.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define MUST(x) \
	do { \
		if (!(x)) { \
			fprintf(stderr, "line %d: %s\n", __LINE__, #x); \
			exit(1); \
		} \
	} while (0)

static struct sl_verbs_context *open_end(const char *first, const char *second)
{
	struct sl_verbs_config config = {.batches = 64,
					 .notifs = 8,
					 .conns = 4,
					 .depth = 2 * SL_VERBS_CHAIN,
					 .slice = 64 << 10,
					 .flight = 1 << 20,
					 .spin_ns = 20000,
					 .wake_fd = eventfd(0, EFD_NONBLOCK),
					 .control_fd = eventfd(0, EFD_NONBLOCK)};
	const char *names[] = {first, second};
	struct sl_verbs_context *c;
	uint32_t number;
	char why[256];

	MUST(sl_verbs_open(&config, &c) == 0);
	for (int i = 0; i < 2; i++) {
		struct sl_verbs_rail_config r = {
			.device = names[i], .port = 1, .gid = 1, .timeout = 14, .retries = 3};

		MUST(sl_verbs_rail_open(c, &r, &number, why, sizeof(why)) == 0);
	}
	return c;
}

static void connect_pair(struct sl_verbs_conn *conn, struct sl_verbs_conn *back, uint32_t pair)
{
	struct sl_verbs_end mine, theirs;

	MUST(sl_verbs_pair_make(conn, pair, pair, &mine) == 0);
	MUST(sl_verbs_pair_make(back, pair, pair, &theirs) == 0);
	MUST(sl_verbs_pair_begin(back, pair, &mine) == 0);
	MUST(sl_verbs_pair_begin(conn, pair, &theirs) == 0);
	while (__atomic_load_n(&conn->pairs[pair]->state, __ATOMIC_SEQ_CST) != SL_VERBS_LIVE)
		usleep(1000);
}

#define UNTOUCHED 0x5a5a5a5a5a5a5a5aull

/* Writes without bytes, over this queue pair, until no more can be built. Under the lock. */
static void fill(struct sl_verbs_pair *l)
{
	l->conn->context->traffic->sges[0].addr = UNTOUCHED; /* it lies behind the requests */
	while (l->conn->context->traffic->built < SL_VERBS_CHAIN) {
		struct sl_verbs_record *r = sl_verbs_record(l->conn->context);

		MUST(r);
		r->kind = SL_VERBS_PROBE;
		sl_verbs_build(l, r, sl_verbs_entries(l->conn), 0)->opcode = IBV_WR_RDMA_WRITE;
	}
}

static void set_up_devices(const char *path)
{
	int fd = open(path, O_RDWR);
	struct fake_control *control =
		mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	MUST(control != MAP_FAILED);
	control->devices = 4;
	for (int i = 0; i < 4; i++)
		control->device[i].panel.link = 1;
}

int main(int argc, char **argv)
{
	struct sl_verbs_context *near, *far;
	struct sl_verbs_conn *conn, *back;
	struct sl_verbs_end mine, theirs;
	char why[256];

	MUST(argc == 3);
	set_up_devices(argv[2]);
	MUST(sl_verbs_load(argv[1], why, sizeof(why)) == 0);
	near = open_end("fake0", "fake2");
	far = open_end("fake1", "fake3");
	MUST(sl_verbs_connect(near, 1, 8, &conn) == 0 && sl_verbs_connect(far, 0, 0, &back) == 0);
	connect_pair(conn, back, 0);
	/* A probe. */
	MUST(sl_verbs_pair_make(conn, 1, 1, &mine) == 0);
	MUST(sl_verbs_pair_make(back, 1, 1, &theirs) == 0);
	MUST(sl_verbs_pair_begin(back, 1, &mine) == 0);
	sl_verbs_enter(near);
	fill(conn->pairs[0]);
	sl_verbs_unlock(near);
	MUST(sl_verbs_pair_begin(conn, 1, &theirs) == 0);
	sl_verbs_enter(near);
	MUST(near->traffic->built == 0 && near->traffic->sges[0].addr == UNTOUCHED);
	sl_verbs_unlock(near);
	/* A mark. */
	sl_verbs_enter(far);
	fill(back->pairs[0]);
	sl_verbs_fail_pair(back->pairs[1], 0);
	MUST(far->traffic->built == 0 && far->traffic->sges[0].addr == UNTOUCHED);
	sl_verbs_unlock(far);
	MUST(sl_verbs_disconnect(conn) == 0 && sl_verbs_disconnect(back) == 0);
	MUST(sl_verbs_close(near) == 0 && sl_verbs_close(far) == 0);
	return 0;
}
