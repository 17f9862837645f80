/* SPDX-License-Identifier: Apache-2.0 */
/* What a device's thread does: moving bytes, answering, giving up. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>

/* What becomes of a request that begins. */
static enum fault draw(struct fake_panel *p)
{
	if (!p->fail && !p->lose && !p->late && !p->mute)
		return FAULT_NONE;
	if (take_one(&p->after))
		return FAULT_NONE;
	if (take_one(&p->fail))
		return FAULT_FAIL;
	if (take_one(&p->lose))
		return FAULT_LOSE;
	if (take_one(&p->late))
		return FAULT_LATE;
	return take_one(&p->mute) ? FAULT_MUTE : FAULT_NONE;
}

static uint32_t chunk_of(const struct pair *p, const struct request *r)
{
	uint64_t left = r->len - p->moved;

	return left < CHUNK ? (uint32_t)left : CHUNK;
}

/* When the next piece of the request is there. */
static void schedule(struct pair *p, const struct request *r, uint64_t from)
{
	struct device *d = p->device;
	uint32_t rate = d->panel->rate;

	if (rate) {
		if (d->busy_until > from)
			from = d->busy_until;
		from += (uint64_t)chunk_of(p, r) * 1000 / rate;
		d->busy_until = from;
	}
	p->due = from;
}

static void begin(struct pair *p, const struct request *r)
{
	p->begun = 1;
	p->moved = 0;
	p->give_up = 0;
	p->unready = 0;
	p->fault = draw(p->device->panel);
	schedule(p, r, r->posted + (uint64_t)p->device->panel->delay_us * 1000);
}

static struct request *request_at(struct pair *p, uint64_t index)
{
	return &p->ring[index % p->init.cap.max_send_wr];
}

/* The request is over. Later ones without a completion are told of by the next one that has one. */
static void finish(struct pair *p, struct request *r, enum ibv_wc_status status)
{
	struct ibv_wc wc = {.qp_num = p->base.qp_num};

	if (p->unheard) { /* then the first of those has failed, whatever comes behind it */
		p->unheard = 0;
		r = request_at(p, p->done);
		status = IBV_WC_RETRY_EXC_ERR;
	}
	wc.wr_id = r->wr_id;
	wc.status = status;
	p->done++;
	p->begun = 0;
	if (status == IBV_WC_SUCCESS) {
		wc.opcode = r->opcode == IBV_WR_RDMA_READ	      ? IBV_WC_RDMA_READ
			    : r->opcode == IBV_WR_RDMA_WRITE	      ? IBV_WC_RDMA_WRITE
								      : IBV_WC_SEND;
		wc.byte_len = (uint32_t)r->len;
	} else {
		wc.opcode = 0x55; /* no caller may look at it */
		wc.byte_len = 0x55555555;
	}
	if (status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR)
		p->device->panel->faults++;
	if (status != IBV_WC_SUCCESS || r->flags & IBV_SEND_SIGNALED)
		complete(p->base.send_cq, &wc, p->base.qp_num, p->done);
	if (status != IBV_WC_SUCCESS)
		fail_pair(p);
}

/* The request has landed, and its acknowledgement is lost. */
static void hush(struct pair *p, struct request *r)
{
	p->begun = 0;
	p->unheard++;
	if (!p->device->panel->mute)
		finish(p, r, IBV_WC_RETRY_EXC_ERR);
}

static int has_gid(const struct device *d, const union ibv_gid *gid)
{
	for (int i = 0; i < GIDS; i++)
		if (memcmp(&d->gids[i], gid, sizeof(*gid)) == 0)
			return 1;
	return 0;
}

/* The other end, or NULL: no packet reaches it, or it does not answer. */
static struct pair *other_end(const struct pair *p)
{
	struct pair *o = pair_of(p->attr.dest_qp_num);

	if (!o || !p->device->panel->link || !o->device->panel->link || o->device->panel->fatal ||
	    o->device->panel->frozen)
		return NULL;
	if (o->base.state != IBV_QPS_RTR && o->base.state != IBV_QPS_RTS)
		return NULL;
	if (o->attr.dest_qp_num != p->base.qp_num || o->attr.rq_psn != p->attr.sq_psn)
		return NULL;
	return has_gid(o->device, &p->attr.ah_attr.grh.dgid) ? o : NULL;
}

/* Copies len bytes at off of a list between it and other. 0: it must not. */
static int move_list(const struct ibv_sge *sge, int sges, struct ibv_pd *pd, uint64_t off,
		     uint64_t len, uint8_t *other, int in)
{
	for (int i = 0; i < sges && len; i++) {
		uint64_t n = sge[i].length;
		uint8_t *at;

		if (off >= n) {
			off -= n;
			continue;
		}
		n = n - off < len ? n - off : len;
		at = reach(sge[i].lkey, pd, sge[i].addr + off, n, in ? IBV_ACCESS_LOCAL_WRITE : 0);
		if (!at)
			return 0;
		memcpy(in ? at : other, in ? other : at, n);
		other += n;
		len -= n;
		off = 0;
	}
	return len == 0;
}

static int move(struct pair *p, struct request *r, uint64_t off, uint64_t len, uint8_t *other)
{
	if (r->flags & IBV_SEND_INLINE) {
		memcpy(other, r->inlined + off, len);
		return 1;
	}
	return move_list(r->sge, r->sges, p->base.pd, off, len, other,
			 r->opcode == IBV_WR_RDMA_READ);
}

/* The peer's answer to a request that it must not serve: its end is over, too. */
static enum ibv_wc_status refuse(struct pair *o, enum ibv_wc_status status)
{
	tell_of(o->base.context, IBV_EVENT_QP_ACCESS_ERR, &o->base);
	fail_pair(o);
	return status;
}

/* A message, whose bytes are in data, takes a receive of the other end. 0: there is none. */
static int deliver(struct pair *o, uint32_t from, uint8_t *data, uint64_t len,
		   enum ibv_wc_status *status)
{
	struct srq *s = (struct srq *)o->base.srq;
	struct ibv_wc wc = {.qp_num = o->base.qp_num,
			    .src_qp = from,
			    .opcode = IBV_WC_RECV,
			    .byte_len = (uint32_t)len};
	struct receive *r;
	uint64_t room = 0;

	if (!s || s->head == s->tail) {
		o->device->panel->unready++;
		return 0;
	}
	r = &s->ring[s->tail++ % s->size];
	wc.wr_id = r->wr_id;
	for (int i = 0; i < r->sges; i++)
		room += r->sge[i].length;
	*status = IBV_WC_SUCCESS;
	if (len > room) {
		wc.status = IBV_WC_LOC_LEN_ERR;
		*status = refuse(o, IBV_WC_REM_INV_REQ_ERR);
	} else if (!move_list(r->sge, r->sges, s->base.pd, 0, len, data, 1)) {
		wc.status = IBV_WC_LOC_PROT_ERR;
		*status = refuse(o, IBV_WC_REM_OP_ERR);
	}
	complete(o->base.recv_cq, &wc, o->base.qp_num, NONE);
	return 1;
}

static int is_send(enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_SEND;
}

/* Whether the peer lets it, where its bytes are. */
static uint8_t *target(struct pair *o, enum ibv_wr_opcode opcode, uint32_t key, uint64_t at,
		       uint64_t len)
{
	unsigned right =
	    opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;

	return o->attr.qp_access_flags & right ? reach(key, o->base.pd, at, len, right) : NULL;
}

/* What was given up goes on, as packets do that were only slow. */
static void straggle(struct pair *p, struct request *r)
{
	struct straggler *s = r->opcode == IBV_WR_RDMA_READ ? NULL : calloc(1, sizeof(*s) + r->len);

	if (!s)
		return;
	s->due = p->device->panel->late_us == UINT32_MAX
		     ? 0
		     : now() + (uint64_t)p->device->panel->late_us * 1000;
	s->from = p->base.qp_num;
	s->to = p->attr.dest_qp_num;
	s->key = r->key;
	s->remote = r->remote;
	s->len = r->len;
	s->opcode = r->opcode;
	if (!move(p, r, 0, r->len, s->data)) {
		free(s);
		return;
	}
	s->next = p->device->stragglers;
	p->device->stragglers = s;
}

/* The other end takes it, unless it is over, since it cannot know that this one is. */
static void land_late(struct device *d, struct straggler *s)
{
	struct pair *o = pair_of(s->to);
	enum ibv_wc_status status;
	uint8_t *at = NULL;
	int taken = 0;

	if (o && (o->base.state == IBV_QPS_RTR || o->base.state == IBV_QPS_RTS) &&
	    o->attr.dest_qp_num == s->from) {
		if (!is_send(s->opcode) && s->len)
			at = target(o, s->opcode, s->key, s->remote, s->len);
		if (at)
			memcpy(at, s->data, s->len);
		taken = at || s->len == 0 || is_send(s->opcode);
		if (taken && is_send(s->opcode))
			taken = deliver(o, s->from, s->data, s->len, &status);
	}
	if (taken)
		d->panel->landed_late++;
	else
		d->panel->dropped_late++;
}

static int land_stragglers(struct device *d, uint64_t t, uint64_t *wake)
{
	for (struct straggler **at = &d->stragglers, *s; (s = *at); at = &s->next) {
		if (d->panel->late_us == UINT32_MAX)
			continue;
		if (s->due > t) {
			if (s->due < *wake)
				*wake = s->due;
			continue;
		}
		*at = s->next;
		land_late(d, s);
		free(s);
		return 1;
	}
	return 0;
}

/* Waits for t, or the reason not to wait any more. 1: time is up. */
static int patience(struct pair *p, uint64_t t, uint64_t *wake)
{
	uint64_t ns = (p->attr.retry_cnt + UINT64_C(1)) * (UINT64_C(4096) << p->attr.timeout);

	if (!p->give_up)
		p->give_up = t + ns;
	if (t >= p->give_up)
		return 1;
	if (p->give_up < *wake)
		*wake = p->give_up;
	return 0;
}

static void garble(struct fake_panel *panel, uint8_t *data, uint64_t len)
{
	if (panel->garble && panel->garble_at < len) {
		panel->garble--;
		data[panel->garble_at] ^= 0xff;
	}
}

/* The last piece of a message: the other end must have a receive for it. 1: it went. */
static int send_message(struct pair *p, struct pair *o, struct request *r, uint64_t t,
			uint64_t *wake)
{
	enum ibv_wc_status status = IBV_WC_LOC_PROT_ERR;
	uint8_t *data = calloc(1, r->len + 1);

	if (!data)
		abort();
	if (!is_send(r->opcode) || move(p, r, 0, r->len, data)) {
		garble(p->device->panel, data, r->len);
		if (!deliver(o, p->base.qp_num, data, r->len, &status)) {
			free(data);
			if (p->attr.rnr_retry != 7 && p->unready++ >= p->attr.rnr_retry) {
				finish(p, r, IBV_WC_RNR_RETRY_EXC_ERR);
				return 1;
			}
			p->due = t + 1000000; /* about what the shortest usual timer says */
			if (p->due < *wake)
				*wake = p->due;
			return 0;
		}
	}
	free(data);
	if (status == IBV_WC_SUCCESS && p->fault == FAULT_LOSE)
		status = IBV_WC_RETRY_EXC_ERR;
	if (status == IBV_WC_SUCCESS && p->fault == FAULT_MUTE)
		hush(p, r);
	else
		finish(p, r, status);
	return 1;
}

/* A piece of the request. 1: something was done. */
static int proceed(struct pair *p, struct request *r, uint64_t t, uint64_t *wake)
{
	struct fake_panel *panel = p->device->panel;
	struct pair *o = other_end(p);
	uint32_t n = is_send(r->opcode) ? 0 : chunk_of(p, r);

	if (!o) {
		if (!patience(p, t, wake))
			return 0;
		finish(p, r, IBV_WC_RETRY_EXC_ERR);
		return 1;
	}
	p->give_up = 0;
	if (n) {
		uint8_t *at = target(o, r->opcode, r->key, r->remote + p->moved, n);

		if (!at) {
			finish(p, r, refuse(o, IBV_WC_REM_ACCESS_ERR));
			return 1;
		}
		if (p->fault == FAULT_MUTE && r->opcode == IBV_WR_RDMA_READ)
			n = (uint32_t)r->len; /* its answer is lost */
		else if (!move(p, r, p->moved, n, at)) {
			finish(p, r, IBV_WC_LOC_PROT_ERR);
			return 1;
		}
		p->moved += n;
		panel->kib_landed += n >> 10;
		if (p->moved < r->len) {
			schedule(p, r, t);
			return 1;
		}
	}
	if (is_send(r->opcode))
		return send_message(p, o, r, t, wake);
	if (p->fault == FAULT_MUTE)
		hush(p, r);
	else
		finish(p, r, p->fault == FAULT_LOSE ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS);
	return 1;
}

static int step(struct pair *p, uint64_t t, uint64_t *wake)
{
	struct fake_panel *panel = p->device->panel;
	struct request *r;

	if (p->done == p->posted || panel->fatal == 2 || panel->frozen == 2)
		return 0;
	if (p->base.state == IBV_QPS_ERR) {
		p->unheard = 0;
		finish(p, request_at(p, p->done), IBV_WC_WR_FLUSH_ERR);
		return 1;
	}
	if (p->base.state != IBV_QPS_RTS || panel->frozen)
		return 0;
	if (p->done + p->unheard == p->posted) {
		if (!patience(p, t, wake))
			return 0;
		finish(p, request_at(p, p->done), IBV_WC_RETRY_EXC_ERR);
		return 1;
	}
	r = request_at(p, p->done + p->unheard);
	if (!p->begun)
		begin(p, r);
	if (p->due > t) {
		if (p->due < *wake)
			*wake = p->due;
		return 0;
	}
	if (p->fault == FAULT_FAIL) {
		finish(p, r, (enum ibv_wc_status)panel->fail_status);
		return 1;
	}
	if (p->fault == FAULT_LATE) {
		straggle(p, r);
		finish(p, r, IBV_WC_RETRY_EXC_ERR);
		return 1;
	}
	return proceed(p, r, t, wake);
}

int work(struct device *d, uint64_t *wake)
{
	uint64_t t = now();
	int done = land_stragglers(d, t, wake);

	for (struct pair *p = d->pairs; p; p = p->next)
		done += step(p, t, wake);
	return done;
}
