/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies and sums that outlive memory which is gone: a program has unmapped or protected it, or
 * cut the file under it, and a peer reaches for it. A fault in the named ranges takes the thread
 * back to setjmp, and all others go to the handler that was there before:
 *
 *	sl_guard_over(&g, to, to_len, from, from_len);
 *	if (setjmp(g.back))
 *		return -EFAULT;
 *	sl_guard_arm(&g);
 *	memcpy(to, from, len);
 *	sl_guard_disarm();
 *
 * What is between arm and disarm takes no lock, and keeps nothing but in these ranges. Guards do
 * not nest. CatchFault of internal/hostmem does the same for Go. A package that includes this has
 * guard_c.h in a file of its own.
 */
#ifndef SLUICE_GUARD_H
#define SLUICE_GUARD_H

#include <errno.h>
#include <setjmp.h>
#include <stdint.h>

struct sl_guard {
	jmp_buf back;
	struct {
		uintptr_t from, to;
	} range[2];
};

static inline void sl_guard_over(struct sl_guard *g, const void *a, uint64_t a_len, const void *b,
				 uint64_t b_len)
{
	g->range[0].from = (uintptr_t)a;
	g->range[0].to = (uintptr_t)a + a_len;
	g->range[1].from = (uintptr_t)b;
	g->range[1].to = (uintptr_t)b + b_len;
}

/* The first call of a process installs the handler of SIGSEGV and SIGBUS. */
void sl_guard_arm(struct sl_guard *g);
void sl_guard_disarm(void);

/* memcpy; 0 or -EFAULT. */
int sl_guard_copy(void *to, const void *from, uint64_t len);

#endif
