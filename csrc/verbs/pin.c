/* SPDX-License-Identifier: Apache-2.0 */
/* Pins: ranges that a NIC knows for local use. No peer can reach memory by a pin. */
#define _GNU_SOURCE
#include "context.h"

#include <errno.h>
#include <stdlib.h>

struct ibv_mr *sl_verbs_register(struct sl_verbs_rail *p, void *base, uint64_t len, uint64_t at,
				 unsigned access, uint32_t flags, const struct sl_verbs_dmabuf *d)
{
	if (flags & SL_VERBS_RELAXED)
		access |= IBV_ACCESS_RELAXED_ORDERING; /* drivers that cannot do it leave it out */
	errno = 0;
	if (d && d->fd >= 0) {
		if (sl_verbs.ibv_reg_dmabuf_mr)
			return sl_verbs.ibv_reg_dmabuf_mr(p->pd, d->offset, len, at, d->fd,
							  (int)access);
		errno = EOPNOTSUPP;
		return NULL;
	}
	return sl_verbs.ibv_reg_mr_iova2(p->pd, base, len, at, access);
}

int sl_verbs_begin_registering(struct sl_verbs_context *c)
{
	if (c->closed)
		return -EBADF;
	c->registering++;
	return 0;
}

void sl_verbs_end_registering(struct sl_verbs_context *c)
{
	c->registering--;
	pthread_cond_broadcast(&c->changed);
}

int sl_verbs_end_error(const struct sl_verbs_rail *p, int error)
{
	return error == EIO && p->pulled ? 0 : error;
}

int sl_verbs_pin(struct sl_verbs_context *c, uint32_t rail, void *base, uint64_t len,
		 uint32_t flags, const struct sl_verbs_dmabuf *d, struct sl_verbs_pin **out)
{
	struct sl_verbs_pin *pin = calloc(1, sizeof(*pin));
	int rc;

	if (!pin)
		return -ENOMEM;
	sl_verbs_lock(c);
	pin->rail = sl_verbs_rail_of(c, rail);
	rc = !pin->rail || len == 0 ? -EINVAL : sl_verbs_begin_registering(c);
	sl_verbs_unlock(c);
	if (rc != 0) {
		free(pin);
		return rc;
	}
	pin->base = base;
	pin->len = len;
	pin->flags = flags;
	pin->dmabuf = d ? *d : (struct sl_verbs_dmabuf){.fd = -1};
	pin->mr =
	    sl_verbs_register(pin->rail, base, len, (uintptr_t)base,
			      flags & SL_VERBS_READ_ONLY ? 0 : IBV_ACCESS_LOCAL_WRITE, flags, d);
	if (!pin->mr)
		rc = errno ? -errno : -EINVAL;
	sl_verbs_lock(c);
	if (rc == 0) {
		pin->next = c->pins;
		if (c->pins)
			c->pins->prev = pin;
		c->pins = pin;
		*out = pin;
	}
	sl_verbs_end_registering(c);
	sl_verbs_unlock(c);
	if (rc != 0)
		free(pin);
	return rc;
}

int sl_verbs_unpin(struct sl_verbs_pin *pin)
{
	struct sl_verbs_context *c = pin->rail->context;
	struct ibv_mr *mr;
	int rc;

	sl_verbs_lock(c);
	mr = pin->mr;
	rc = pin->users ? -EBUSY : 0;
	pin->users += rc == 0; /* it is not mapped from now on */
	/* Also while the context closes: then there is no mr. */
	c->registering += rc == 0;
	sl_verbs_unlock(c);
	if (rc != 0)
		return rc;
	if (mr)
		rc = sl_verbs.ibv_dereg_mr(mr);
	sl_verbs_lock(c);
	rc = -sl_verbs_end_error(pin->rail, rc);
	pin->users--;
	if (rc == 0) {
		if (pin->prev)
			pin->prev->next = pin->next;
		else
			c->pins = pin->next;
		if (pin->next)
			pin->next->prev = pin->prev;
	}
	sl_verbs_end_registering(c);
	sl_verbs_unlock(c);
	if (rc == 0)
		free(pin);
	return rc;
}
