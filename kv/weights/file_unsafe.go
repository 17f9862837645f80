// SPDX-License-Identifier: Apache-2.0

package weights

import "unsafe"

// addressOf is where bytes begin now: those of the Go heap may be elsewhere later.
func addressOf(p []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(p))) }
