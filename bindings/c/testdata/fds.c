// SPDX-License-Identifier: Apache-2.0
// Completions and messages by epoll, many transfers by one thread.
#include <sys/epoll.h>

#include "check.h"

enum { MANY = 200, LARGE = 256 << 10 };

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

	sluice_transfer t[MANY];
	for (int i = 0; i < MANY; i++) {
		t[i] = new_transfer(peer, SLUICE_WRITE);
		add_one(t[i], a.region, there, 0, 0, i % 2 ? LARGE : 8);
		OK(sluice_transfer_watch(t[i], (uint64_t)i));
	}
	for (int round = 0; round < 3; round++) {
		int told[MANY] = {0}, left = MANY;
		for (int i = 0; i < MANY; i++)
			OK(sluice_post(t[i]));
		while (left > 0) {
			TRUE(waits(ep, 60000) == fd);
			struct sluice_completion list[16];
			size_t n;
			OK(sluice_completions(a.engine, list, 16, &n));
			for (size_t i = 0; i < n; i++) {
				TRUE(list[i].transfer == t[list[i].word] &&
				     list[i].status == SLUICE_OK);
				TRUE(!told[list[i].word]++);
				OK(sluice_test(list[i].transfer));
				left--;
			}
		}
	}
	// Nothing is left, and a descriptor that is readable for nothing is so once.
	size_t n;
	struct sluice_completion one;
	OK(sluice_completions(a.engine, &one, 1, &n));
	TRUE(n == 0 && waits(ep, 50) < 0);
	// One that is closed before it was told of is not told of.
	OK(sluice_post(t[0]));
	OK(sluice_wait(t[0], LIMIT));
	OK(sluice_transfer_close(t[0]));
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
	for (int i = 0; i < MANY; i++)
		OK(sluice_notify(peer, &i, sizeof i, LIMIT));
	for (int next = 0; next < MANY;) {
		TRUE(waits(ep, 60000) == notes);
		struct sluice_notification note = {.size = sizeof note};
		int got, code;
		while ((code = sluice_receive(b.engine, &note, &got, sizeof got, 0)) == SLUICE_OK)
			TRUE(note.length == sizeof got && got == next++);
		WANT(SLUICE_PENDING, code);
	}
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
