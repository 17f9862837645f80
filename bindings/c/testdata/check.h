/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs here have in common: a call that must end as said, and two engines. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sluice.h"

#define SECOND INT64_C(1000000000)
#define LIMIT (60 * SECOND)

/* Ends the program unless the call returns the code. */
#define WANT(code, call)                                                                           \
	do {                                                                                       \
		int got_ = (call);                                                                 \
		if (got_ != (code)) {                                                              \
			fprintf(stderr, "%s:%d: %s: %s, not %s: %s\n", __FILE__, __LINE__, #call,  \
				sluice_code_name(got_), sluice_code_name(code), sluice_error());   \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)
#define OK(call) WANT(SLUICE_OK, call)

#define TRUE(condition)                                                                          \
	do {                                                                                     \
		if (!(condition)) {                                                              \
			fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
			exit(1);                                                                 \
		}                                                                                \
	} while (0)

/* The last error's text has these words. */
#define TEXT(words)                                                                                \
	do {                                                                                       \
		if (!strstr(sluice_error(), words)) {                                              \
			fprintf(stderr, "%s:%d: no \"%s\" in: %s\n", __FILE__, __LINE__, words,    \
				sluice_error());                                                   \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

static inline sluice_engine open_engine(const char *name, const char *backend)
{
	struct sluice_backend list[] = {{.name = backend}};
	struct sluice_config config = {.size = sizeof config,
				       .flags = SLUICE_PLAINTEXT,
				       .name = name,
				       .backends = list,
				       .backends_count = 1};
	sluice_engine engine;
	OK(sluice_open(&config, &engine));
	return engine;
}

struct end {
	sluice_engine engine;
	sluice_memory memory;
	sluice_region region;
	unsigned char *bytes;
};

/* An engine with a region "data". */
static inline struct end open_end(const char *name, const char *backend, uint64_t length)
{
	struct end e = {.engine = open_engine(name, backend)};
	OK(sluice_alloc(e.engine, NULL, length, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = e.memory};
	OK(sluice_register(e.engine, "data", &segment, &e.region));
	return e;
}

static inline void close_end(struct end *e)
{
	OK(sluice_close(e->engine));
	OK(sluice_memory_close(e->memory));
}

/* Connects one way, and finds "data". */
static inline sluice_peer connect_ends(struct end *from, struct end *to, sluice_remote *remote)
{
	static char description[1 << 16];
	size_t length;
	sluice_peer peer;
	OK(sluice_describe(to->engine, NULL, 0, description, sizeof description, &length));
	OK(sluice_connect(from->engine, description, length, LIMIT, &peer));
	OK(sluice_remote_find(peer, "data", remote));
	return peer;
}

static inline sluice_transfer new_transfer(sluice_peer peer, uint32_t op)
{
	sluice_transfer t;
	OK(sluice_transfer_new(peer, op, NULL, &t));
	return t;
}

static inline void add_one(sluice_transfer t, sluice_region region, sluice_remote remote,
			   uint64_t local, uint64_t there, uint64_t n)
{
	struct sluice_desc desc = {local, there, n};
	OK(sluice_transfer_add(t, region, remote, &desc, 1));
}

#endif
