// SPDX-License-Identifier: Apache-2.0
// Two processes over shm: one serves and is written to, the other dials. Each was started
// by exec, since what has loaded the library cannot fork.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static int target(const char *address)
{
	struct end e = open_end("target", "shm", 1 << 20);
	sluice_listener listener;
	char bound[256];
	OK(sluice_serve(e.engine, "unix", address, bound, sizeof bound, &listener));
	TRUE(!strcmp(bound, address));
	sluice_peer peer;
	WANT(SLUICE_PENDING, sluice_accept(e.engine, 0, &peer));
	puts("serving");
	fflush(stdout);
	OK(sluice_accept(e.engine, LIMIT, &peer));

	char message[64];
	struct sluice_notification note = {.size = sizeof note};
	OK(sluice_receive(e.engine, &note, message, sizeof message, LIMIT));
	TRUE(note.length == 3 && !memcmp(message, "all", 3) && note.peer == peer);
	for (size_t i = 0; i < 1 << 20; i++)
		TRUE(e.bytes[i] == (unsigned char)(i * 7));
	OK(sluice_notify(peer, "thanks", 6, LIMIT));
	OK(sluice_receive(e.engine, &note, message, sizeof message, LIMIT));
	TRUE(note.status == SLUICE_ERR_PEER_LOST && note.length == 0);
	int lost = 0;
	for (int i = 0; i < 60000 && !lost; i++, usleep(1000))
		OK(sluice_peer_lost(peer, &lost));
	TRUE(lost);
	OK(sluice_listener_close(listener));
	close_end(&e);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 2)
		return target(argv[2]);
	char address[] = "/tmp/sluice-c-XXXXXX";
	TRUE(mkdtemp(address));
	char socket[64], ready[16];
	snprintf(socket, sizeof socket, "%s/s", address);
	char command[512];
	snprintf(command, sizeof command, "exec '%s' target '%s'", argv[0], socket);
	FILE *child = popen(command, "r");
	TRUE(child && fgets(ready, sizeof ready, child));

	struct end e = open_end("initiator", "shm", 1 << 20);
	sluice_peer peer;
	sluice_remote there;
	OK(sluice_dial(e.engine, "unix", socket, LIMIT, &peer));
	OK(sluice_remote_find(peer, "data", &there));
	for (size_t i = 0; i < 1 << 20; i++)
		e.bytes[i] = (unsigned char)(i * 7);
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, e.region, there, 0, 0, 1 << 20);
	OK(sluice_transfer_message(t, "all", 3));
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	char message[64];
	struct sluice_notification note = {.size = sizeof note};
	OK(sluice_receive(e.engine, &note, message, sizeof message, LIMIT));
	TRUE(note.peer == peer && note.length == 6);
	close_end(&e);
	TRUE(pclose(child) == 0);
	rmdir(address);
	puts("ok");
	return 0;
}
