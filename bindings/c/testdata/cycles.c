// SPDX-License-Identifier: Apache-2.0
// Engines that are opened, used and closed again and again leave no descriptor behind, and
// give their handles back.
#include <dirent.h>
#include <unistd.h>

#include "check.h"

static int descriptors(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;
	TRUE(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static void cycle(const char *backend)
{
	struct end a = open_end("a", backend, 1 << 16), b = open_end("b", backend, 1 << 16);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	int fd;
	OK(sluice_completion_fd(a.engine, &fd));
	OK(sluice_notification_fd(b.engine, &fd));
	sluice_listener listener;
	char bound[64];
	WANT(SLUICE_ERR_SPACE, sluice_serve(b.engine, "tcp", "127.0.0.1:0", bound, 3, &listener));
	OK(sluice_serve(b.engine, "tcp", "127.0.0.1:0", bound, sizeof bound, &listener));
	sluice_peer dialled;
	OK(sluice_dial(a.engine, "tcp", bound, LIMIT, &dialled)); // it is not accepted
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	OK(sluice_transfer_watch(t, 1));
	add_one(t, a.region, there, 0, 0, 1 << 16);
	OK(sluice_transfer_message(t, "m", 1));
	OK(sluice_post_and_wait(t, LIMIT));
	sluice_lease lease;
	OK(sluice_lease_grant(b.region, 0, 4096, NULL, &lease));
	close_end(&a);
	close_end(&b);
	WANT(SLUICE_ERR_HANDLE, sluice_lease_revoke(lease, 0));
	WANT(SLUICE_ERR_HANDLE, sluice_listener_close(listener));
}

int main(void)
{
	for (int i = 0; i < 3; i++)
		cycle("mem"), cycle("shm");
	int before = descriptors();
	for (int i = 0; i < 20; i++)
		cycle("mem"), cycle("shm");
	for (int i = 0; i < 5000 && descriptors() > before; i++)
		usleep(1000); // a socket that the kernel still closes is no leak
	TRUE(descriptors() <= before);
	puts("ok");
	return 0;
}
