// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// A decay is how a program spoils memory while it is registered.
type decay string

const (
	unmapped  decay = "unmapped"
	protected decay = "protected" // neither to be read nor to be written
	unwritten decay = "read-only"
	cut       decay = "cut" // the file under it
)

var decays = []decay{unmapped, protected, unwritten, cut}

// forbids reports whether spoilt memory cannot be written, or else read.
func (d decay) forbids(write bool) bool { return write || d != unwritten }

// lots are addresses far below those that the kernel gives away: no other mapping of the process
// comes to lie where memory was unmapped.
var lots atomic.Uintptr

const (
	firstLot = 1 << 44
	lotBytes = 1 << 30
)

// decaying makes memory of n bytes, whole pages, of which spoil takes the second half.
func decaying(n uint64, how decay) (*Space, error) {
	fd, err := unix.MemfdCreate("drivertest", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create memory: %w", err)
	}
	at := unsafe.Add(nil, firstLot+lotBytes*lots.Add(1))
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
	bad := mem[n/2:]
	spoil := map[decay]func() error{
		unmapped:  func() error { return unix.MunmapPtr(unsafe.Pointer(&bad[0]), uintptr(n/2)) },
		protected: func() error { return unix.Mprotect(bad, unix.PROT_NONE) },
		unwritten: func() error { return unix.Mprotect(bad, unix.PROT_READ) },
		cut:       func() error { return unix.Ftruncate(fd, int64(n/2)) },
	}
	return &Space{
		Segment: driver.Segment{Kind: driver.DRAM, Len: n, Mem: mem},
		Free: func() error {
			_ = unix.Close(fd)
			return unix.MunmapPtr(at, uintptr(n))
		},
		spoil: spoil[how],
	}, nil
}
