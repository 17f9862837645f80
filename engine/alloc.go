// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

var errNoEngine = fmt.Errorf("no engine whose backend it could be: use Engine.Alloc, or leave "+
	"AllocOptions.Backend empty: %w", ErrNotSupported)

// Alloc returns n zeroed bytes of the memory that suits the engine's backends: that
// of the first backend in Config if it has memory of its own, host memory like the
// package function's otherwise. With AllocOptions.Backend it is memory of that
// backend or an error. Memory of a backend starts at a page. Its pages and their
// place are the backend's to choose, so a Node or NoHuge that was asked for is an
// error with it, never ignored.
//
// The memory outlives the engine: close it after its regions, before the engine's
// Close or after it.
func (e *Engine) Alloc(n uint64, o AllocOptions) (*Memory, error) {
	l, err := e.allocator(o.Backend)
	if err != nil {
		return nil, &OpError{Op: "allocate", Backend: o.Backend, Err: err}
	}
	named := o.Backend != ""
	o.Backend = ""
	m, err := l.alloc(n, o)
	if errors.Is(err, errNoneOfItsOwn) && !named {
		return Alloc(n, o)
	}
	if err != nil {
		return nil, &OpError{Op: "allocate", Backend: l.caps.Name, Err: err}
	}
	return m, nil
}

// allocator returns the lane whose memory is meant: the first where none is named.
func (e *Engine) allocator(name string) (*lane, error) {
	if e.ended() {
		return nil, ErrClosed
	}
	if name == "" {
		return e.lanes[0], nil
	}
	var names []string
	for _, l := range e.lanes {
		if l.caps.Name != name {
			names = append(names, l.caps.Name)
			continue
		}
		return l, nil
	}
	return nil, fmt.Errorf("this engine has no such backend: it has %s: %w",
		strings.Join(names, ", "), ErrNotSupported)
}

func (e *Engine) ended() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.closed
}

// errNoneOfItsOwn is the answer to a program that names a backend.
var errNoneOfItsOwn = fmt.Errorf("it has no memory of its own, or not as it is configured: leave "+
	"AllocOptions.Backend empty, host memory suits it: %w", ErrNotSupported)

// alloc takes memory from the backend.
func (l *lane) alloc(n uint64, o AllocOptions) (*Memory, error) {
	seg, owner, err := l.b.Alloc(n)
	switch {
	case errors.Is(err, ErrNotSupported):
		return nil, errNoneOfItsOwn
	case err != nil:
		return nil, err
	}
	if err := furnish(seg.Mem, o); err != nil {
		return nil, errors.Join(err, owner.Close())
	}
	return &Memory{from: l.caps.Name, of: &lent{seg: seg, owner: owner,
		uncount: hostmem.Count(o.Purpose, n)}}, nil
}

// furnish does with memory of a backend what the options ask for.
func furnish(mem []byte, o AllocOptions) error {
	if o.Node != 0 || o.NoHuge {
		return fmt.Errorf("AllocOptions.Node and NoHuge are for host memory: leave them out, or "+
			"use the package function Alloc: %w", ErrNotSupported)
	}
	if !o.Populate {
		return nil
	}
	return hostmem.Populate(mem)
}

// lent is memory of a backend.
type lent struct {
	mu      sync.Mutex // guards what follows
	seg     driver.Segment
	owner   io.Closer
	uncount func()
}

func (m *lent) Segment() driver.Segment {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.seg
}

// Close leaves the memory counted where the backend fails to take it back.
func (m *lent) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.owner.Close(); err != nil {
		return &OpError{Op: "give memory back", Err: err}
	}
	m.seg = driver.Segment{Kind: driver.DRAM}
	m.uncount()
	return nil
}
