// SPDX-License-Identifier: Apache-2.0

package drivertest

import "unsafe"

// addressOf returns where memory outside the Go heap lies.
func addressOf(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }
