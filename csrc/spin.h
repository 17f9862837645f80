/* SPDX-License-Identifier: Apache-2.0 */
/* Looking again and again. */
#ifndef SLUICE_SPIN_H
#define SLUICE_SPIN_H

/* Between two looks: spares the other thread of this core, and power. */
static inline void sl_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

#endif
