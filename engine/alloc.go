// SPDX-License-Identifier: Apache-2.0

package engine

import "github.com/sluicehq/sluice/internal/hostmem"

// AllocOptions say which memory. The zero value is useful.
type AllocOptions struct {
	Purpose  string // counted by MemoryInUse under this name
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
