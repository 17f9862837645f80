/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turns the pieces of batches into work requests, in the order of the batches and as far as there
 * is room: first the records of failed queue pairs, then new data, then messages. For each request
 * it chooses a queue pair and gathers pieces that lie together in the peer's memory. One list for
 * each queue pair goes to the NIC.
 */
#include "pair.h"

#include <errno.h>

/* What a request costs a rail in addition to its bytes, in bytes. */
#define REQUEST_COST 1024u
/* A batch of at most so many bytes goes over the queue pair of its message. */
#define WITH_NOTIF_MAX (64u << 10)

/* A bit for each usable queue pair that reaches both memories, or for each that m prefers. */
static uint32_t candidates(const struct sl_verbs_conn *n, const struct sl_verbs_memory *m,
			   const struct sl_verbs_import *im)
{
	uint32_t all = 0, preferred = 0, pairs = im->reachable_over & n->pairs_made;

	for (uint32_t i = 0; pairs >> i; i++) {
		const struct sl_verbs_pair *l = n->pairs[i];

		if (!(pairs >> i & 1) || !sl_verbs_usable(l) ||
		    !(m->pinned_rails >> l->rail->index & 1))
			continue;
		all |= 1u << i;
		if (m->prefer >> l->rail->index & 1)
			preferred |= 1u << i;
	}
	return preferred ? preferred : all;
}

/*
 * Of a set of queue pairs, the one whose rail has the fewest bytes posted; among equals, the next
 * from number first on. A batch that fits into config.flight of all its queue pairs is shared
 * evenly, and ends with the slowest rail. A slow rail is given less only of a larger batch.
 */
static struct sl_verbs_pair *least_loaded(const struct sl_verbs_conn *n, uint32_t pairs,
					  uint32_t first)
{
	struct sl_verbs_pair *best = NULL;
	uint64_t least = 0;

	for (uint32_t k = 0; pairs && k < SL_VERBS_PAIRS; k++) {
		uint32_t i = (first + k) % SL_VERBS_PAIRS;
		const struct sl_verbs_rail *p;
		uint64_t load;

		if (!(pairs >> i & 1))
			continue;
		p = n->pairs[i]->rail;
		load = p->counters.in_flight + (uint64_t)p->sends_reserved * REQUEST_COST;
		if (!best || load < least) {
			best = n->pairs[i];
			least = load;
		}
	}
	return best;
}

/*
 * The queue pair of the first request of a batch. A small batch goes over the queue pair of
 * messages, so that its own message need not wait for another queue pair.
 */
static struct sl_verbs_pair *choose_first(struct sl_verbs_conn *n, const struct sl_verbs_batch *b,
					  uint32_t pairs)
{
	struct sl_verbs_pair *l = b->notif ? sl_verbs_notif_pair(n) : NULL;

	if (l && !(pairs >> l->index & 1))
		l = NULL;
	if (l && b->bytes <= WITH_NOTIF_MAX)
		return l;
	return least_loaded(n, pairs, l ? l->index : n->turn);
}

/*
 * The queue pair of the next request, or NULL: the request waits. If the least loaded one is full,
 * the request waits for it.
 */
static struct sl_verbs_pair *choose(struct sl_verbs_conn *n, struct sl_verbs_batch *b,
				    const struct sl_verbs_memory *m,
				    const struct sl_verbs_import *im)
{
	uint32_t pairs = candidates(n, m, im);
	struct sl_verbs_pair *l;

	if (!b->one_pair)
		l = least_loaded(n, pairs, n->turn);
	else if (b->pair >= 0 && pairs >> b->pair & 1)
		l = n->pairs[b->pair];
	else
		l = choose_first(n, b, pairs);
	if (!l || !sl_verbs_has_room(l))
		return NULL;
	b->pair = (int32_t)l->index;
	n->turn = l->index + 1;
	return l;
}

/*
 * Gathers the bytes from a position on that lie together in the peer's memory, at most most bytes
 * in at most max entries. Moves the position behind them, and returns how many bytes.
 */
static uint64_t gather(const struct sl_verbs_batch *b, struct sl_verbs_position *at, uint64_t most,
		       uint8_t *base, uint32_t lkey, struct ibv_sge *sge, uint32_t *entries,
		       uint32_t max)
{
	struct sl_desc d = sl_piece(&b->pieces, at->piece);
	const uint32_t local = d.local_key, slot = d.remote_key;
	uint64_t next = d.remote + at->off, total = 0;
	uint32_t used = 0;

	while (d.local_key == local && d.remote_key == slot && d.remote + at->off == next) {
		uint64_t from = (uintptr_t)base + d.local + at->off, len = d.len - at->off;

		if (len > most - total)
			len = most - total;
		if (used && sge[used - 1].addr + sge[used - 1].length == from) {
			sge[used - 1].length += (uint32_t)len;
		} else if (used < max) {
			sge[used++] =
			    (struct ibv_sge){.addr = from, .length = (uint32_t)len, .lkey = lkey};
		} else {
			break;
		}
		total += len;
		next += len;
		at->off += len;
		if (at->off < d.len)
			break;
		at->off = 0;
		if (++at->piece >= b->pieces.count || total == most)
			break;
		d = sl_piece(&b->pieces, at->piece);
	}
	*entries = used;
	return total;
}

static void set_remote(struct ibv_send_wr *wr, const struct sl_verbs_batch *b,
		       const struct sl_verbs_pair *l, const struct sl_verbs_import *im,
		       uint64_t remote)
{
	wr->opcode = b->write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
	wr->wr.rdma.remote_addr = im->base + remote;
	wr->wr.rdma.rkey = im->keys[l->index];
}

/*
 * Builds the next request of a batch, of at most most bytes, and moves the position. Returns how
 * many bytes, or -EAGAIN: no queue pair or no room; -ECANCELED: the batch has failed, and may have
 * ended.
 */
static int64_t build_next(struct sl_verbs_conn *n, struct sl_verbs_batch *b,
			  struct sl_verbs_position *at, uint64_t most, int reposted)
{
	struct sl_verbs_context *c = n->context;
	struct sl_desc d = sl_piece(&b->pieces, at->piece);
	struct sl_verbs_memory *m = sl_verbs_memory_of(c, d.local_key);
	struct sl_verbs_import *im = n->imports[d.remote_key];
	struct sl_verbs_position from = *at;
	struct sl_verbs_record *r;
	struct sl_verbs_pair *l;
	struct ibv_sge *entries;
	uint32_t len;

	if (im->expired) {
		sl_verbs_key_refused(b, im->refused_by, (int32_t)at->piece);
		return -ECANCELED;
	}
	entries = sl_verbs_next_entries(n);
	l = choose(n, b, m, im);
	r = l ? sl_verbs_new_record(c) : NULL;
	if (!r)
		return -EAGAIN;
	r->kind = SL_VERBS_DATA;
	r->batch = b;
	r->piece = from.piece;
	r->off = from.off;
	r->reposted = reposted != 0;
	r->len = gather(b, at, most, m->base, sl_verbs_lkey(m, l->rail->index), entries, &len,
			l->rail->info.sge_max);
	b->records_open++;
	set_remote(sl_verbs_build(l, r, entries, len), b, l, im, d.remote + from.off);
	return (int64_t)r->len;
}

/* Posts the data of failed queue pairs again. -EAGAIN: some is left. */
static int repost_failed(struct sl_verbs_conn *n)
{
	struct sl_verbs_record *r;

	while ((r = n->repost.first) != NULL) {
		struct sl_verbs_batch *b = r->batch;
		struct sl_verbs_position at = {r->piece, r->off};
		int64_t len = build_next(n, b, &at, r->len, 1);

		if (len == -EAGAIN)
			return -EAGAIN;
		if (len < 0) /* all records of the batch are dropped */
			continue;
		r->piece = at.piece;
		r->off = at.off;
		r->len -= (uint64_t)len;
		if (r->len == 0) {
			b->records_open--;
			sl_verbs_free_record(n->context, sl_verbs_pop(&n->repost));
		}
	}
	return 0;
}

/* Posts new data of the batches, in their order. */
static void post_new(struct sl_verbs_conn *n)
{
	while (n->first_unposted != &n->batches) {
		struct sl_verbs_batch *b = n->first_unposted;
		int64_t rc = 0;

		while (rc >= 0 && b->status == 0 && !sl_verbs_all_posted(b))
			rc = build_next(n, b, &b->position, n->context->config.slice, 0);
		if (rc == -EAGAIN)
			return;
		if (n->first_unposted != b) /* it has ended */
			continue;
		n->first_unposted = b->next;
		sl_verbs_end_if_over(b);
	}
}

void sl_verbs_post_waiting(struct sl_verbs_conn *n)
{
	if (n->ending)
		return;
	if (!n->initiator) {
		sl_verbs_send_credit(n);
		return;
	}
	if (repost_failed(n) == 0)
		post_new(n);
	sl_verbs_post_notifs(n);
	sl_verbs_post_built(n);
	if (n->repost.first || n->resend.first || n->notif_first ||
	    n->first_unposted != &n->batches)
		sl_verbs_queue_conn(n);
}
