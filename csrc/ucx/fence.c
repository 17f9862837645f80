/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What takes memory back from peers.
 *
 * A peer that shows a ticket is refused as soon as it has changed and each lock was taken once.
 * Peers that have mapped the memory need not show it: for them each key has a word, its generation,
 * on a page that they map as well. A peer's stores count only if the word was the one of its import
 * before and after. A fence that changes the word and then has a pong of the peer knows that no
 * store under the old one is under way: the peer answers under the lock under which it stores. The
 * model is spec/ucx_near.pml.
 */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Whose stores are over. One that was only given up may go on storing into what it has mapped. */
static int is_out(const struct sl_ucx_conn *n)
{
	return n->state == SL_UCX_ENDED || n->proven;
}

/* Has been asked for longer than that and has not answered. */
static int silent(const struct sl_ucx_conn *n, uint64_t now, uint64_t patience)
{
	return patience && n->answered < n->asked && now > n->asked_at &&
	       now - n->asked_at > patience;
}

/* Asks every peer, but with patience none that has been silent for longer. Returns the nonce. */
static uint64_t ask(struct sl_ucx_context *c, uint64_t patience)
{
	uint64_t nonce = atomic_fetch_add(&c->nonce, 1) + 1, now = sl_ucx_now();

	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		sl_ucx_lock(w);
		for (uint32_t k = 0; k < w->conns_len; k++) {
			struct sl_ucx_conn *n = w->conns[k];

			if (!n || !n->peer || is_out(n) || silent(n, now, patience))
				continue;
			if (n->answered >= n->asked)
				n->asked_at = now;
			n->asked = nonce;
			sl_ucx_ping(n);
		}
		sl_ucx_rouse(w);
		sl_ucx_unlock(w);
	}
	return nonce;
}

static int answered(struct sl_ucx_worker *w, uint64_t nonce)
{
	for (uint32_t k = 0; k < w->conns_len; k++) {
		struct sl_ucx_conn *n = w->conns[k];

		if (n && n->asked >= nonce && n->answered < nonce && !is_out(n))
			return 0;
	}
	return 1;
}

static int await_answers(struct sl_ucx_context *c, uint64_t nonce, uint64_t deadline)
{
	int rc = 0;

	for (uint32_t i = 0; i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];

		sl_ucx_lock(w);
		while (!answered(w, nonce) && rc == 0)
			rc = sl_ucx_wait(w, deadline);
		if (rc != 0 && answered(w, nonce))
			rc = 0;
		sl_ucx_unlock(w);
		if (rc != 0)
			return rc;
	}
	return 0;
}

/* Begins an epoch, unless there is no ticket for it: then the last one is only waited for. */
static int begin(struct sl_ucx_context *c, uint32_t key, uint64_t ticket,
		 struct sl_ucx_memory **out)
{
	_Atomic uint32_t *word;
	struct sl_ucx_memory *m;

	pthread_mutex_lock(&c->lock);
	word = sl_ucx_word(c, key);
	*out = m = sl_ucx_find(c, key);
	if (m && ticket && atomic_load(&m->ticket) != ticket) {
		atomic_store(&m->ticket, ticket);
		if (word)
			atomic_fetch_add(word, 1);
		m->owed |= m->exported; /* peers may map it anew before this is proven */
		m->exported = 0;
		m->nonce = 0;
	}
	pthread_mutex_unlock(&c->lock);
	return m ? 0 : -ERANGE;
}

/* The nonce whose answers prove that nothing of earlier epochs is under way; 0: nothing is. */
static uint64_t proof(struct sl_ucx_context *c, struct sl_ucx_memory *m)
{
	uint64_t nonce = 0;

	pthread_mutex_lock(&c->lock);
	if (m->owed) {
		if (!m->nonce)
			m->nonce = ask(c, 0);
		nonce = m->nonce;
	}
	pthread_mutex_unlock(&c->lock);
	return nonce;
}

static void proven(struct sl_ucx_context *c, struct sl_ucx_memory *m, uint64_t nonce)
{
	pthread_mutex_lock(&c->lock);
	if (m->nonce == nonce) /* no epoch has ended meanwhile */
		m->owed = 0;
	pthread_mutex_unlock(&c->lock);
}

int sl_ucx_fence(struct sl_ucx_context *c, uint32_t key, uint64_t ticket, uint64_t grace_ns)
{
	uint64_t deadline = sl_ucx_now() + grace_ns;
	struct sl_ucx_memory *m;
	uint64_t nonce;
	int rc = begin(c, key, ticket, &m);

	if (rc == 0)
		sl_ucx_quiesce(c); /* what was admitted under the old ticket has landed */
	nonce = rc == 0 ? proof(c, m) : 0;
	if (nonce) {
		rc = await_answers(c, nonce, deadline);
		if (rc == 0)
			proven(c, m, nonce);
	}
	return rc;
}

/* Ends the generation of all memory of an allocation that overlaps a range. */
static void end_generations(struct sl_ucx_context *c, struct sl_ucx_allocation *a, uint64_t from,
			    uint64_t to)
{
	for (uint32_t key = 0; key < SL_UCX_WORDS; key++) {
		struct sl_ucx_memory *m = sl_ucx_find(c, key);

		if (!m) {
			if (!atomic_load(&c->chunks[key / SL_UCX_CHUNK]))
				key |= SL_UCX_CHUNK - 1; /* nothing in the whole chunk */
			continue;
		}
		if (m->in == a && (uint64_t)(m->base - a->base) < to &&
		    from < (uint64_t)(m->base - a->base) + m->len)
			atomic_fetch_add(sl_ucx_word(c, key), 1);
	}
}

static int keep_fresh(struct sl_ucx_allocation *a, uint64_t from, uint64_t to)
{
	struct sl_ucx_range *grown;

	for (uint32_t i = 0; i < a->fresh_len; i++) {
		if (a->fresh[i].from <= from && to <= a->fresh[i].to)
			return 0;
	}
	grown = realloc(a->fresh, (a->fresh_len + 1) * sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	grown[a->fresh_len++] = (struct sl_ucx_range){from, to};
	a->fresh = grown;
	return 0;
}

static void lock_all(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; c && i < c->config.workers; i++)
		sl_ucx_lock(&c->workers[i]);
}

static void unlock_all(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; c && i < c->config.workers; i++)
		sl_ucx_unlock(&c->workers[i]);
}

/* Bytes of pages replaced with all locks held: others move theirs in between. */
#define STEP (4u << 20)
/* Between two steps; and how often, for others that wait and have not got a core since. */
#define PAUSE_US 50
#define PAUSES 200

/* A lock that is taken again at once would hardly be free for others: they sleep by now. */
static void give_way(struct sl_ucx_context *c)
{
	for (uint32_t i = 0; c && i < c->config.workers; i++) {
		struct sl_ucx_worker *w = &c->workers[i];
		unsigned turn = atomic_load(&w->turns);

		for (int k = 0; k < PAUSES && atomic_load(&w->waiting) &&
				atomic_load(&w->turns) == turn;
		     k++)
			usleep(PAUSE_US);
	}
}

/* Puts pages that no peer has in the place of the old ones. */
static int replace(struct sl_ucx_context *c, struct sl_ucx_context *beside, uint8_t *at,
		   uint64_t len)
{
	uint8_t *fresh = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int rc = 0;

	if (fresh == MAP_FAILED)
		return -errno;
	for (uint64_t done = 0; done < len && rc == 0;) {
		uint64_t step = len - done < STEP ? len - done : STEP;

		lock_all(c);
		lock_all(beside);
		rc = sl_guard_copy(fresh + done, at + done, step);
		if (rc == 0 && mremap(fresh + done, step, step, MREMAP_MAYMOVE | MREMAP_FIXED,
				       at + done) == MAP_FAILED)
			rc = -errno;
		unlock_all(beside);
		unlock_all(c);
		usleep(PAUSE_US);
		give_way(beside);
		give_way(c);
		if (rc != 0)
			munmap(fresh + done, len - done);
		done += step;
	}
	return rc;
}

/* Widened to pages of this size, puts fresh ones under a memory. With the lock of c. */
static int refresh(struct sl_ucx_context *c, struct sl_ucx_memory *m, uint64_t page,
		   uint64_t grace_ns, struct sl_ucx_context *beside)
{
	struct sl_ucx_allocation *a = m->in;
	uint64_t from = (uint64_t)(m->base - a->base) / page * page;
	uint64_t to = ((uint64_t)(m->base - a->base) + m->len + page - 1) / page * page;
	int rc;

	if (to > a->mapped)
		to = a->mapped;
	rc = keep_fresh(a, from, to); /* from now on no peer maps it anew */
	if (rc != 0)
		return rc;
	end_generations(c, a, from, to);
	/* Peers that answer now have the owner move their bytes; those that were silent
	 * before see the word when they go on. */
	await_answers(c, ask(c, grace_ns / 2), sl_ucx_now() + grace_ns);
	return replace(c, beside, a->base + from, to - from);
}

#define HUGE (2u << 20)

int sl_ucx_refresh(struct sl_ucx_context *c, uint32_t key, uint64_t grace_ns,
		   struct sl_ucx_context *beside)
{
	struct sl_ucx_memory *m;
	int rc;

	pthread_mutex_lock(&c->lock);
	m = sl_ucx_find(c, key);
	rc = !m	      ? -ERANGE
	     : !m->in ? -ENOTSUP
		      : refresh(c, m, (uint64_t)sysconf(_SC_PAGESIZE), grace_ns, beside);
	if (rc == -EINVAL) /* reserved huge pages are replaced whole */
		rc = refresh(c, m, HUGE, grace_ns, beside);
	if (rc == 0)
		m->exported = m->owed = 0;
	pthread_mutex_unlock(&c->lock);
	return rc;
}
