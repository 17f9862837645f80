// SPDX-License-Identifier: Apache-2.0

//go:build race

// Threads that call the C ABI at random over handles that they share: the race detector sees
// what Go does of it.
#include "hammer_race.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sluice.h"

enum { THREADS = 6, SLOTS = 12, SOCKETS = 4, ROOM = 1 << 20, US = 1000 };

// The handles of each kind, which any thread may use or replace at any time.
enum kind { ENGINE, MEMORY, REGION, PEER, REMOTE, TRANSFER, LEASE, LISTENER, KV, SPACE, OP,
	    RING, READER, VIEW, KINDS };
static _Atomic uint64_t handles[KINDS][SLOTS];
static const int slots[KINDS] = {3, 8, 12, 12, 12, 12, 8, 4, 4, 6, 12,
				   2, 4, 12};

static char sockets[SOCKETS][200];
static uint32_t lists[64];
static struct hammer_counts *totals;
static pthread_mutex_t totals_lock = PTHREAD_MUTEX_INITIALIZER;

struct hand {
	unsigned seed;
	int rounds;
	char *room;
	struct hammer_counts counts;
};

static unsigned any(struct hand *h, unsigned n) { return (unsigned)rand_r(&h->seed) % n; }

static uint64_t pick(struct hand *h, enum kind k) { return handles[k][any(h, (unsigned)slots[k])]; }

// Puts a handle in place of another, which it returns.
static uint64_t put(struct hand *h, enum kind k, uint64_t handle)
{
	return atomic_exchange(&handles[k][any(h, (unsigned)slots[k])], handle);
}

static int told(struct hand *h, int code)
{
	h->counts.calls++;
	h->counts.codes[code < 0 ? -code & 63 : 0] += code <= 0;
	return code;
}

#define DO(call) told(h, call)

static void engines(struct hand *h)
{
	static const char *const tcp[] = {"plaintext=true", "listen=127.0.0.1:0", NULL};
	struct sluice_backend list[] = {{.name = "mem"},
					{.name = "shm"},
					{.name = "tcp", .options = tcp}};
	struct sluice_config config = {.size = sizeof config,
				       .flags = SLUICE_PLAINTEXT,
				       .name = "hammer",
				       .backends = list,
				       .backends_count = 1 + any(h, 3),
				       .transfer_timeout_ns = 300000 * US,
				       .abort_grace_ns = 100000 * US,
				       .connect_timeout_ns = 200000 * US,
				       .handshake_timeout_ns = 200000 * US,
				       .transfers_max = 64,
				       .notifications_max = 16 + any(h, 50)};
	uint64_t engine;
	if (any(h, 20) || DO(sluice_open(&config, &engine)) < 0)
		return;
	uint64_t old = put(h, ENGINE, engine);
	if (old)
		DO(sluice_close(old));
}

static void memories(struct hand *h)
{
	void *at;
	uint64_t memory;
	if (any(h, 3) == 0)
		DO(sluice_memory_close(pick(h, MEMORY)));
	if (DO(sluice_alloc(pick(h, ENGINE), NULL, 4096 * (1 + any(h, 64)), &memory, &at)) < 0)
		return;
	uint64_t old = put(h, MEMORY, memory);
	if (old)
		DO(sluice_memory_close(old));
}

static void regions(struct hand *h)
{
	char name[16];
	uint64_t region;
	struct sluice_segment s = {.size = sizeof s,
				   .kind = SLUICE_MEMORY,
				   .memory = pick(h, MEMORY),
				   .flags = any(h, 8) ? 0 : SLUICE_READ_ONLY};
	snprintf(name, sizeof name, "r%u", any(h, 6));
	if (DO(sluice_register(pick(h, ENGINE), name, &s, &region)) == SLUICE_OK) {
		uint64_t old = put(h, REGION, region);
		if (old)
			DO(sluice_region_close(old));
	}
	if (any(h, 3) == 0)
		DO(sluice_region_close(pick(h, REGION)));
}

static void peers(struct hand *h)
{
	size_t n;
	int lost;
	uint64_t peer;
	if (DO(sluice_describe(pick(h, ENGINE), NULL, 0, h->room, ROOM, &n)) == SLUICE_OK) {
		if (DO(sluice_connect(pick(h, ENGINE), h->room, n, 50000 * US, &peer)) == SLUICE_OK)
			put(h, PEER, peer);
		DO(sluice_peer_refresh(pick(h, PEER), h->room, n));
	}
	if (any(h, 3) == 0 && DO(sluice_self(pick(h, ENGINE), &peer)) == SLUICE_OK)
		put(h, PEER, peer);
	if (any(h, 5) == 0)
		DO(sluice_peer_close(pick(h, PEER)));
	DO(sluice_peer_lost(pick(h, PEER), &lost));
	DO(sluice_peer_about(pick(h, PEER), h->room, ROOM, &n));
}

static void remotes(struct hand *h)
{
	char name[16];
	uint64_t remote, length;
	snprintf(name, sizeof name, "r%u", any(h, 6));
	if (DO(sluice_remote_find(pick(h, PEER), name, &remote)) == SLUICE_OK)
		put(h, REMOTE, remote);
	DO(sluice_remote_length(pick(h, REMOTE), &length));
	if (any(h, 6) == 0)
		DO(sluice_remote_close(pick(h, REMOTE)));
}

static void transfers(struct hand *h)
{
	uint64_t transfer;
	if (DO(sluice_transfer_new(pick(h, PEER), 1 + any(h, 2), NULL, &transfer)) < 0)
		return;
	if (any(h, 2))
		DO(sluice_transfer_watch(transfer, transfer));
	uint64_t old = put(h, TRANSFER, transfer);
	if (old)
		DO(sluice_transfer_close(old));
}

static void fill(struct hand *h)
{
	uint64_t t = pick(h, TRANSFER);
	for (unsigned i = any(h, 4); i; i--) {
		struct sluice_desc d = {any(h, 4) * 100, any(h, 4) * 100, 1 + any(h, 3000)};
		DO(sluice_transfer_add(t, pick(h, REGION), pick(h, REMOTE), &d, 1));
	}
	struct sluice_pages p = {.size = sizeof p,
				 .count = 1 + any(h, 60),
				 .entry_length = 1 + any(h, 40),
				 .local_stride = 40,
				 .remote_stride = 40,
				 .local = any(h, 2) ? lists : NULL,
				 .remote = any(h, 2) ? lists : NULL};
	DO(sluice_transfer_add_pages(t, pick(h, REGION), pick(h, REMOTE), &p));
	struct sluice_pattern q = {.size = sizeof q,
				   .count = 1 + any(h, 30),
				   .run = 1 + any(h, 9),
				   .loops_count = any(h, 4),
				   .loops = {{64, 90, 2, 0}, {16, 30, 3, 0}, {9, 9, 2, 0}},
				   .local = {.stride = 128},
				   .remote = {.stride = 256,
					      .step = 20,
					      .per = any(h, 3),
					      .list = any(h, 2) ? lists : NULL}};
	DO(sluice_transfer_add_pattern(t, pick(h, REGION), pick(h, REMOTE), &q));
	if (any(h, 4) == 0)
		DO(sluice_transfer_message(t, "hello", 5));
}

static void post(struct hand *h)
{
	uint64_t t = pick(h, TRANSFER);
	if (any(h, 2))
		DO(sluice_post(t));
	else if (any(h, 2))
		DO(sluice_post_and_wait(t, any(h, 2000) * US));
	else
		DO(sluice_send(t, "hello", 5, any(h, 2000) * US));
	DO(sluice_test(pick(h, TRANSFER)));
	DO(sluice_wait(pick(h, TRANSFER), any(h, 2000) * US));
	if (any(h, 2))
		DO(sluice_abort(pick(h, TRANSFER), any(h, 3000) * US));
	if (any(h, 4) == 0)
		DO(sluice_reset(pick(h, TRANSFER)));
	if (any(h, 6) == 0)
		DO(sluice_transfer_close(pick(h, TRANSFER)));
}

static void completions(struct hand *h)
{
	int fd;
	size_t n;
	struct sluice_completion list[8];
	DO(sluice_completions(pick(h, ENGINE), list, 8, &n));
	if (any(h, 9) == 0)
		DO(sluice_completion_fd(pick(h, ENGINE), &fd));
}

static void messages(struct hand *h)
{
	int fd;
	struct sluice_notification note = {.size = sizeof note};
	DO(sluice_notify(pick(h, PEER), "note", 4, any(h, 3000) * US));
	int code = DO(sluice_receive(pick(h, ENGINE), &note, h->room, ROOM, any(h, 2000) * US));
	if (code == SLUICE_OK && note.peer && any(h, 4) == 0)
		put(h, PEER, note.peer);
	if (any(h, 9) == 0)
		DO(sluice_notification_fd(pick(h, ENGINE), &fd));
}

static void leases(struct hand *h)
{
	int ended;
	size_t n;
	uint64_t lease, remote;
	struct sluice_lease_options o = {.size = sizeof o,
					 .ttl_ns = any(h, 3) ? 0 : 1 + any(h, 20000) * US};
	if (DO(sluice_lease_grant(pick(h, REGION), 0, 1 + any(h, 4096), any(h, 2) ? &o : NULL,
				  &lease)) < 0)
		return;
	uint64_t old = put(h, LEASE, lease);
	if (DO(sluice_lease_token(lease, h->room, 4096, &n)) == SLUICE_OK &&
	    DO(sluice_remote_import(pick(h, PEER), h->room, n, &remote)) == SLUICE_OK)
		put(h, REMOTE, remote);
	DO(sluice_lease_ended(pick(h, LEASE), &ended));
	if (old)
		DO(sluice_lease_revoke(old, any(h, 5000) * US));
	if (any(h, 3) == 0)
		DO(sluice_lease_revoke(pick(h, LEASE), any(h, 5000) * US));
}

static void serving(struct hand *h)
{
	uint64_t made;
	if (DO(sluice_serve(pick(h, ENGINE), "unix", sockets[any(h, SOCKETS)], NULL, 0, &made)) ==
	    SLUICE_OK) {
		uint64_t old = put(h, LISTENER, made);
		if (old)
			DO(sluice_listener_close(old));
	}
	if (DO(sluice_dial(pick(h, ENGINE), "unix", sockets[any(h, SOCKETS)], 20000 * US, &made)) ==
	    SLUICE_OK)
		put(h, PEER, made);
	if (DO(sluice_accept(pick(h, ENGINE), any(h, 1000) * US, &made)) == SLUICE_OK)
		put(h, PEER, made);
}

static void telling(struct hand *h)
{
	size_t n;
	DO(sluice_stats(pick(h, ENGINE), h->room, ROOM, &n));
	DO(sluice_explain(pick(h, PEER), pick(h, REGION), pick(h, REMOTE), 1 + any(h, 2), h->room,
			  ROOM, &n));
	if (any(h, 20) == 0)
		DO(sluice_close(pick(h, ENGINE)));
}

static void caches(struct hand *h)
{
	char path[220];
	const char *options[] = {path, "bytes=1MiB", "extent=64KiB", "blocks=512", NULL};
	uint64_t made;
	snprintf(path, sizeof path, "path=%s-kv", sockets[any(h, SOCKETS)]);
	switch (any(h, 6)) {
	case 0: {
		const char *at = sockets[any(h, SOCKETS)];
		uint64_t engine = pick(h, ENGINE);
		int code = any(h, 2) ? DO(sluice_kv_open(engine, options, 0, &made))
				     : DO(sluice_kv_dial(engine, "unix", at, 20000 * US, &made));
		if (code < 0)
			return;
		uint64_t old = put(h, KV, made);
		if (old)
			DO(sluice_kv_close(old));
		return;
	}
	case 1:
		DO(sluice_kv_serve(pick(h, KV)));
		return;
	case 2: {
		size_t n;
		DO(sluice_kv_stats(pick(h, KV), h->room, ROOM, &n));
		DO(sluice_kv_drain(pick(h, KV), 0));
		return;
	}
	case 3:
		DO(sluice_kv_detach(pick(h, KV), pick(h, REGION), 1000 * US));
		return;
	default:
		DO(sluice_kv_attach(pick(h, KV), pick(h, REGION), 20000 * US));
	}
}

static void blocks(struct hand *h)
{
	struct sluice_kv_namespace_options o = {.size = sizeof o, .name = any(h, 2) ? "a" : "b"};
	struct sluice_kv_place p = {.size = sizeof p, .region = pick(h, REGION), .stride = 64,
				    .run = 64, .slots = lists};
	struct sluice_kv_key keys[8] = {{{(uint8_t)any(h, 16)}}, {{1}}, {{2}}, {{3}}, {{4}}};
	uint8_t bytes[8];
	uint64_t made, space = pick(h, SPACE), op = pick(h, OP);
	size_t prefix;
	int fd;
	switch (any(h, 10)) {
	case 0:
		if (DO(sluice_kv_namespace_open(pick(h, KV), &o, 20000 * US, &made)) == SLUICE_OK)
			DO(sluice_kv_namespace_close(put(h, SPACE, made)));
		return;
	case 1:
		DO(sluice_kv_match(space, keys, 8, 20000 * US, bytes, &prefix));
		return;
	case 2:
		DO(sluice_kv_remove(space, keys, 1, 20000 * US));
		uint32_t from = 0;
		size_t listed;
		struct sluice_kv_key list[SLUICE_KV_LISTED_MAX];
		DO(sluice_kv_list(space, &from, 20000 * US, list, &listed));
		DO(sluice_kv_hint(space, any(h, 5), 1000000 * US, keys, 8, 20000 * US, NULL));
		return;
	case 3:
		if (DO(sluice_kv_prefetch(space, keys, 8, 9000 * US, &made)) == SLUICE_OK)
			put(h, OP, made);
		return;
	case 4:
		DO(sluice_kv_op_cancel(op));
		DO(sluice_kv_op_close(op));
		return;
	case 5:
		DO(sluice_kv_op_fd(op, &fd));
		// fallthrough
	case 6:
		DO(sluice_kv_op_wait(op, any(h, 2000) * US, bytes, 8));
		return;
	}
	int code = any(h, 3)   ? DO(sluice_kv_store(space, keys, 8, &p, any(h, 9000) * US, &made))
		   : any(h, 2)
		       ? DO(sluice_kv_replace(space, keys, 8, &p, any(h, 9000) * US, &made))
		   : any(h, 3)
		       ? DO(sluice_kv_load(space, keys, 8, &p, any(h, 9000) * US, &made))
		       : DO(sluice_kv_prefetch(space, keys, 8, any(h, 9000) * US, &made));
	if (code == SLUICE_OK)
		DO(sluice_kv_op_close(put(h, OP, made)));
}

static void rings(struct hand *h)
{
	static struct sluice_ring_handle known[4]; // torn ones are nonsense, as any may be
	struct sluice_ring_part parts[] = {{h->room, any(h, 9000)}, {h->room, any(h, 9000)}};
	struct sluice_ring_handle handle = known[any(h, 4)];
	const char *key = any(h, 2) ? "a" : "b";
	const void *bytes;
	char path[220];
	uint64_t made, n;
	size_t length;
	int gone;
	unsigned at = any(h, 2);
	snprintf(path, sizeof path, "%s-ring", sockets[at]);
	struct sluice_ring_config c = {.size = sizeof c, .path = path, .bytes = 1 << 15,
				       .flags = SLUICE_RING_SUMS, .patience_ns = 1000 * US};
	switch (any(h, 10)) {
	case 0:
		DO(sluice_ring_close(handles[RING][at]));
		if (DO(sluice_ring_open(&c, &made)) == SLUICE_OK)
			atomic_store(&handles[RING][at], made); // the one before has closed
		return;
	case 1:
		DO(sluice_ring_leave(pick(h, READER)));
		if (DO(sluice_ring_join(path, 20000 * US, &made)) == SLUICE_OK)
			put(h, READER, made);
		return;
	case 2:
		DO(sluice_ring_touch(pick(h, RING), key));
		DO(sluice_ring_stats(pick(h, RING), h->room, ROOM, &length));
		DO(sluice_ring_end_touches(pick(h, RING)));
		return;
	case 3:
		DO(sluice_ring_remove(pick(h, RING), key));
		DO(sluice_ring_clear(pick(h, RING)));
		return;
	case 4:
		DO(sluice_ring_hand_out(pick(h, RING), key, &handle));
		DO(sluice_ring_find(pick(h, RING), key, &handle));
		break;
	case 5:
		DO(sluice_ring_note(pick(h, READER), h->room, ROOM, &length));
		DO(sluice_ring_gone(pick(h, READER), &gone));
		DO(sluice_ring_verify(pick(h, VIEW)));
		return;
	case 6:
		DO(sluice_ring_view_close(pick(h, VIEW)));
		return;
	default:
		DO(sluice_ring_put(pick(h, RING), key, parts, 2, 2000 * US, &handle));
	}
	known[any(h, 4)] = handle;
	if (DO(sluice_ring_get(pick(h, any(h, 4) ? READER : RING), &handle, &bytes, &n, &made)) ==
	    SLUICE_OK)
		DO(sluice_ring_view_close(put(h, VIEW, made)));
}

static void (*const calls[])(struct hand *) = {
	engines, memories, regions,	remotes,  transfers, fill,    fill,   post,
	post,	 peers,	   completions, messages, leases,    serving, telling, caches,
	blocks,	 blocks,   rings,
};

static void *work(void *arg)
{
	struct hand *h = arg;
	h->room = malloc(ROOM);
	for (int i = 0; i < h->rounds; i++)
		calls[any(h, sizeof calls / sizeof *calls)](h);
	free(h->room);
	pthread_mutex_lock(&totals_lock);
	totals->calls += h->counts.calls;
	for (int i = 0; i < 64; i++)
		totals->codes[i] += h->counts.codes[i];
	pthread_mutex_unlock(&totals_lock);
	return NULL;
}

int hammer(unsigned seed, int rounds, const char *folder, struct hammer_counts *counts)
{
	int failed = 0;
	pthread_t threads[THREADS];
	struct hand hands[THREADS] = {0};
	totals = counts;
	for (int i = 0; i < SOCKETS; i++)
		snprintf(sockets[i], sizeof sockets[i], "%s/%d", folder, i);
	for (uint32_t i = 0; i < 64; i++)
		lists[i] = i * 7 % 64;
	struct hand first = {.seed = seed};
	for (int i = 0; i < 64; i++) // engines from the beginning
		engines(&first);
	for (unsigned i = 0; i < THREADS; i++) {
		hands[i].seed = seed * 977 + i;
		hands[i].rounds = rounds;
		pthread_create(&threads[i], NULL, work, &hands[i]);
	}
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < slots[ENGINE]; i++) {
		int code = sluice_close(atomic_exchange(&handles[ENGINE][i], 0));
		if (code < 0 && code != SLUICE_ERR_HANDLE)
			failed = code;
	}
	for (int i = 0; i < slots[MEMORY]; i++) {
		int code = sluice_memory_close(atomic_exchange(&handles[MEMORY][i], 0));
		if (code < 0 && code != SLUICE_ERR_HANDLE)
			failed = code;
	}
	static int (*const ends[])(uint64_t) = {sluice_ring_close, sluice_ring_leave,
						sluice_ring_view_close};
	for (int k = VIEW; k >= RING; k--) {
		for (int i = 0; i < slots[k]; i++) {
			int code = ends[k - RING](atomic_exchange(&handles[k][i], 0));
			if (code < 0 && code != SLUICE_ERR_HANDLE && code != SLUICE_ERR_BUSY)
				failed = code;
		}
	}
	return failed;
}
