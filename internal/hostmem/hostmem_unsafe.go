// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Reserve returns n bytes of address space, at a multiple of align, that nothing
// lies under yet. n is a multiple of the page size.
func Reserve(n, align uint64) ([]byte, error) {
	wide := n + align
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(wide), unix.PROT_NONE, unix.MAP_PRIVATE|
		unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserve %d bytes of addresses: %w", wide, os.NewSyscallError("mmap",
			err))
	}
	head := -uint64(uintptr(p)) & (align - 1)
	tail := wide - head - n
	if head > 0 {
		_ = unix.MunmapPtr(p, uintptr(head)) // addresses only: nothing is lost if it fails
	}
	if tail > 0 {
		_ = unix.MunmapPtr(unsafe.Add(p, head+n), uintptr(tail))
	}
	return unsafe.Slice((*byte)(unsafe.Add(p, head)), n), nil
}

// Place maps [off, off+len(window)) of a descriptor over window, whatever lies
// there. The kernel does it under its lock: no access sees a gap.
func Place(window []byte, fd int, off uint64) error {
	return place(window, fd, off, unix.PROT_READ|unix.PROT_WRITE)
}

func place(window []byte, fd int, off uint64, prot int) error {
	_, err := unix.MmapPtr(fd, int64(off), unsafe.Pointer(unsafe.SliceData(window)),
		uintptr(len(window)), prot, unix.MAP_SHARED|unix.MAP_FIXED)
	return os.NewSyscallError("mmap", err)
}

// mapAnywhere maps n bytes of a descriptor.
func mapAnywhere(n uint64, fd int, off uint64) ([]byte, error) {
	p, err := unix.MmapPtr(fd, int64(off), nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, mapError(os.NewSyscallError("mmap", err), n)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

func mapError(err error, n uint64) error {
	if errors.Is(err, unix.ENOMEM) {
		return tooLittle(n, 0)
	}
	return fmt.Errorf("map %d bytes: %w", n, err)
}

// Unmap ends what Reserve, Place and mapAnywhere began.
func Unmap(mem []byte) error {
	err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)))
	return os.NewSyscallError("munmap", err)
}

const (
	mpolBind = 2    // MPOL_BIND of <linux/mempolicy.h>
	nodesMax = 1024 // the largest MAX_NUMNODES a kernel can be built with
)

// bind ties the range to a node as Options.Node names it. The policy belongs to
// the memfd, so it holds for the first touch in any process.
func bind(mem []byte, encoded int) error {
	if encoded == 0 {
		return nil
	}
	node := encoded - 1
	if node < 0 || node >= nodesMax {
		return noNode(node, "no such number")
	}
	var mask [nodesMax / bits.UintSize]uint
	mask[node/bits.UintSize] = 1 << (node % bits.UintSize)
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(unsafe.SliceData(mem))),
		uintptr(len(mem)),
		mpolBind, uintptr(unsafe.Pointer(&mask)), nodesMax+1, 0)
	if errno != 0 {
		return noNode(node, os.NewSyscallError("mbind", errno).Error())
	}
	return nil
}

func noNode(node int, reason string) error {
	return &driver.UnavailableError{
		Backend: "numa",
		Reason:  fmt.Sprintf("bind to node %d: %s", node, reason),
		Fix:     "choose a node of /sys/devices/system/node/has_memory, or any",
	}
}

// SharedWord returns 8 bytes of shared pages as a word that processes change at once; off is a
// multiple of 8.
func SharedWord(mem []byte, off int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}

func address(mem []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(mem))) }
