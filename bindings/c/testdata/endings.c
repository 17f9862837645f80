// SPDX-License-Identifier: Apache-2.0
// Waits that end before the transfer does, aborts, and closing an engine with work in flight.
// Messages that are not received keep transfers in flight for as long as the test wants.

#include "check.h"

static const char *const few[] = {"batches_max=4", NULL};

static struct end narrow(const char *name)
{
	struct sluice_backend list[] = {{.name = "mem", .options = few}};
	struct sluice_config config = {.size = sizeof config,
				       .name = name,
				       .backends = list,
				       .backends_count = 1,
				       .notifications_max = 1};
	struct end e;
	OK(sluice_open(&config, &e.engine));
	OK(sluice_alloc(e.engine, NULL, 1 << 20, &e.memory, (void **)&e.bytes));
	struct sluice_segment segment = {.size = sizeof segment,
					 .kind = SLUICE_MEMORY,
					 .memory = e.memory};
	OK(sluice_register(e.engine, "data", &segment, &e.region));
	return e;
}

/* A transfer that is posted and stays so, since the other side has no room for its message. */
static sluice_transfer stuck(struct end *a, sluice_peer peer, sluice_remote there)
{
	for (int i = 0; i < 1000; i++) {
		sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
		add_one(t, a->region, there, 0, 0, 64);
		OK(sluice_transfer_message(t, "m", 1));
		OK(sluice_post(t));
		// A copy of 64 bytes ends in one of the waits, unless it is stuck, also where this
		// process stands still for a while.
		int code = SLUICE_PENDING;
		for (int n = 0; n < 3 && code == SLUICE_PENDING; n++)
			code = sluice_wait(t, SECOND / 3);
		if (code == SLUICE_PENDING)
			return t;
		OK(code);
		OK(sluice_transfer_close(t));
	}
	TRUE(!"every message found room");
	return 0;
}

int main(void)
{
	struct end a = open_end("a", "mem", 1 << 20), b = narrow("b");
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);

	sluice_transfer t = stuck(&a, peer, there);
	WANT(SLUICE_PENDING, sluice_test(t));
	WANT(SLUICE_PENDING, sluice_wait(t, 0));
	WANT(SLUICE_PENDING, sluice_wait(t, 1000));
	// with the limit that was given back, or another
	WANT(SLUICE_PENDING, sluice_wait(t, SECOND / 50));
	WANT(SLUICE_ERR_BUSY, sluice_post(t));
	WANT(SLUICE_ERR_BUSY, sluice_reset(t));
	WANT(SLUICE_ERR_BUSY, sluice_transfer_close(t));
	WANT(SLUICE_ERR_BUSY, sluice_transfer_watch(t, 1));
	WANT(SLUICE_ERR_BUSY, sluice_region_close(a.region));
	WANT(SLUICE_ERR_BUSY, sluice_remote_close(there));
	WANT(SLUICE_ERR_TIMEOUT, sluice_notify(peer, "n", 1, SECOND / 50));
	OK(sluice_abort(t, LIMIT));
	OK(sluice_abort(t, LIMIT));
	WANT(SLUICE_ERR_ABORTED, sluice_test(t));
	WANT(SLUICE_ERR_ABORTED, sluice_wait(t, LIMIT));
	OK(sluice_transfer_close(t));

	char buffer[8];
	struct sluice_notification note = {.size = sizeof note};
	WANT(SLUICE_PENDING, sluice_receive(a.engine, &note, buffer, sizeof buffer, 1000));

	t = stuck(&a, peer, there);
	OK(sluice_close(a.engine));
	WANT(SLUICE_ERR_HANDLE, sluice_test(t));
	OK(sluice_memory_close(a.memory));
	close_end(&b);
	puts("ok");
	return 0;
}
