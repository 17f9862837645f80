// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// addressOf returns the address of the first byte of mem. The memory must be outside the Go heap,
// so that its address does not change while the NICs use it.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// Flags of get_mempolicy(2) that ask for the NUMA node of one page.
const (
	mpolNode    = 1
	mpolAddress = 2
)

// nodeOf returns the NUMA node of the first page of mem, and false if it is unknown.
func nodeOf(mem []byte) (int, bool) {
	var node int32
	_, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&node)), 0, 0,
		uintptr(unsafe.Pointer(unsafe.SliceData(mem))), mpolNode|mpolAddress, 0)
	return int(node), errno == 0
}
