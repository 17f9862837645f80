/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A guard over handlers that a program had before: argv[1] says which. Faults in the ranges of a
 * guard never reach them, and all others do, as without it.
 */
#define _GNU_SOURCE
#include "../../guard.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char *hole;
static sigjmp_buf back;
static volatile int calls;

#define TRUE(x)                                                                                    \
	do {                                                                                       \
		if (!(x)) {                                                                        \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #x);                             \
			exit(3);                                                                   \
		}                                                                                  \
	} while (0)

static void count(int number)
{
	sigset_t blocked;

	(void)number;
	calls++;
	sigprocmask(SIG_SETMASK, NULL, &blocked);
	TRUE(sigismember(&blocked, SIGUSR1) && !sigismember(&blocked, SIGSEGV));
	siglongjmp(back, 1);
}

static void install(void (*handler)(int), int flags)
{
	struct sigaction a = {.sa_handler = handler, .sa_flags = flags};

	sigaddset(&a.sa_mask, SIGUSR1);
	TRUE(sigaction(SIGSEGV, &a, NULL) == 0);
}

static void guarded(void)
{
	char mine[64];

	for (int i = 0; i < 3; i++)
		TRUE(sl_guard_copy(mine, hole, sizeof mine) == -EFAULT &&
		     sl_guard_copy(hole, mine, sizeof mine) == -EFAULT);
}

static void foreign(void)
{
	if (!sigsetjmp(back, 1))
		*(volatile char *)hole = 1;
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";
	int once = !strcmp(how, "once"), ignored = !strcmp(how, "ignored"),
	    always = !strcmp(how, "always");

	hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	TRUE(hole != MAP_FAILED);
	if (once || always)
		install(count, SA_NODEFER | (once ? SA_RESETHAND : 0));
	else if (ignored)
		install(SIG_IGN, 0);
	guarded();
	if (ignored)
		TRUE(raise(SIGSEGV) == 0);
	guarded();
	if (once || always) {
		foreign();
		guarded();
		TRUE(calls == 1);
	}
	if (always) {
		foreign();
		TRUE(calls == 2);
		guarded();
		return 0;
	}
	TRUE(write(1, "end", 3) == 3);
	foreign();
	return 4;
}
