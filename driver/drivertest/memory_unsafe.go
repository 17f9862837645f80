// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// The ways in which a program makes memory unusable that it has registered.
const (
	unmapped  = "unmapped"
	protected = "protected" // it can be neither read nor written
	readOnly  = "read-only"
	truncated = "truncated" // the file that it maps is shorter
)

// spoilAddress is far below the addresses that the kernel chooses itself, so that no other mapping
// of the process takes the place of memory that was unmapped.
const spoilAddress, spoilStride = 1 << 44, 1 << 30

var spoilNext atomic.Uintptr

// spoilable makes host memory of n bytes, a whole number of pages. Its spoil makes the second half
// unusable in the way that how names.
func spoilable(n uint64, how string) (*Space, error) {
	fd, err := unix.MemfdCreate("drivertest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create memory: %w", err)
	}
	at := unsafe.Add(nil, spoilAddress+spoilStride*spoilNext.Add(1))
	err = unix.Ftruncate(fd, int64(n))
	if err == nil {
		at, err = unix.MmapPtr(fd, 0, at, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_SHARED|unix.MAP_FIXED_NOREPLACE)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	mem := unsafe.Slice((*byte)(at), n)
	half := mem[n/2:]
	spoil := map[string]func() error{
		unmapped:  func() error { return unix.MunmapPtr(unsafe.Pointer(&half[0]), uintptr(n/2)) },
		protected: func() error { return unix.Mprotect(half, unix.PROT_NONE) },
		readOnly:  func() error { return unix.Mprotect(half, unix.PROT_READ) },
		truncated: func() error { return unix.Ftruncate(fd, int64(n/2)) },
	}[how]
	free := func() error {
		_ = unix.Close(fd)
		return unix.MunmapPtr(at, uintptr(n))
	}
	return &Space{Segment: driver.Segment{Kind: driver.DRAM, Len: n, Mem: mem}, Free: free,
		spoil: spoil}, nil
}
