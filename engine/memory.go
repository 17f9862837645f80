// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Memory is host memory outside the Go heap for regions, which other processes of this host can
// map. All methods may be called from any goroutine.
type Memory struct{ of *hostmem.Buffer }

// Bytes returns the memory, nil after Close. It must not be used after Close.
func (m *Memory) Bytes() []byte { return m.of.Segment().Mem }

// Segment returns what Engine.Register takes.
func (m *Memory) Segment() driver.Segment { return m.of.Segment() }

// Close gives the memory back. Close the regions on it first, or their engine. It
// is idempotent.
func (m *Memory) Close() error { return m.of.Close() }

// HostSegment makes a segment of memory that the program has from elsewhere. It
// must stay mapped and must not move, which rules out a slice that the Go heap
// may reclaim. Peers of this host then reach it by process_vm_readv, several times
// slower for small pieces than memory of Alloc.
func HostSegment(b []byte) driver.Segment {
	return driver.Segment{Kind: driver.DRAM, Mem: b, Len: uint64(len(b))}
}

// AllocOptions say which memory. The zero value is useful.
type AllocOptions struct {
	Purpose  string // what it is for, in errors of tests that look for leaks
	Node     int    // NUMA node plus one; 0: any
	NoHuge   bool   // ordinary pages only
	Populate bool   // find all pages now, huge ones where there are: no page fault later
}

// Alloc returns n zeroed bytes of host memory at an address that is a multiple of 2 MiB, in
// reserved huge pages where there are some, in transparent ones otherwise. It suits every backend:
// peers of this host map it.
func Alloc(n uint64, o AllocOptions) (*Memory, error) {
	huge := hostmem.HugeAuto
	if o.NoHuge {
		huge = hostmem.HugeNone
	}
	b, err := hostmem.Alloc(n, hostmem.Options{Purpose: o.Purpose, Node: o.Node, Huge: huge,
		Populate: o.Populate})
	if err != nil {
		return nil, &OpError{Op: "allocate", Err: err}
	}
	return &Memory{of: b}, nil
}

// Alloc is the package function, or ErrClosed once the engine is closed. The memory outlives the
// engine: close it after its regions, before the engine's Close or after it.
func (e *Engine) Alloc(n uint64, o AllocOptions) (*Memory, error) {
	e.mu.Lock()
	closed := e.closed
	e.mu.Unlock()
	if closed {
		return nil, &OpError{Op: "allocate", Err: ErrClosed}
	}
	return Alloc(n, o)
}
