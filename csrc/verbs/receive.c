/* SPDX-License-Identifier: Apache-2.0 */
/* The receives of a rail, for the messages of all connections over it. */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static size_t bytes_of(uint32_t slots)
{
	return ((size_t)slots * SL_VERBS_SLOT + 4095) & ~(size_t)4095;
}

static uint32_t slots_of(const struct sl_verbs_port *p, uint32_t tray)
{
	uint32_t left = p->slots - tray * SL_VERBS_TRAY;

	return left < SL_VERBS_TRAY ? left : SL_VERBS_TRAY;
}

static struct ibv_sge place_of(const struct sl_verbs_port *p, uint32_t slot)
{
	return (struct ibv_sge){.addr = (uintptr_t)sl_verbs_slot(p, slot),
				.length = SL_VERBS_SLOT,
				.lkey = p->trays[slot / SL_VERBS_TRAY].mr->lkey};
}

int sl_verbs_post_slot(struct sl_verbs_port *p, uint32_t slot)
{
	struct ibv_sge at = place_of(p, slot);
	struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &at, .num_sge = 1}, *bad;

	return sl_verbs_post_srq_recv(p->srq, &wr, &bad);
}

/* What of the last tray is not posted. */
static int post_rest(struct sl_verbs_port *p)
{
	struct ibv_recv_wr wrs[SL_VERBS_TRAY], *bad = wrs;
	struct ibv_sge at[SL_VERBS_TRAY];
	uint32_t tray = p->trays_len - 1;
	uint32_t n = tray * SL_VERBS_TRAY + slots_of(p, tray) - p->slots_posted;
	int rc;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = p->slots_posted + i;

		at[i] = place_of(p, slot);
		wrs[i] = (struct ibv_recv_wr){.wr_id = slot,
					      .next = i + 1 < n ? &wrs[i + 1] : NULL,
					      .sg_list = &at[i],
					      .num_sge = 1};
	}
	rc = sl_verbs_post_srq_recv(p->srq, wrs, &bad);
	p->slots_posted += rc == 0 ? n : (uint32_t)(bad - wrs);
	return -rc;
}

static int add_tray(struct sl_verbs_port *p)
{
	struct sl_verbs_tray *t = &p->trays[p->trays_len];
	size_t bytes = bytes_of(slots_of(p, p->trays_len));
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int rc;

	if (at == MAP_FAILED)
		return -ENOMEM;
	errno = 0;
	t->mr = sl_verbs.ibv_reg_mr(p->pd, at, bytes, IBV_ACCESS_LOCAL_WRITE);
	if (!t->mr) {
		rc = errno ? -errno : -ENOMEM;
		munmap(at, bytes);
		return rc;
	}
	t->at = at;
	p->trays_len++;
	return 0;
}

/*
 * Beside what is promised there is room for what has arrived and is not looked at: of queue
 * pairs that are gone.
 */
static int enough(struct sl_verbs_port *p)
{
	uint32_t promised;

	sl_verbs_lock(p->context);
	promised = p->slots_promised;
	sl_verbs_unlock(p->context);
	return p->slots_posted == p->slots || p->slots_posted >= promised + SL_VERBS_SPARE;
}

int sl_verbs_grow_receives(struct sl_verbs_port *p)
{
	int rc = 0;

	pthread_mutex_lock(&p->growing);
	while (rc == 0 && !enough(p)) {
		if (p->slots_posted == p->trays_len * SL_VERBS_TRAY)
			rc = add_tray(p);
		if (rc == 0)
			rc = post_rest(p); /* where it fails, the next call goes on there */
	}
	pthread_mutex_unlock(&p->growing);
	return rc;
}

void sl_verbs_forget_receives(struct sl_verbs_port *p)
{
	for (uint32_t i = 0; i < p->trays_len; i++) {
		sl_verbs.ibv_dereg_mr(p->trays[i].mr);
		munmap(p->trays[i].at, bytes_of(slots_of(p, i)));
	}
	free(p->trays);
	p->trays = NULL;
	p->trays_len = p->trays_max = p->slots_posted = 0;
}
