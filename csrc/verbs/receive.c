/* SPDX-License-Identifier: Apache-2.0 */
/* The receives of a rail, for the messages of all its connections, and their buffers. */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static size_t bytes_of(uint32_t buffers)
{
	return ((size_t)buffers * SL_VERBS_BUFFER_SIZE + 4095) & ~(size_t)4095;
}

/* How many buffers the block of that index has. */
static uint32_t buffers_in(const struct sl_verbs_rail *p, uint32_t block)
{
	uint32_t left = p->receives_max - block * SL_VERBS_BUFFERS;

	return left < SL_VERBS_BUFFERS ? left : SL_VERBS_BUFFERS;
}

static struct ibv_sge entry_of(const struct sl_verbs_rail *p, uint32_t number)
{
	return (struct ibv_sge){.addr = (uintptr_t)sl_verbs_buffer(p, number),
				.length = SL_VERBS_BUFFER_SIZE,
				.lkey = p->buffers[number / SL_VERBS_BUFFERS].mr->lkey};
}

int sl_verbs_post_receive(struct sl_verbs_rail *p, uint32_t number)
{
	struct ibv_sge at = entry_of(p, number);
	struct ibv_recv_wr wr = {.wr_id = number, .sg_list = &at, .num_sge = 1}, *bad;

	return sl_verbs_post_srq_recv(p->srq, &wr, &bad);
}

/* Posts the buffers of the last block that are not posted yet. */
static int post_rest(struct sl_verbs_rail *p)
{
	struct ibv_recv_wr wrs[SL_VERBS_BUFFERS], *bad = wrs;
	struct ibv_sge at[SL_VERBS_BUFFERS];
	uint32_t block = p->buffers_len - 1;
	uint32_t n = block * SL_VERBS_BUFFERS + buffers_in(p, block) - p->receives_posted;
	int rc;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t number = p->receives_posted + i;

		at[i] = entry_of(p, number);
		wrs[i] = (struct ibv_recv_wr){.wr_id = number,
					      .next = i + 1 < n ? &wrs[i + 1] : NULL,
					      .sg_list = &at[i],
					      .num_sge = 1};
	}
	rc = sl_verbs_post_srq_recv(p->srq, wrs, &bad);
	p->receives_posted += rc == 0 ? n : (uint32_t)(bad - wrs);
	return -rc;
}

static int add_block(struct sl_verbs_rail *p)
{
	struct sl_verbs_buffers *t = &p->buffers[p->buffers_len];
	size_t bytes = bytes_of(buffers_in(p, p->buffers_len));
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
	p->buffers_len++;
	return 0;
}

/*
 * Whether enough receives are posted: as many as are reserved, and some for messages of destroyed
 * queue pairs that have arrived and were not taken yet.
 */
static int enough_posted(struct sl_verbs_rail *p)
{
	uint32_t reserved;

	sl_verbs_lock(p->context);
	reserved = p->receives_reserved;
	sl_verbs_unlock(p->context);
	return p->receives_posted == p->receives_max ||
	       p->receives_posted >= reserved + SL_VERBS_SPARE;
}

int sl_verbs_grow_receives(struct sl_verbs_rail *p)
{
	int rc = 0;

	pthread_mutex_lock(&p->grow_lock);
	while (rc == 0 && !enough_posted(p)) {
		if (p->receives_posted == p->buffers_len * SL_VERBS_BUFFERS)
			rc = add_block(p);
		if (rc == 0)
			rc = post_rest(p); /* after an error the next call goes on there */
	}
	pthread_mutex_unlock(&p->grow_lock);
	return rc;
}

void sl_verbs_free_receives(struct sl_verbs_rail *p)
{
	for (uint32_t i = 0; i < p->buffers_len; i++) {
		sl_verbs.ibv_dereg_mr(p->buffers[i].mr);
		munmap(p->buffers[i].at, bytes_of(buffers_in(p, i)));
	}
	free(p->buffers);
	p->buffers = NULL;
	p->buffers_len = p->buffers_max = p->receives_posted = 0;
}
