/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gates: how a process takes back the leave to copy from its memory, from a peer that may be
 * frozen.
 *
 * A peer that copies for us compares tickets before, but between that and the copy it may be
 * stopped for ever so long, and when it goes on the transfer has ended and the memory serves
 * something else. So each copy begins with a page of ours, in the same call of the kernel, which
 * does not stop in the middle: it either began before the page went away, and is over in moments,
 * or finds nothing and copies nothing.
 *
 * The mark on the page tells that the process is the one that was meant, and no other one that has
 * its number by now.
 */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

static size_t page(void)
{
	return (size_t)sysconf(_SC_PAGESIZE);
}

void sl_ucx_open_gate(struct sl_ucx_conn *n)
{
	/* Shared, since the kernel would join it to neighbours that are private, and may then
	 * lack the memory to part them. */
	void *at = mmap(NULL, page(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		return;
	if (getrandom(at, SL_UCX_MARK, 0) != SL_UCX_MARK) {
		munmap(at, page());
		return;
	}
	n->gate = at;
}

/* Whether the peer may have a message whose bytes it has yet to copy. */
static int offers(const struct sl_ucx_conn *n)
{
	for (uint32_t seq = n->first_seq; n->pulled && seq != n->next_seq; seq++) {
		if (n->records[seq % SL_UCX_WINDOW].kind == SL_UCX_WRITING)
			return 1;
	}
	return 0;
}

/*
 * Whether no peer can pass the gate any more: 0 where the kernel refuses, and the next call tries
 * again. Nothing else may ever stand in the place of a gate that a peer may still look at: it would
 * be an open one. That costs a page of addresses, and no memory.
 */
int sl_ucx_shut_gate(struct sl_ucx_conn *n)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;

	if (!n->gate)
		return 1;
	if (!offers(n))
		munmap(n->gate, page());
	else if (mprotect(n->gate, page(), PROT_NONE) != 0)
		return 0;
	else /* gives its memory back */
		(void)mmap(n->gate, page(), PROT_NONE, flags, -1, 0);
	n->gate = NULL;
	for (uint32_t i = 0; i < SL_UCX_WINDOW; i++)
		sl_ucx_free_block(n, &n->records[i]);
	return 1;
}

void sl_ucx_gate(struct sl_ucx_conn *n, struct sl_ucx_gate *out)
{
	memset(out, 0, sizeof(*out));
	sl_ucx_lock(n->worker);
	if (n->gate) {
		out->at = (uint64_t)(uintptr_t)n->gate;
		memcpy(out->mark, n->gate, sizeof(out->mark));
	}
	sl_ucx_unlock(n->worker);
}

void sl_ucx_look_at_gate(struct sl_ucx_conn *n, const struct sl_ucx_peer *peer)
{
	uint64_t none;

	if (!n->worker->vectors || !peer->pid || !peer->gate.at)
		return;
	n->pid = peer->pid;
	n->their = peer->gate;
	sl_ucx_begin_pull(n->worker->vectors);
	errno = 0;
	if (sl_ucx_pull(n, n->worker->vectors, &none) == 0) {
		n->refused = 0;
		return;
	}
	n->refused = errno ? errno : ESRCH;
	n->pid = 0;
}

int sl_ucx_pulls(struct sl_ucx_conn *n)
{
	int rc;

	sl_ucx_lock(n->worker);
	rc = -n->refused;
	sl_ucx_unlock(n->worker);
	return rc;
}
