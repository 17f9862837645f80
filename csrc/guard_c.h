/* SPDX-License-Identifier: Apache-2.0 */
/* The code of guard.h. Several packages compile it, and the linker takes the first. */
#include "guard.h"

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <ucontext.h>

#define SL_ONE __attribute__((weak, visibility("hidden")))

/* Of this thread. The handler reads it in threads that never set it: it must not be allocated. */
SL_ONE __thread struct sl_guard *volatile sl_guarded __attribute__((tls_model("initial-exec")));
SL_ONE struct sigaction sl_guard_before[2]; /* SIGSEGV, SIGBUS */
SL_ONE pthread_once_t sl_guard_once = PTHREAD_ONCE_INIT;

/* A page that the hardware has given up is told by the address of its begin. */
static int guards(const struct sl_guard *g, uintptr_t at)
{
	for (int i = 0; i < 2; i++)
		if ((at | 4095) >= g->range[i].from && at < g->range[i].to)
			return 1;
	return 0;
}

/* As the kernel would without the guard; a handler for one signal alone is taken off here. */
static void pass_on(int number, siginfo_t *info, void *context)
{
	struct sigaction *before = &sl_guard_before[number == SIGBUS], a = *before;

	if (a.sa_flags & SA_RESETHAND)
		*before = (struct sigaction){.sa_handler = SIG_DFL};
	if (a.sa_flags & SA_SIGINFO) {
		a.sa_sigaction(number, info, context);
	} else if (a.sa_handler != SIG_DFL && a.sa_handler != SIG_IGN) {
		a.sa_handler(number);
	} else if (a.sa_handler == SIG_DFL || info->si_code > 0) {
		/* ends the process: the instruction faults again, whatever a program ignores */
		signal(number, SIG_DFL);
		if (info->si_code <= 0)
			raise(number);
	}
}

static void on_fault(int number, siginfo_t *info, void *context)
{
	struct sl_guard *g = sl_guarded;

	if (!g || info->si_code <= 0 || !guards(g, (uintptr_t)info->si_addr)) {
		pass_on(number, info, context);
		return;
	}
	sl_guarded = NULL;
	pthread_sigmask(SIG_SETMASK, &((ucontext_t *)context)->uc_sigmask, NULL);
	longjmp(g->back, 1);
}

/*
 * On the stacks for signals that Go gives its threads, with the mask of the handler before, and
 * for more than one fault. Another thread may install a handler meanwhile.
 */
static void install(int number, struct sigaction *before)
{
	struct sigaction a, last;

	sigaction(number, NULL, &last);
	do {
		*before = a = last;
		a.sa_flags |= SA_SIGINFO | SA_ONSTACK;
		a.sa_flags &= ~SA_RESETHAND;
		a.sa_sigaction = on_fault;
		sigaction(number, &a, &last);
	} while (last.sa_handler != before->sa_handler && last.sa_sigaction != on_fault);
}

static void install_both(void)
{
	install(SIGSEGV, &sl_guard_before[0]);
	install(SIGBUS, &sl_guard_before[1]);
}

SL_ONE void sl_guard_arm(struct sl_guard *g)
{
	pthread_once(&sl_guard_once, install_both);
	sl_guarded = g;
	__asm__ volatile("" : : : "memory");
}

SL_ONE void sl_guard_disarm(void)
{
	__asm__ volatile("" : : : "memory");
	sl_guarded = NULL;
}

SL_ONE int sl_guard_copy(void *to, const void *from, uint64_t len)
{
	struct sl_guard g;

	sl_guard_over(&g, to, len, from, len);
	if (setjmp(g.back))
		return -EFAULT;
	sl_guard_arm(&g);
	memcpy(to, from, len);
	sl_guard_disarm();
	return 0;
}
