/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How old bytes may be when they land. The model is spec/ucx_ages.pml.
 *
 * An end that is given up, or closed by force, completes its batches although bytes of them may
 * still be on their way: in a slow link, or in the owner's queue while the owner is stopped. Each
 * message carries its echo: the last stamp of the receiver's clock that the sender had when it sent
 * it. The receiver lands bytes only while the echo, or a later confirmation by the sender, is
 * younger than the age limit; it asks the sender about older ones, and an end that is over does not
 * answer. The sender completes such a batch when the last stamp that it received is older than its
 * lease, which is never shorter than the receiver's limit. Both begin with the larger Grace of the
 * two ends.
 *
 * The limit must hold a whole round trip, or each confirmation comes too late. So the receiver
 * proposes a longer limit with its question, and goes by it when the sender has confirmed it.
 */
#include "worker.h"

/* How much the limit may exceed the larger Grace. */
#define ROUND_TRIP_MAX 4000000000u

void sl_ucx_begin_ages(struct sl_ucx_conn *n, uint64_t grace_ns)
{
	uint64_t ours = n->worker->context->config.grace_ns,
		 larger = ours > grace_ns ? ours : grace_ns;

	n->lease = n->limit = larger;
	n->limit_max = larger + ROUND_TRIP_MAX;
}

uint64_t sl_ucx_age(const struct sl_ucx_conn *n, const struct sl_ucx_head *h, uint64_t now)
{
	if (h->echo > now) /* none of ours */
		return UINT64_MAX;
	return now - (h->echo > n->confirmed ? h->echo : n->confirmed);
}

/* The step ask of the model. Only one request to confirm is under way at a time. */
void sl_ucx_ask_confirm(struct sl_ucx_conn *n)
{
	if (n->asking)
		return;
	n->asking = 1;
	sl_ucx_send_value(n, SL_UCX_MSG_CONFIRM, n->proposed > n->limit ? n->proposed : n->limit);
}

/* The step vouch: our lease grows before the owner learns of it, and makes its limit longer. */
void sl_ucx_confirm(struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	uint64_t longer = h->off < n->limit_max ? h->off : n->limit_max;

	if (n->lease < longer)
		n->lease = longer;
	sl_ucx_send_value(n, SL_UCX_MSG_CONFIRMED, n->lease);
}

/* The step vouched. All that the peer sent before this message is as young as this message. */
void sl_ucx_confirmed(struct sl_ucx_conn *n, const struct sl_ucx_head *h)
{
	uint64_t longer = h->off < n->limit_max ? h->off : n->limit_max;

	n->asking = 0;
	if (h->echo > n->heard) /* none of ours */
		return;
	if (n->limit < longer)
		n->limit = longer;
	if (n->heard - h->echo > n->limit / 4 * 3) { /* it comes too late, or nearly so */
		n->proposed = 2 * n->limit < n->limit_max ? 2 * n->limit : n->limit_max;
	}
	if (n->confirmed < h->echo)
		n->confirmed = h->echo;
}
