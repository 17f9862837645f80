// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// resident counts the pages of anonymous memory that are there; mem begins at one.
func resident(t testing.TB, mem []byte) int {
	t.Helper()
	there := make([]byte, (len(mem)+4095)/4096)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(mem))),
		uintptr(len(mem)),
		uintptr(unsafe.Pointer(unsafe.SliceData(there)))); errno != 0 {
		t.Fatal(errno)
	}
	return bytes.Count(there, []byte{1})
}
