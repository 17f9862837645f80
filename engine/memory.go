// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// Memory is memory outside the Go heap for regions: host memory that other
// processes of this host can map, or memory that a backend made, which its peers
// reach best. All methods may be called from any goroutine.
type Memory struct {
	of   holder
	from string
}

// holder is what made the memory. Its Segment is empty once it is closed.
type holder interface {
	Segment() driver.Segment
	Close() error
}

// AllocOptions say which memory. The zero value is useful.
type AllocOptions struct {
	Purpose  string // counted by MemoryInUse under this name
	Node     int    // NUMA node plus one; 0: any
	NoHuge   bool   // ordinary pages only
	Populate bool   // find all pages now, huge ones where host memory can: no page fault later

	// Backend, for Engine.Alloc: the name of the backend whose memory it must be.
	// Empty: the first backend decides.
	Backend string
}

// fromHost is what Memory.From says of host memory.
const fromHost = "host"

// Alloc returns n zeroed bytes of host memory at an address that is a multiple of
// 2 MiB, in reserved huge pages where there are some, in transparent ones
// otherwise. It is for every backend and for none; Engine.Alloc knows which suits.
func Alloc(n uint64, o AllocOptions) (*Memory, error) {
	if o.Backend != "" {
		return nil, &OpError{Op: "allocate", Backend: o.Backend, Err: errNoEngine}
	}
	huge := hostmem.HugeAuto
	if o.NoHuge {
		huge = hostmem.HugeNone
	}
	b, err := hostmem.Alloc(n, hostmem.Options{Purpose: o.Purpose, Node: o.Node, Huge: huge,
		Populate: o.Populate})
	if err != nil {
		return nil, &OpError{Op: "allocate", Err: err}
	}
	return &Memory{of: b, from: fromHost}, nil
}

// Bytes returns the memory, nil after Close. It must not be used after Close.
func (m *Memory) Bytes() []byte { return m.of.Segment().Mem }

// Segment returns what Engine.Register takes.
func (m *Memory) Segment() driver.Segment { return m.of.Segment() }

// From says whose memory it is: the name of the backend that made it, or "host".
func (m *Memory) From() string { return m.from }

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

// MemoryInUse returns the bytes of all Memory of this process by purpose, whichever engine
// made it.
func MemoryInUse() map[string]uint64 { return hostmem.InUse() }
