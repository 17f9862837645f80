// SPDX-License-Identifier: Apache-2.0

package drivers

import "unsafe"

// addressOf returns where memory outside the Go heap lies, for another process.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
