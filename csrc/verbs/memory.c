/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of this process, by key: mapped with pins for local use, and granted to peers. A grant is
 * a registration of its own, so that it can be ended while local use goes on. What is proved: when
 * sl_verbs_revoke has returned 0, no NIC knows a remote key of the grant, so no request with one
 * can land.
 */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>

/* Where the table has a key; NULL: it has no chunk for it. */
static struct sl_verbs_memory **entry_of(struct sl_verbs_context *c, uint32_t key)
{
	struct sl_verbs_memory **chunk;

	if (key / SL_VERBS_CHUNK >= SL_VERBS_CHUNKS)
		return NULL;
	chunk = c->chunks[key / SL_VERBS_CHUNK];
	return chunk ? &chunk[key % SL_VERBS_CHUNK] : NULL;
}

struct sl_verbs_memory *sl_verbs_memory_of(struct sl_verbs_context *c, uint32_t key)
{
	struct sl_verbs_memory **at = entry_of(c, key);

	return at ? *at : NULL;
}

/* Sets the pins. -EINVAL: one is of another rail, or does not contain the memory. */
static int set_pins(struct sl_verbs_context *c, struct sl_verbs_memory *m,
		    struct sl_verbs_pin *const *pins)
{
	for (uint32_t i = 0; i < c->rails_len; i++) {
		struct sl_verbs_pin *p = pins[i];

		if (!p)
			continue;
		if (p->rail != c->rails[i] || m->base < p->base ||
		    m->base - p->base > (ptrdiff_t)p->len ||
		    m->len > p->len - (uint64_t)(m->base - p->base))
			return -EINVAL;
		m->pins[i] = p;
		m->pinned_rails |= 1u << i;
		m->flags |= p->flags & SL_VERBS_READ_ONLY;
	}
	return m->pinned_rails ? 0 : -EINVAL;
}

static int insert(struct sl_verbs_context *c, struct sl_verbs_memory *m,
		  struct sl_verbs_pin *const *pins)
{
	struct sl_verbs_memory ***chunk = &c->chunks[m->key / SL_VERBS_CHUNK];
	int rc;

	if (c->closed)
		return -EBADF;
	if (!*chunk)
		*chunk = calloc(SL_VERBS_CHUNK, sizeof(**chunk));
	if (!*chunk)
		return -ENOMEM;
	if ((*chunk)[m->key % SL_VERBS_CHUNK])
		return -EEXIST;
	rc = set_pins(c, m, pins);
	if (rc != 0)
		return rc;
	for (uint32_t i = 0; i < c->rails_len; i++)
		if (m->pins[i])
			m->pins[i]->users++;
	(*chunk)[m->key % SL_VERBS_CHUNK] = m;
	return 0;
}

int sl_verbs_map(struct sl_verbs_context *c, uint32_t key, void *base, uint64_t len,
		 struct sl_verbs_pin *const *pins, uint32_t prefer)
{
	struct sl_verbs_memory *m;
	int rc;

	if (key / SL_VERBS_CHUNK >= SL_VERBS_CHUNKS || len == 0)
		return -EINVAL;
	m = calloc(1, sizeof(*m));
	if (!m)
		return -ENOMEM;
	m->key = key;
	m->base = base;
	m->len = len;
	m->prefer = prefer;
	sl_verbs_lock(c);
	rc = insert(c, m, pins);
	sl_verbs_unlock(c);
	if (rc != 0)
		free(m);
	return rc;
}

/*
 * Ends the grants on the rails of a set of bits. Called under the lock, which it releases
 * meanwhile: m must have a user, and no grant on these rails may be changing. A grant that a NIC
 * does not end stays. Returns the first error.
 */
static int end_grants(struct sl_verbs_context *c, struct sl_verbs_memory *m, uint32_t rails)
{
	int errors[SL_VERBS_RAILS] = {0}, rc = 0;

	m->changing |= rails;
	sl_verbs_unlock(c);
	for (uint32_t i = 0; i < SL_VERBS_RAILS; i++)
		if (rails & 1u << i)
			errors[i] = sl_verbs.ibv_dereg_mr(m->grants[i]);
	sl_verbs_lock(c);
	m->changing &= ~rails;
	for (uint32_t i = 0; i < SL_VERBS_RAILS; i++) {
		if (!(rails & 1u << i))
			continue;
		errors[i] = sl_verbs_end_error(c->rails[i], errors[i]);
		if (errors[i] == 0)
			m->grants[i] = NULL;
		else if (rc == 0)
			rc = -errors[i];
	}
	pthread_cond_broadcast(&c->changed);
	return rc;
}

/* A bit for each rail that has a grant. */
static uint32_t granted_rails(const struct sl_verbs_memory *m)
{
	uint32_t rails = 0;

	for (uint32_t i = 0; i < SL_VERBS_RAILS; i++)
		if (m->grants[i])
			rails |= 1u << i;
	return rails;
}

/* Frees a memory without users, and gives its pins back. Under the lock. */
static void free_memory(struct sl_verbs_memory *m)
{
	for (uint32_t i = 0; i < SL_VERBS_RAILS; i++)
		if (m->pins[i])
			m->pins[i]->users--;
	free(m);
}

/*
 * Under the lock, which it releases meanwhile. It takes the memory off the table first, so that no
 * batch and no grant begins.
 */
static int unmap(struct sl_verbs_context *c, struct sl_verbs_memory *m)
{
	uint32_t rails = granted_rails(m);
	int rc;

	if (m->users)
		return -EBUSY;
	*entry_of(c, m->key) = NULL;
	rc = rails ? end_grants(c, m, rails) : 0;
	if (rc != 0)
		*entry_of(c, m->key) = m;
	else
		free_memory(m);
	return rc;
}

int sl_verbs_unmap(struct sl_verbs_context *c, uint32_t key)
{
	struct sl_verbs_memory *m;
	int rc = 0;

	sl_verbs_lock(c);
	m = sl_verbs_memory_of(c, key);
	if (m && sl_verbs_begin_registering(c) == 0) { /* else the close of the context unmaps it */
		rc = unmap(c, m);
		sl_verbs_end_registering(c);
	}
	sl_verbs_unlock(c);
	return rc;
}

/* Makes a grant. Called under the lock, which it releases meanwhile; m must have a user. */
static int make_grant(struct sl_verbs_context *c, struct sl_verbs_memory *m, uint32_t rail,
		      uint64_t at, uint32_t flags)
{
	struct sl_verbs_pin *pin = m->pins[rail];
	unsigned access = IBV_ACCESS_REMOTE_READ;
	struct ibv_mr *mr;
	int rc;

	if (!(flags & SL_VERBS_READ_ONLY))
		/* verbs require local write with remote write */
		access |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE;
	m->changing |= 1u << rail;
	sl_verbs_unlock(c);
	if (pin->dmabuf.fd >= 0) {
		struct sl_verbs_dmabuf d = {.fd = pin->dmabuf.fd,
					    .offset = pin->dmabuf.offset +
						      (uint64_t)(m->base - pin->base)};

		mr = sl_verbs_register(pin->rail, m->base, m->len, at, access, flags, &d);
	} else {
		mr = sl_verbs_register(pin->rail, m->base, m->len, at, access, flags, NULL);
	}
	rc = mr ? 0 : errno ? -errno : -EINVAL;
	sl_verbs_lock(c);
	m->changing &= ~(1u << rail);
	m->grants[rail] = mr;
	pthread_cond_broadcast(&c->changed);
	return rc;
}

int sl_verbs_grant(struct sl_verbs_context *c, uint32_t key, uint32_t rail, uint64_t at,
		   uint32_t flags, uint32_t *remote_key)
{
	struct sl_verbs_memory *m;
	int rc;

	sl_verbs_lock(c);
	m = sl_verbs_memory_of(c, key);
	if (!m || rail >= SL_VERBS_RAILS || !m->pins[rail])
		rc = -EINVAL;
	else if (m->flags & ~flags & SL_VERBS_READ_ONLY)
		rc = -EROFS;
	else
		rc = sl_verbs_begin_registering(c);
	if (rc == 0) {
		m->users++;
		while (m->changing & 1u << rail)
			pthread_cond_wait(&c->changed, &c->lock);
		if (!m->grants[rail])
			rc = make_grant(c, m, rail, at, flags);
		if (rc == 0)
			*remote_key = m->grants[rail]->rkey;
		m->users--;
		sl_verbs_end_registering(c);
	}
	sl_verbs_unlock(c);
	return rc;
}

int sl_verbs_revoke(struct sl_verbs_context *c, uint32_t key)
{
	struct sl_verbs_memory *m;
	uint32_t rails;
	int rc;

	sl_verbs_lock(c);
	m = sl_verbs_memory_of(c, key);
	rc = !m ? -EINVAL : sl_verbs_begin_registering(c);
	if (rc == 0) {
		m->users++;
		while (m->changing)
			pthread_cond_wait(&c->changed, &c->lock);
		rails = granted_rails(m);
		if (rails)
			rc = end_grants(c, m, rails);
		m->users--;
		sl_verbs_end_registering(c);
	}
	sl_verbs_unlock(c);
	return rc;
}

/*
 * The structs of pins stay until the context is freed, since callers have them. What a NIC does not
 * deregister ends when its device is closed.
 */
void sl_verbs_deregister_all(struct sl_verbs_context *c)
{
	struct sl_verbs_memory *m;
	uint32_t rails;

	sl_verbs_lock(c);
	for (uint32_t key = 0; key / SL_VERBS_CHUNK < SL_VERBS_CHUNKS; key++) {
		if (!entry_of(c, key)) {
			key |= SL_VERBS_CHUNK - 1;
			continue;
		}
		m = sl_verbs_memory_of(c, key);
		if (!m)
			continue;
		rails = granted_rails(m);
		if (rails) /* after an error no peer can use the grant: no queue pair is left */
			(void)end_grants(c, m, rails);
		if (m->users) /* a batch is open, on a queue pair that its device keeps */
			continue;
		*entry_of(c, key) = NULL;
		free_memory(m);
	}
	for (struct sl_verbs_pin *p = c->pins; p; p = p->next) {
		if (p->mr)
			sl_verbs.ibv_dereg_mr(p->mr);
		p->mr = NULL;
	}
	sl_verbs_unlock(c);
}
