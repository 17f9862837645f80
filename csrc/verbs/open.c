/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a context. */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Go reads the ring. */
static int make_ring(struct sl_verbs_context *c)
{
	size_t bytes = sizeof(*c->ring) + c->config.batches * sizeof(c->ring->done[0]);

	bytes = (bytes + 63) & ~(size_t)63;
	c->ring = aligned_alloc(64, bytes);
	if (!c->ring)
		return -ENOMEM;
	memset(c->ring, 0, bytes);
	c->ring->mask = c->config.batches - 1;
	return 0;
}

int sl_verbs_open(const struct sl_verbs_config *config, struct sl_verbs_context **out)
{
	struct sl_verbs_context *c;
	pthread_condattr_t clock;
	int rc;

	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	c->config = *config;
	pthread_mutex_init(&c->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&c->changed, &clock);
	pthread_condattr_destroy(&clock);
	rc = make_ring(c);
	if (rc == 0)
		rc = sl_verbs_traffic_open(c);
	if (rc != 0) {
		sl_verbs_free(c);
		return rc;
	}
	*out = c;
	return 0;
}

int sl_verbs_close(struct sl_verbs_context *c)
{
	int first, rc;

	sl_verbs_lock(c);
	first = !c->closed;
	c->closed = 1; /* further calls get -EBADF */
	sl_verbs_unlock(c);
	if (!first)
		return 0;
	rc = sl_verbs_traffic_stop(c);
	sl_verbs_lock(c);
	while (c->registering)
		pthread_cond_wait(&c->changed, &c->lock);
	sl_verbs_unlock(c);
	sl_verbs_deregister_all(c);
	for (uint32_t i = 0; i < c->rails_len; i++)
		sl_verbs_rail_close(c->rails[i]);
	return rc;
}

void sl_verbs_free(struct sl_verbs_context *c)
{
	sl_verbs_traffic_free(c);
	for (struct sl_verbs_pin *p = c->pins, *next; p; p = next) {
		next = p->next;
		free(p);
	}
	for (uint32_t i = 0; i < c->rails_len; i++)
		free(c->rails[i]);
	for (uint32_t i = 0; i < SL_VERBS_CHUNKS; i++) {
		for (uint32_t k = 0; c->chunks[i] && k < SL_VERBS_CHUNK; k++)
			free(c->chunks[i][k]);
		free(c->chunks[i]);
	}
	pthread_cond_destroy(&c->changed);
	pthread_mutex_destroy(&c->lock);
	free(c->ring);
	free(c);
}

struct sl_ring *sl_verbs_ring(struct sl_verbs_context *c)
{
	return c->ring;
}
