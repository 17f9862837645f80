// SPDX-License-Identifier: Apache-2.0
// Wrong handles, sizes, NULLs and values: each an error with a text, never a crash.
#include "check.h"

static void handles(struct end *a, sluice_peer peer, sluice_remote there)
{
	uint64_t made_up[] = {0,
			      1,
			      42,
			      UINT64_MAX,
			      a->engine + 9,
			      a->engine ^ (UINT64_C(1) << 30),
			      a->region,
			      (uint64_t)(uintptr_t)a};
	struct sluice_desc desc = {0, 0, 8};
	for (size_t i = 0; i < sizeof made_up / sizeof *made_up; i++) {
		uint64_t h = made_up[i];
		WANT(SLUICE_ERR_HANDLE, sluice_post(h));
		WANT(SLUICE_ERR_HANDLE, sluice_test(h));
		WANT(SLUICE_ERR_HANDLE, sluice_wait(h, 0));
		WANT(SLUICE_ERR_HANDLE, sluice_abort(h, 0));
		WANT(SLUICE_ERR_HANDLE, sluice_send(h, "x", 1, 0));
		WANT(SLUICE_ERR_HANDLE, sluice_reset(h));
		WANT(SLUICE_ERR_HANDLE, sluice_transfer_close(h));
		WANT(SLUICE_ERR_HANDLE, sluice_transfer_add(h, a->region, there, &desc, 1));
		WANT(SLUICE_ERR_HANDLE, sluice_close(h));
		WANT(SLUICE_ERR_HANDLE, sluice_memory_close(h));
		WANT(SLUICE_ERR_HANDLE, sluice_peer_close(h));
		WANT(SLUICE_ERR_HANDLE, sluice_remote_close(h));
		WANT(SLUICE_ERR_HANDLE, sluice_lease_revoke(h, 0));
		WANT(SLUICE_ERR_HANDLE, sluice_listener_close(h));
	}
	WANT(SLUICE_ERR_HANDLE, sluice_post(a->region));
	TEXT("is a region, where a transfer is wanted");
	WANT(SLUICE_ERR_HANDLE, sluice_close(0));
	TEXT("the engine is closed, or was never made");

	sluice_transfer t = new_transfer(peer, SLUICE_WRITE), next;
	OK(sluice_transfer_close(t));
	OK(sluice_transfer_new(peer, SLUICE_WRITE, NULL, &next));
	TRUE(next != t); // the same place, and not the same handle
	WANT(SLUICE_ERR_HANDLE, sluice_post(t));
	TEXT("was closed");
	OK(sluice_transfer_close(next));
	for (int i = 0; i < 5000; i++) { // places are given back
		OK(sluice_transfer_new(peer, SLUICE_WRITE, NULL, &t));
		OK(sluice_transfer_close(t));
	}
}

static void arguments(struct end *a, sluice_peer peer, sluice_remote there)
{
	size_t n;
	uint64_t h;
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(NULL, &h));
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_new(peer, SLUICE_WRITE, NULL, NULL));
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_new(peer, 9, NULL, &h));
	WANT(SLUICE_ERR_NO_ROUTE, sluice_transfer_new(peer, SLUICE_WRITE, "rdma", &h));
	WANT(SLUICE_ERR_ARGUMENT, sluice_describe(a->engine, NULL, 0, NULL, 9, &n));
	WANT(SLUICE_ERR_ARGUMENT, sluice_describe(a->engine, NULL, 3, NULL, 0, &n));
	WANT(SLUICE_ERR_ARGUMENT, sluice_connect(a->engine, NULL, 9, 0, &h));
	WANT(SLUICE_ERR_CORRUPT, sluice_connect(a->engine, "what is this", 12, LIMIT, &h));
	WANT(SLUICE_ERR_ARGUMENT, sluice_serve(a->engine, "udp", "x", NULL, 0, &h));
	WANT(SLUICE_ERR_NO_ROUTE, sluice_remote_find(peer, "nothing", &h));
	WANT(SLUICE_ERR_ARGUMENT, sluice_remote_find(peer, NULL, &h));
	WANT(SLUICE_ERR_SYSTEM, sluice_dial(a->engine, "unix", "/nowhere/at/all", LIMIT, &h));

	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	WANT(SLUICE_ERR_BUSY, sluice_test(t));
	WANT(SLUICE_ERR_BUSY, sluice_wait(t, SLUICE_FOREVER));
	WANT(SLUICE_ERR_BOUNDS, sluice_post(t));
	TEXT("nothing is listed");
	struct sluice_desc outside = {1, 0, 1 << 20};
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add(t, a->region, there, &outside, 1));
	TEXT("descs[0]");
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add(t, a->region, there, NULL, 1));
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add(t, a->region, there, &outside, SIZE_MAX));
	TEXT("do not fit into the address space");
	struct sluice_pages pages = {.size = sizeof pages, .entry_length = 8};
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pages(t, a->region, there, &pages));
	pages.count = UINT64_MAX;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pages(t, a->region, there, &pages));
	struct sluice_pattern pattern = {.size = sizeof pattern, .count = 1, .run = 8};
	OK(sluice_transfer_add_pattern(t, a->region, there, &pattern));
	pattern.loops_count = 1, pattern.loops[0].n = 1, pattern.loops[0].reserved = 1;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, there, &pattern));
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_add_pattern(t, a->region, there, NULL));
	struct sluice_copy copy = {0, there, {0, 0, 8}};
	WANT(SLUICE_ERR_HANDLE, sluice_transfer_add_many(t, &copy, 1));
	OK(sluice_transfer_close(t));

	char token[1024], text[4096];
	OK(sluice_lease_grant(a->region, 0, 8, NULL, &h));
	WANT(SLUICE_ERR_SPACE, sluice_lease_token(h, token, 1, &n));
	OK(sluice_lease_token(h, token, n, &n));
	OK(sluice_lease_revoke(h, LIMIT));
	WANT(SLUICE_ERR_HANDLE, sluice_lease_revoke(h, LIMIT));
	WANT(SLUICE_ERR_ARGUMENT, sluice_peer_about(peer, NULL, 1, &n));
	WANT(SLUICE_ERR_SPACE, sluice_peer_about(peer, text, 1, &n));
	OK(sluice_peer_about(peer, text, sizeof text, &n));
	TRUE(strlen(text) + 1 == n);
	WANT(SLUICE_ERR_ARGUMENT, sluice_register_many(a->engine, NULL, NULL, 1, &h));
	WANT(SLUICE_ERR_ARGUMENT, sluice_region_close_many(NULL, 1));
	WANT(SLUICE_ERR_ARGUMENT, sluice_remote_find_many(peer, NULL, 1, &h, NULL));
}

static void sizes(struct end *a, sluice_peer peer)
{
	struct sluice_segment segment = {.size = sizeof segment, .kind = SLUICE_HOST, .length = 8};
	struct sluice_route route = {.size = sizeof route, .flags = 6};
	uint64_t h;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_new_route(peer, SLUICE_WRITE, &route, &h));
	route.size = 8;
	WANT(SLUICE_ERR_ARGUMENT, sluice_transfer_new_route(peer, SLUICE_WRITE, &route, &h));
	TEXT("sizeof(struct sluice_route)");
	WANT(SLUICE_ERR_ARGUMENT, sluice_register(a->engine, "x", &segment, &h)); // NULL with bytes
	segment.host = &segment;
	segment.length = UINT64_MAX;
	WANT(SLUICE_ERR_ARGUMENT, sluice_register(a->engine, "x", &segment, &h));
	segment.length = 8;
	segment.size = 12;
	WANT(SLUICE_ERR_ARGUMENT, sluice_register(a->engine, "x", &segment, &h));
	TEXT("sizeof(struct sluice_segment)");
	segment.size = sizeof segment;
	segment.kind = 77;
	WANT(SLUICE_ERR_ARGUMENT, sluice_register(a->engine, "x", &segment, &h));
	segment.kind = SLUICE_MEMORY;
	segment.memory = peer;
	WANT(SLUICE_ERR_HANDLE, sluice_register(a->engine, "x", &segment, &h));
	segment.memory = a->memory;
	segment.offset = 1 << 20;
	WANT(SLUICE_ERR_BOUNDS, sluice_register(a->engine, "x", &segment, &h));
	segment.kind = SLUICE_DEVICE;
	segment.device_address = 4096;
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_register(a->engine, "x", &segment, &h));
	segment.kind = SLUICE_FILE;
	WANT(SLUICE_ERR_NOT_SUPPORTED, sluice_register(a->engine, "x", &segment, &h));
	segment.file = -1;
	WANT(SLUICE_ERR_BOUNDS, sluice_register(a->engine, "x", &segment, &h));

	// A newer program: what it leaves at 0 does not matter, what it sets does.
	struct {
		struct sluice_config known;
		uint64_t later;
	} newer = {{.size = sizeof newer}, 0};
	struct sluice_backend list[] = {{.name = "mem"}, {.name = "nothing"}};
	newer.known.backends = list;
	newer.known.backends_count = 1;
	OK(sluice_open(&newer.known, &h));
	OK(sluice_close(h));
	newer.later = 1;
	WANT(SLUICE_ERR_VERSION, sluice_open(&newer.known, &h));
	newer.later = 0;
	newer.known.backends_count = 2;
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(&newer.known, &h));
	TEXT("there are cuda, gds, mem,");
	newer.known.backends_count = 0;
	WANT(SLUICE_ERR_BOUNDS, sluice_open(&newer.known, &h));
	const char *options[] = {"workers=2", "inline_max=4096", NULL};
	list[0].options = options;
	newer.known.backends_count = 1;
	OK(sluice_open(&newer.known, &h));
	OK(sluice_close(h));
	WANT(SLUICE_ERR_HANDLE, sluice_close(h));

	// Plain text over a network, and certificates.
	sluice_listener listener;
	newer.known.flags = 4;
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(&newer.known, &h));
	newer.known.flags = SLUICE_SCHEDULE;
	OK(sluice_open(&newer.known, &h));
	OK(sluice_close(h));
	newer.known.flags = 0;
	newer.known.transfers_max = 1 << 21;
	WANT(SLUICE_ERR_BOUNDS, sluice_open(&newer.known, &h));
	TRUE(!strcmp(sluice_error(), "transfers_max is 2097152, at most 1048576"));
	newer.known.transfers_max = 0;
	OK(sluice_open(&newer.known, &h));
	WANT(SLUICE_ERR_ARGUMENT, sluice_serve(h, "tcp", "127.0.0.1:0", NULL, 0, &listener));
	TEXT("in plaintext where the network is trusted");
	OK(sluice_close(h));
	newer.known.cert_file = "/nonexistent/cert.pem";
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(&newer.known, &h));
	newer.known.key_file = newer.known.ca_file = newer.known.cert_file;
	TRUE(sluice_open(&newer.known, &h) != SLUICE_OK);
	TEXT("/nonexistent/cert.pem");
	newer.known.cert_file = newer.known.key_file = newer.known.ca_file = NULL;
	options[1] = "speed=9";
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(&newer.known, &h));
	TEXT("inline_max");
	options[1] = "inline_max=many";
	WANT(SLUICE_ERR_ARGUMENT, sluice_open(&newer.known, &h));
}

int main(void)
{
	TRUE(sluice_abi_version() == SLUICE_ABI_VERSION &&
	     !strcmp(sluice_version(), SLUICE_VERSION));
	TRUE(!strcmp(sluice_code_name(SLUICE_ERR_TIMEOUT), "SLUICE_ERR_TIMEOUT") &&
	     !strcmp(sluice_code_name(-24), "unknown"));
	TRUE(!strcmp(sluice_code_name(SLUICE_PENDING), "SLUICE_PENDING") &&
	     !strcmp(sluice_code_name(INT32_MIN), "unknown"));
	struct end a = open_end("a", "mem", 1 << 20), b = open_end("b", "mem", 1 << 20);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	handles(&a, peer, there);
	arguments(&a, peer, there);
	sizes(&a, peer);
	OK(sluice_remote_close(there));
	WANT(SLUICE_ERR_HANDLE, sluice_remote_close(there));
	close_end(&a);
	WANT(SLUICE_ERR_HANDLE, sluice_peer_close(peer));
	WANT(SLUICE_ERR_HANDLE, sluice_region_close(a.region));
	close_end(&b);
	puts("ok");
	return 0;
}
