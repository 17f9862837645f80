// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

/*
#cgo CFLAGS: -O2 -std=c11 -Wall -Wextra
#include <stdint.h>
*/
import "C"

import "github.com/sluicehq/sluice/driver"

// Native says whether there is any C.
const Native = true

func toRemote(op driver.Op) C.int {
	if op == driver.Write {
		return 1
	}
	return 0
}
