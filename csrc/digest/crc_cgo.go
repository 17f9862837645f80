// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package digest

/*
#cgo noescape sl_crc
#cgo nocallback sl_crc
#include "crc.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// crcWays returns the implementations in C that this processor has the instructions for.
func crcWays() (list []crcWay) {
	for _, w := range []C.int{C.SL_CRC_VECTOR256, C.SL_CRC_VECTOR512} {
		if C.sl_crc_has(w) != 0 {
			list = append(list, func(sum uint32, p []byte) uint32 {
				if C.sl_crc(w, (*C.uint32_t)(unsafe.Pointer(&sum)),
					(*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(p))),
					C.uint64_t(len(p))) != 0 {
					hostmem.RaiseFault()
				}
				return sum
			})
		}
	}
	return list
}
