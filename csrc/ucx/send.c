/* SPDX-License-Identifier: Apache-2.0 */
/* Messages that are sent. Their bytes are copied: UCX holds no memory of the program. */
#include "worker.h"

#include <stdlib.h>
#include <string.h>

#define SMALL 256
/*
 * Messages of ours that UCX keeps, and bytes of answers, more than a peer that takes them ever
 * leaves there.
 */
#define REPLIES_MAX 4096
#define ANSWERS_MAX (2ull * SL_UCX_WINDOW * SL_UCX_BODY_MAX)

struct sl_ucx_message *sl_ucx_new_message(struct sl_ucx_worker *w, size_t body)
{
	int big = body > SMALL;
	struct sl_ucx_message **pool = big ? &w->large : &w->small, *p = *pool;

	if (p)
		*pool = p->next;
	else
		p = malloc(sizeof(*p) + (big ? SL_UCX_BODY_MAX : SMALL));
	if (p) {
		p->len = 0;
		p->large = (uint8_t)big;
		p->counted = 0;
		p->head = (struct sl_ucx_head){.version = SL_UCX_VERSION};
	}
	return p;
}

void sl_ucx_free_message(struct sl_ucx_worker *w, struct sl_ucx_message *p)
{
	struct sl_ucx_message **pool = p->large ? &w->large : &w->small;

	p->next = *pool;
	*pool = p;
}

/* UCX has let go of it. */
static void over(struct sl_ucx_message *p, ucs_status_t status)
{
	struct sl_ucx_conn *n = p->conn;

	n->sends--;
	n->data_sends -= p->counted;
	n->pings -= p->head.type == SL_UCX_MSG_PING;
	if (p->head.type == SL_UCX_MSG_DATA)
		n->answers -= p->len;
	if (status != UCS_OK && p->head.type != SL_UCX_MSG_PING) /* the peer waits for it */
		sl_ucx_lose(n);
	if (n->state == SL_UCX_ENDED)
		pthread_cond_broadcast(&n->worker->changed);
	sl_ucx_free_message(n->worker, p);
}

static void on_sent(void *request, ucs_status_t status, void *user)
{
	sl_ucx.ucp_request_free(request);
	over(user, status);
}

void sl_ucx_send(struct sl_ucx_conn *n, struct sl_ucx_message *p)
{
	ucp_request_param_t param = {
	    .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
			    UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
	    .flags = UCP_AM_SEND_FLAG_EAGER,
	    .cb.send = on_sent,
	    .user_data = p,
	    .memory_type = UCS_MEMORY_TYPE_HOST,
	};
	ucs_status_ptr_t request;

	p->conn = n;
	p->head.conn = n->peer;
	p->head.stamp = sl_ucx_now();
	p->head.echo = n->stamp;
	n->sends++;
	n->data_sends += p->counted;
	n->pings += p->head.type == SL_UCX_MSG_PING;
	n->answers += p->head.type == SL_UCX_MSG_DATA ? p->len : 0;
	n->last_out = p->head.stamp;
	if (!n->handle) {
		over(p, UCS_ERR_CANCELED);
		return;
	}
	request = sl_ucx.ucp_am_send_nbx(n->handle, SL_UCX_AM, &p->head, sizeof(p->head),
					 p->len ? p->body : NULL, p->len, &param);
	if (!request || UCS_PTR_IS_ERR(request))
		over(p, UCS_PTR_RAW_STATUS(request));
}

int sl_ucx_has_backlog(const struct sl_ucx_conn *n)
{
	return n->sends - n->pings > REPLIES_MAX + 2 * n->worker->context->config.notifs ||
	       n->answers > ANSWERS_MAX;
}

int sl_ucx_lose_backlogged(struct sl_ucx_conn *n)
{
	if (!sl_ucx_has_backlog(n))
		return 0;
	sl_ucx_lose(n);
	return 1;
}

struct sl_ucx_message *sl_ucx_new_notice(struct sl_ucx_conn *n, uint8_t type)
{
	struct sl_ucx_message *p;

	if (!sl_ucx_is_up(n) || sl_ucx_lose_backlogged(n))
		return NULL;
	p = sl_ucx_new_message(n->worker, 0);
	if (p)
		p->head.type = type;
	else
		sl_ucx_lose(n);
	return p;
}

void sl_ucx_send_value(struct sl_ucx_conn *n, uint8_t type, uint64_t value)
{
	struct sl_ucx_message *p = sl_ucx_new_notice(n, type);

	if (!p)
		return;
	p->head.off = value;
	sl_ucx_send(n, p);
}

/* One at a time, or they pile up while the peer stands still. */
void sl_ucx_ping(struct sl_ucx_conn *n)
{
	if (!n->pings)
		sl_ucx_send_value(n, SL_UCX_MSG_PING, 0);
}
