/* SPDX-License-Identifier: Apache-2.0 */
/* What a queue pair that failed had under way: done, or to be done again. */
#include "pair.h"

#include <errno.h>

/* The last message of those held that the peer has seen, or NULL; *notes: whether there are any. */
static const struct sl_verbs_record *last_seen(const struct sl_verbs_pair *l, uint64_t seen,
					       int *notes)
{
	const struct sl_verbs_record *last = NULL;

	*notes = 0;
	for (const struct sl_verbs_record *r = l->held.first; r; r = r->next) {
		if (r->kind != SL_VERBS_NOTE)
			continue;
		*notes = 1;
		if (r->number <= seen)
			last = r;
	}
	return last;
}

/* What was not proved done is done once more, unless its batch has failed meanwhile. */
static void do_again(struct sl_verbs_pair *l, struct sl_verbs_record *r)
{
	struct sl_verbs_conn *n = l->conn;
	struct sl_verbs_batch *b = r->batch;

	if (b->cancelled || b->status != 0) {
		sl_verbs_drop_record(n, r);
		sl_verbs_give_up(b, n->closed ? SL_VERBS_CLOSED : SL_VERBS_ABORTED, -1);
		return;
	}
	l->port->counters.again++;
	if (r->kind == SL_VERBS_NOTE) {
		n->notes_out--;
		sl_verbs_append(&n->resend, r);
	} else {
		sl_verbs_append(&n->again, r);
	}
}

/*
 * The peer takes what comes over a queue pair in order: a message that it has seen proves the
 * writes before it, but not that the answer of a read came back.
 */
static void settle(struct sl_verbs_pair *l, uint64_t seen)
{
	struct sl_verbs_conn *n = l->conn;
	int notes;
	const struct sl_verbs_record *last = last_seen(l, seen, &notes);
	struct sl_verbs_list held = l->held;
	struct sl_verbs_record *r;

	if (notes)
		n->sent = seen;
	l->held = (struct sl_verbs_list){0};
	n->held -= held.n;
	while ((r = sl_verbs_pop(&held)) != NULL) {
		int proved = last != NULL, note = r->kind == SL_VERBS_NOTE;

		if (r == last)
			last = NULL;
		if (proved && (note || r->batch->write)) {
			sl_verbs_done(l, r);
		} else {
			if (note && (r->batch->cancelled || r->batch->status != 0))
				n->notes_out--;
			do_again(l, r);
		}
	}
}

int sl_verbs_pair_settle(struct sl_verbs_conn *n, uint32_t pair, uint64_t seen)
{
	struct sl_verbs_pair *l;
	int rc = 0;

	sl_verbs_enter(n->context);
	l = pair < SL_VERBS_PAIRS ? n->pairs[pair] : NULL;
	if (!l || n->ended)
		rc = -EBADF;
	else if (l->state != SL_VERBS_FAILED && l->state != SL_VERBS_MADE)
		rc = -EBUSY;
	if (rc == 0) {
		seen = seen > n->arrived ? seen : n->arrived;
		settle(l, seen < n->sent ? seen : n->sent);
		sl_verbs_pump(n);
	}
	sl_verbs_unlock(n->context);
	return rc;
}
