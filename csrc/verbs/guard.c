/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
/* Counts changes of what Go's cache does not see: 2. */
#include "../guard_c.h"
