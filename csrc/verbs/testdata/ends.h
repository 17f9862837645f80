/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs of this folder have in common: two contexts over the stand-in, connected. */
#ifndef SLUICE_VERBS_ENDS_H
#define SLUICE_VERBS_ENDS_H

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

static struct sl_verbs_context *open_end(struct sl_verbs_config config, const char *first,
					 const char *second)
{
	const char *names[] = {first, second};
	struct sl_verbs_context *c;
	uint32_t number;
	char why[256];

	config.batches = 64;
	config.notifs = 8;
	config.conns = 4;
	config.depth = 2 * SL_VERBS_CHAIN;
	config.wake_fd = eventfd(0, EFD_NONBLOCK);
	config.control_fd = eventfd(0, EFD_NONBLOCK);
	MUST(sl_verbs_open(&config, &c) == 0);
	for (int i = 0; i < 2; i++) {
		struct sl_verbs_rail_config r = {
		    .device = names[i], .port = 1, .gid = 1, .timeout = 14, .retries = 3};

		MUST(sl_verbs_rail_open(c, &r, &number, why, sizeof(why)) == 0);
	}
	return c;
}

static inline void connect_pair(struct sl_verbs_conn *conn, struct sl_verbs_conn *back,
				uint32_t pair)
{
	struct sl_verbs_end mine, theirs;

	MUST(sl_verbs_pair_make(conn, pair, pair, &mine) == 0);
	MUST(sl_verbs_pair_make(back, pair, pair, &theirs) == 0);
	MUST(sl_verbs_pair_begin(back, pair, &mine) == 0);
	MUST(sl_verbs_pair_begin(conn, pair, &theirs) == 0);
	while (__atomic_load_n(&conn->pairs[pair]->state, __ATOMIC_SEQ_CST) != SL_VERBS_LIVE)
		usleep(1000);
}

static struct fake_control *set_up_devices(const char *path)
{
	int fd = open(path, O_RDWR);
	struct fake_control *control =
	    mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	MUST(control != MAP_FAILED);
	control->devices = 4;
	for (int i = 0; i < 4; i++)
		control->device[i].panel.link = 1;
	return control;
}

#endif
