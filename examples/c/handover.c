// SPDX-License-Identifier: Apache-2.0
/*
 * Moves host memory from one process to another, over shared memory or TCP. In two terminals:
 *
 *	cc -o handover handover.c $(pkg-config --cflags --libs sluice)
 *	./handover decode shm /tmp/kv.sock
 *	./handover prefill shm /tmp/kv.sock
 *
 * The socket carries descriptions alone; between hosts it would be sluice_serve over "tcp".
 */
#include <sluice.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                                                                \
	do {                                                                       \
		if ((call) != SLUICE_OK) {                                         \
			fprintf(stderr, "handover: %s\n", sluice_error());         \
			exit(1);                                                   \
		}                                                                  \
	} while (0)

enum { LENGTH = 1 << 20 };
static const int64_t limit = 60 * INT64_C(1000000000);

/* Lends its memory to a peer that dials, and is told when something has come. */
static void decode(sluice_engine engine, const char *bytes, const char *socket)
{
	sluice_listener listener; /* answers processes of this user alone */
	CHECK(sluice_serve(engine, "unix", socket, NULL, 0, &listener));
	puts("serving"), fflush(stdout);
	char message[64];
	struct sluice_notification note = {.size = sizeof note};
	CHECK(sluice_receive(engine, &note, message, sizeof message, limit));
	/* visible before the message is */
	printf("%.*s: %s\n", (int)note.length, message, bytes + 4096);
}

/* Writes into the memory of decode, and says so behind the bytes. */
static void prefill(sluice_engine engine, sluice_region region, char *bytes, const char *socket)
{
	sluice_peer peer;
	sluice_remote remote;
	sluice_transfer transfer; /* filled once, posted many times */
	CHECK(sluice_dial(engine, "unix", socket, limit, &peer));
	CHECK(sluice_remote_find(peer, "kv", &remote));
	CHECK(sluice_transfer_new(peer, SLUICE_WRITE, NULL, &transfer));
	struct sluice_desc desc = {.local = 0, .remote = 4096, .length = 65536};
	CHECK(sluice_transfer_add(transfer, region, remote, &desc, 1));
	CHECK(sluice_transfer_message(transfer, "layer 0", 7));
	strcpy(bytes, "keys and values");
	CHECK(sluice_post_and_wait(transfer, limit));
}

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "usage: handover decode|prefill shm|tcp socket\n");
		return 2;
	}
	int tcp = !strcmp(argv[2], "tcp");
	/* certificates between hosts: see sluice.h */
	const char *options[] = {"plaintext=true", "listen=127.0.0.1:0", NULL};
	struct sluice_backend backend = {.name = argv[2], .options = tcp ? options : NULL};
	struct sluice_config config = {.size = sizeof config,
				       .name = argv[1],
				       .backends = &backend,
				       .backends_count = 1};
	sluice_engine engine;
	CHECK(sluice_open(&config, &engine));
	sluice_memory memory; /* peers reach it with one copy */
	char *bytes;
	CHECK(sluice_alloc(engine, NULL, LENGTH, &memory, (void **)&bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = memory};
	sluice_region region;
	CHECK(sluice_register(engine, "kv", &segment, &region));
	if (!strcmp(argv[1], "decode"))
		decode(engine, bytes, argv[3]);
	else
		prefill(engine, region, bytes, argv[3]);
	CHECK(sluice_close(engine)); /* and all that is its own */
	CHECK(sluice_memory_close(memory));
	return 0;
}
