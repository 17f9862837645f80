// SPDX-License-Identifier: Apache-2.0
// What the other side says of itself.
#include "check.h"

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
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
