// SPDX-License-Identifier: Apache-2.0
// A write with a message, between two engines of one process; a read back; why.
#include "check.h"

#include <time.h>

// take receives without waiting. The engine's own look may hold the message just then.
static void take(sluice_engine engine, struct sluice_notification *note, char *letter)
{
	int code = SLUICE_PENDING;
	for (int i = 0; i < 10000 && code == SLUICE_PENDING; i++) {
		code = sluice_receive(engine, note, letter, 1, 0);
		if (code == SLUICE_PENDING)
			nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
	}
	OK(code);
}

int main(void)
{
	struct end a = open_end("a", "mem", 1 << 20), b = open_end("b", "mem", 1 << 20);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	uint64_t length;
	OK(sluice_remote_length(there, &length));
	TRUE(length == 1 << 20);

	memset(a.bytes, 'x', 1 << 20);
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, a.region, there, 4096, 8192, 1 << 16);
	OK(sluice_transfer_message(t, "done", 4));
	for (int i = 0; i < 3; i++) {
		memset(b.bytes, 0, 1 << 20);
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
		OK(sluice_test(t));
		char message[16];
		struct sluice_notification note = {.size = sizeof note};
		WANT(SLUICE_ERR_SPACE, sluice_receive(b.engine, &note, message, 3, LIMIT));
		TRUE(note.length == 4);
		OK(sluice_receive(b.engine, &note, message, sizeof message, LIMIT));
		TRUE(note.length == 4 && !memcmp(message, "done", 4) && note.status == SLUICE_OK &&
		     !note.peer);
		TRUE(b.bytes[8191] == 0 && b.bytes[8192] == 'x' &&
		     b.bytes[8192 + (1 << 16) - 1] == 'x' && b.bytes[8192 + (1 << 16)] == 0);
	}
	// All that one look finds is told of, and nothing is written behind what a program knows.
	char letter;
	struct sluice_notification note = {.size = sizeof note};
	int told = 0, alone = 0;
	for (int i = 0; i < 20; i++)
		OK(sluice_notify(peer, "a", 1, LIMIT));
	for (int i = 0; i < 20; i++) {
		take(b.engine, &note, &letter);
		told += note.more != 0;
	}
	TRUE(told > 0);
	WANT(SLUICE_PENDING, sluice_receive(b.engine, &note, &letter, 1, 0));
	for (int i = 0; i < 100 && !alone; i++) {
		OK(sluice_notify(peer, "a", 1, LIMIT));
		take(b.engine, &note, &letter);
		alone = !note.more;
	}
	TRUE(alone);
	OK(sluice_notify(peer, "a", 1, LIMIT));
	note.size = offsetof(struct sluice_notification, more), note.more = 7;
	OK(sluice_receive(b.engine, &note, &letter, 1, LIMIT));
	TRUE(note.more == 7);
	OK(sluice_reset(t));
	add_one(t, a.region, there, 0, 0, 8);
	OK(sluice_post(t));
	OK(sluice_wait(t, SLUICE_FOREVER));
	OK(sluice_transfer_close(t));

	memset(a.bytes, 0, 1 << 20);
	t = new_transfer(peer, SLUICE_READ);
	add_one(t, a.region, there, 0, 8192, 4096);
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	TRUE(a.bytes[0] == 'x' && a.bytes[4095] == 'x' && a.bytes[4096] == 0);

	char text[4096];
	size_t n;
	OK(sluice_explain(peer, a.region, there, SLUICE_TEXT, text, sizeof text, &n));
	TRUE(strstr(text, "mem") && n == strlen(text) + 1);
	OK(sluice_explain(peer, a.region, there, SLUICE_JSON, text, sizeof text, &n));
	TRUE(strstr(text, "\"chosen\":\"mem\""));
	WANT(SLUICE_ERR_SPACE, sluice_explain(peer, a.region, there, SLUICE_TEXT, NULL, 0, &n));
	OK(sluice_stats(a.engine, text, sizeof text, &n));
	TRUE(strstr(text, "\"posted\":0") && strstr(text, "\"backend\":\"mem\""));

	sluice_peer self;
	OK(sluice_self(a.engine, &self));
	OK(sluice_notify(peer, "bye", 3, LIMIT));
	WANT(SLUICE_ERR_BUSY, sluice_memory_close(a.memory));
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
