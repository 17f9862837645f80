// SPDX-License-Identifier: Apache-2.0
// Descriptors of completions and of messages by epoll, for what the tests of Python cannot time.
#include <sys/epoll.h>

#include "check.h"

enum { LARGE = 256 << 10 };

static int waits(int ep, int milliseconds)
{
	struct epoll_event event;
	int n = epoll_wait(ep, &event, 1, milliseconds);
	TRUE(n >= 0);
	return n ? event.data.fd : -1;
}

static int watch(int fd)
{
	int ep = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
	TRUE(ep >= 0 && !epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
	return ep;
}

int main(void)
{
	struct end a = open_end("a", "mem", 1 << 20), b = open_end("b", "mem", 1 << 20);
	sluice_remote there;
	sluice_peer peer = connect_ends(&a, &b, &there);
	int fd, again;
	OK(sluice_completion_fd(a.engine, &fd));
	OK(sluice_completion_fd(a.engine, &again));
	TRUE(fd == again);
	int ep = watch(fd);
	TRUE(waits(ep, 0) < 0);

	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	add_one(t, a.region, there, 0, 0, LARGE);
	OK(sluice_transfer_watch(t, 7));
	size_t n;
	struct sluice_completion one;
	for (int round = 0; round < 3; round++) {
		OK(sluice_post(t));
		TRUE(waits(ep, 60000) == fd);
		OK(sluice_completions(a.engine, &one, 1, &n));
		TRUE(n == 1 && one.transfer == t && one.word == 7 && one.status == SLUICE_OK);
	}

	// Nothing is left, and a descriptor that is readable for nothing is so once.
	OK(sluice_completions(a.engine, &one, 1, &n));
	TRUE(n == 0 && waits(ep, 50) < 0);
	// One that is closed before it was told of is not told of.
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	OK(sluice_transfer_close(t));
	OK(sluice_completions(a.engine, &one, 1, &n));
	TRUE(n == 0);

	// The second of two is in the library when the program asks for a descriptor.
	int notes, letter;
	struct sluice_notification kept = {.size = sizeof kept};
	for (int i = 0; i < 2; i++)
		OK(sluice_notify(peer, &i, sizeof i, LIMIT));
	OK(sluice_receive(b.engine, &kept, &letter, sizeof letter, LIMIT));
	OK(sluice_notification_fd(b.engine, &notes));
	ep = watch(notes);
	TRUE(waits(ep, 60000) == notes);
	OK(sluice_receive(b.engine, &kept, &letter, sizeof letter, 0));
	TRUE(letter == 1);
	TRUE(waits(ep, 0) < 0);
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
