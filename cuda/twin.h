/* SPDX-License-Identifier: Apache-2.0 */
/* The twin of the kernels on the CPU. It keeps no state, allocates nothing, never calls back. */
#ifndef SLUICE_TWIN_H
#define SLUICE_TWIN_H

#include "gather.h"

/*
 * Moves entries [first, first + n) of m and adds to the tally. The addresses within m are
 * not looked at: they come beside it. dst and src of a part that m does not have are NULL.
 */
void sl_twin_move(const struct sl_move *m, sl_u64 first, sl_u64 n, unsigned char *dst0,
		  const unsigned char *src0, unsigned char *dst1, const unsigned char *src1,
		  const unsigned char *dst_index, const unsigned char *src_index,
		  struct sl_tally *tally);

#endif
