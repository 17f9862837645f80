/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fails an owner's queue pair, and begins an initiator's, while the list of requests that are built
 * is full: the mark and the probe find room.
 *
 *	room LIBRARY CONTROL
 */
#define _GNU_SOURCE
#include "ends.h"

#define UNTOUCHED 0x5a5a5a5a5a5a5a5aull

/* Writes without bytes, over this queue pair, until no more can be built. Under the lock. */
static void fill(struct sl_verbs_pair *l)
{
	l->conn->context->traffic->sges[0].addr = UNTOUCHED; /* it lies behind the requests */
	while (l->conn->context->traffic->wrs_used < SL_VERBS_CHAIN) {
		struct sl_verbs_record *r = sl_verbs_new_record(l->conn->context);

		MUST(r);
		r->kind = SL_VERBS_PROBE;
		sl_verbs_build(l, r, sl_verbs_next_entries(l->conn), 0)->opcode = IBV_WR_RDMA_WRITE;
	}
}

int main(int argc, char **argv)
{
	const struct sl_verbs_config config = {
	    .slice = 64 << 10, .flight = 1 << 20, .spin_ns = 20000};
	struct sl_verbs_context *near, *far;
	struct sl_verbs_conn *conn, *back;
	struct sl_verbs_end mine, theirs;
	char why[256];

	MUST(argc == 3);
	set_up_devices(argv[2]);
	MUST(sl_verbs_load(argv[1], why, sizeof(why)) == 0);
	near = open_end(config, "fake0", "fake2");
	far = open_end(config, "fake1", "fake3");
	MUST(sl_verbs_connect(near, 1, 8, &conn) == 0 && sl_verbs_connect(far, 0, 0, &back) == 0);
	connect_pair(conn, back, 0);
	/* A probe. */
	MUST(sl_verbs_pair_make(conn, 1, 1, &mine) == 0);
	MUST(sl_verbs_pair_make(back, 1, 1, &theirs) == 0);
	MUST(sl_verbs_pair_begin(back, 1, &mine) == 0);
	sl_verbs_lock(near);
	fill(conn->pairs[0]);
	sl_verbs_unlock(near);
	MUST(sl_verbs_pair_begin(conn, 1, &theirs) == 0);
	sl_verbs_lock(near);
	MUST(near->traffic->wrs_used == 0 && near->traffic->sges[0].addr == UNTOUCHED);
	sl_verbs_unlock(near);
	/* A mark. */
	sl_verbs_lock(far);
	fill(back->pairs[0]);
	sl_verbs_fail_pair(back->pairs[1], 0);
	MUST(far->traffic->wrs_used == 0 && far->traffic->sges[0].addr == UNTOUCHED);
	sl_verbs_unlock(far);
	MUST(sl_verbs_disconnect(conn) == 0 && sl_verbs_disconnect(back) == 0);
	MUST(sl_verbs_close(near) == 0 && sl_verbs_close(far) == 0);
	return 0;
}
