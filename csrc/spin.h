/* SPDX-License-Identifier: Apache-2.0 */
/* Busy waiting. */
#ifndef SLUICE_SPIN_H
#define SLUICE_SPIN_H

/* Called between two attempts: saves power, and helps the other hardware thread of the core. */
static inline void sl_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

#endif
