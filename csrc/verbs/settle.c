/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Settles the unproved requests of a queue pair that failed, when the peer has destroyed its end
 * and says how many messages it had seen: each request is proved done by that, or posted again.
 */
#include "pair.h"

#include <errno.h>

/*
 * The last unproved message that the peer has seen, or NULL; *notifs: whether there are any
 * unproved messages.
 */
static const struct sl_verbs_record *last_seen(const struct sl_verbs_pair *l, uint64_t seen,
					       int *notifs)
{
	const struct sl_verbs_record *last = NULL;

	*notifs = 0;
	for (const struct sl_verbs_record *r = l->unproved.first; r; r = r->next) {
		if (r->kind != SL_VERBS_NOTIF)
			continue;
		*notifs = 1;
		if (r->number <= seen)
			last = r;
	}
	return last;
}

/* Posts a request once more, unless its batch has failed meanwhile. */
static void repost(struct sl_verbs_pair *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_batch *b = r->batch;

	if (b->cancelled || b->status != 0) {
		sl_verbs_drop_record(n, r);
		sl_verbs_give_up_batch(b, n->closed ? SL_VERBS_CLOSED : SL_VERBS_ABORTED, -1);
		return;
	}
	l->rail->counters.reposted++;
	if (r->kind == SL_VERBS_NOTIF) {
		n->notifs_in_flight--;
		sl_verbs_append(&n->resend, r);
	} else {
		sl_verbs_append(&n->repost, r);
	}
}

/*
 * The peer takes what comes over a queue pair in order: a message that it has seen proves the
 * writes before it, but not that the answer of a read came back.
 */
static void settle_unproved(struct sl_verbs_pair *l, uint64_t seen)
{
	struct sl_verbs_conn *n = l->conn;
	int notifs;
	const struct sl_verbs_record *last = last_seen(l, seen, &notifs);
	struct sl_verbs_list unproved = l->unproved;
	struct sl_verbs_record *r;

	if (notifs)
		n->sent = seen;
	l->unproved = (struct sl_verbs_list){0};
	n->unproved -= unproved.n;
	while ((r = sl_verbs_pop(&unproved)) != NULL) {
		int proved = last != NULL, notif = r->kind == SL_VERBS_NOTIF;

		if (r == last)
			last = NULL;
		if (proved && (notif || r->batch->write)) {
			sl_verbs_complete(l, r);
		} else {
			if (notif && (r->batch->cancelled || r->batch->status != 0))
				n->notifs_in_flight--;
			repost(l, r);
		}
	}
}

int sl_verbs_pair_settle(struct sl_verbs_conn *n, uint32_t pair, uint64_t seen)
{
	struct sl_verbs_pair *l;
	int rc = 0;

	sl_verbs_lock(n->context);
	l = pair < SL_VERBS_PAIRS ? n->pairs[pair] : NULL;
	if (!l || n->ended)
		rc = -EBADF;
	else if (l->state != SL_VERBS_FAILED && l->state != SL_VERBS_MADE)
		rc = -EBUSY;
	if (rc == 0) {
		seen = seen > n->acknowledged ? seen : n->acknowledged;
		settle_unproved(l, seen < n->sent ? seen : n->sent);
		sl_verbs_end_refusals(n, l);
		sl_verbs_post_waiting(n);
	}
	sl_verbs_unlock(n->context);
	return rc;
}
