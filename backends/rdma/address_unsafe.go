// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// addressOf returns where a slice starts, as the NICs know it. What it is used for lies
// outside the Go heap, where nothing moves.
func addressOf(mem []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// Flags of get_mempolicy: tell the node of a page.
const (
	mpolNode    = 1
	mpolAddress = 2
)

// nodeOf returns the NUMA node of the first page; false: not known.
func nodeOf(mem []byte) (int, bool) {
	var node int32
	_, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&node)), 0, 0,
		uintptr(unsafe.Pointer(unsafe.SliceData(mem))), mpolNode|mpolAddress, 0)
	return int(node), errno == 0
}
