/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "../guard_c.h"
