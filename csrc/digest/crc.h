/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SLUICE_CRC_H
#define SLUICE_CRC_H

#include <stdint.h>

enum sl_crc_way { SL_CRC_VECTOR256, SL_CRC_VECTOR512 };

/* Whether this processor has what a way takes. */
int sl_crc_has(int way);

/*
 * CRC-32C of n bytes behind those of which *sum is the CRC. -EFAULT: they are not there, and *sum
 * is as it was. Thread-safe.
 * Preconditions: the processor has what the way takes.
 */
int sl_crc(int way, uint32_t *sum, const uint8_t *at, uint64_t n);

#endif
