// SPDX-License-Identifier: Apache-2.0

package hostmem

import "unsafe"

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }
