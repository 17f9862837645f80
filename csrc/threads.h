/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SLUICE_THREADS_H
#define SLUICE_THREADS_H

#include <signal.h>

/*
 * The signals that a thread of ours blocks: they are the program's. A fault while its signal is
 * blocked would end the process, whatever handler there is: see guard.h.
 */
static inline void sl_signals_of_others(sigset_t *set)
{
	sigfillset(set);
	sigdelset(set, SIGSEGV);
	sigdelset(set, SIGBUS);
}

#endif
