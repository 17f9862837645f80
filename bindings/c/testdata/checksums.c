// SPDX-License-Identifier: Apache-2.0
// Bytes that both sides compare: they agree, they differ, and where that cannot be asked.
#include <unistd.h>

#include "check.h"

static void agree(struct end *a, struct end *b, sluice_peer peer, sluice_remote there, uint32_t op)
{
	for (size_t i = 0; i < 1 << 20; i++)
		a->bytes[i] = (unsigned char)(i * 7 + op), b->bytes[i] = (unsigned char)(i * 11);
	sluice_transfer t = new_transfer(peer, op);
	OK(sluice_transfer_checksum(t));
	add_one(t, a->region, there, 5, 70001, 100000);
	add_one(t, a->region, there, 300000, 0, 64);
	for (int i = 0; i < 3; i++) {
		OK(sluice_post(t));
		OK(sluice_wait(t, LIMIT));
		TRUE(!memcmp(a->bytes + 5, b->bytes + 70001, 100000) &&
		     !memcmp(a->bytes + 300000, b->bytes, 64));
	}
	OK(sluice_transfer_close(t));
}

/* Two ranges over each other: whichever came first is not what it was any more. */
static void differ(struct end *a, struct end *b, sluice_peer peer, sluice_remote there)
{
	memset(a->bytes, 'x', 4096);
	memset(a->bytes + 8192, 'y', 4096);
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, a->region, there, 0, 0, 4096);
	add_one(t, a->region, there, 8192, 2048, 4096);
	OK(sluice_transfer_checksum(t));
	OK(sluice_transfer_message(t, "never", 5));
	OK(sluice_post(t));
	WANT(SLUICE_ERR_CORRUPT, sluice_wait(t, LIMIT));
	TEXT("data");
	char buffer[16];
	struct sluice_notification note = {.size = sizeof note};
	WANT(SLUICE_PENDING, sluice_receive(b->engine, &note, buffer, sizeof buffer, 0));

	OK(sluice_reset(t)); // compares no more
	add_one(t, a->region, there, 0, 0, 4096);
	add_one(t, a->region, there, 8192, 2048, 4096);
	OK(sluice_transfer_message(t, "now", 3));
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	OK(sluice_receive(b->engine, &note, buffer, sizeof buffer, LIMIT));
	TRUE(note.length == 3 && !memcmp(buffer, "now", 3));
	OK(sluice_transfer_close(t));
	WANT(SLUICE_ERR_HANDLE, sluice_transfer_checksum(t));
}

/* What the other side says of itself. */
static void about(struct end *a, sluice_peer peer, sluice_remote there)
{
	char text[4096];
	size_t needs, length;
	WANT(SLUICE_ERR_ARGUMENT, sluice_peer_about(peer, NULL, 1, &needs));
	WANT(SLUICE_ERR_SPACE, sluice_peer_about(peer, text, 1, &needs));
	OK(sluice_peer_about(peer, text, sizeof text, &length));
	TRUE(needs == length && strlen(text) + 1 == length);
	TRUE(strstr(text, "\"name\":\"b\"") && strstr(text, "\"same_host\":true") &&
	     !strstr(text, "\"message_max\":0,"));
	TRUE(
	    strstr(text,
		   "{\"name\":\"data\",\"kind\":\"dram\",\"length\":1048576,\"read_only\":false}"));
	WANT(SLUICE_ERR_HANDLE, sluice_peer_about(there, text, sizeof text, &length));
	sluice_peer self;
	OK(sluice_self(a->engine, &self));
	OK(sluice_peer_about(self, text, sizeof text, &length));
	TRUE(strstr(text, "\"name\":\"a\"") && strstr(text, "\"name\":\"data\""));
}

int main(void)
{
	struct end a = open_end("a", "mem", 1 << 20), b = open_end("b", "mem", 1 << 20);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	about(&a, peer, there);
	agree(&a, &b, peer, there, SLUICE_WRITE);
	agree(&a, &b, peer, there, SLUICE_READ);
	differ(&a, &b, peer, there);
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
