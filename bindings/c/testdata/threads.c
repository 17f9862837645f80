// SPDX-License-Identifier: Apache-2.0
// Threads that the program made: each has its own error text, its own transfer, and no
// two change the same transfer at once.
#include <pthread.h>

#include "check.h"

enum { THREADS = 8, ROUNDS = 300 };

static struct end a, b;
static sluice_peer peer;
static sluice_remote there;
static sluice_transfer common;
static pthread_barrier_t gate;

static void *work(void *argument)
{
	uint64_t number = (uint64_t)(uintptr_t)argument;
	TRUE(sluice_error()[0] == 0); // nothing has failed here yet
	char name[32];
	snprintf(name, sizeof name, "region-of-%d", (int)number);
	sluice_remote none;
	WANT(SLUICE_ERR_NO_ROUTE, sluice_remote_find(peer, name, &none));
	const char *text = sluice_error();
	pthread_barrier_wait(&gate);
	TRUE(strstr(text, name) && sluice_error() == text);

	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, a.region, there, number * 65536, number * 65536, 65536);
	for (int i = 0; i < ROUNDS; i++) {
		memset(a.bytes + number * 65536, i, 65536);
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
		TRUE(b.bytes[number * 65536] == (unsigned char)i &&
		     b.bytes[number * 65536 + 65535] == (unsigned char)i);
		struct sluice_desc desc = {0, 0, 8};
		int code = sluice_transfer_add(common, a.region, there, &desc, 1);
		TRUE(code == SLUICE_OK || code == SLUICE_ERR_BUSY);
		code = sluice_reset(common);
		TRUE(code == SLUICE_OK || code == SLUICE_ERR_BUSY);
	}
	OK(sluice_transfer_close(t));
	return NULL;
}

int main(void)
{
	a = open_end("a", "mem", 1 << 20);
	b = open_end("b", "mem", 1 << 20);
	peer = connect_ends(&a, &b, &there);
	common = new_transfer(peer, SLUICE_WRITE);
	TRUE(!pthread_barrier_init(&gate, NULL, THREADS));
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		TRUE(!pthread_create(&threads[i], NULL, work, (void *)i));
	for (int i = 0; i < THREADS; i++)
		TRUE(!pthread_join(threads[i], NULL));
	OK(sluice_transfer_close(common));
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
