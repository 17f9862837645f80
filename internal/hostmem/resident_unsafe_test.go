// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// resident counts the pages that are there; mem begins at one.
func resident(t testing.TB, mem []byte) (n int) {
	t.Helper()
	there := make([]byte, roundUp(uint64(len(mem)), basePage)/basePage)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(mem))),
		uintptr(len(mem)),
		uintptr(unsafe.Pointer(unsafe.SliceData(there)))); errno != 0 {
		t.Fatal(errno)
	}
	for _, b := range there {
		n += int(b & 1)
	}
	return n
}
