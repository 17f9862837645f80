// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"io"
	"slices"
	"sort"
	"sync"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// allocation is memory of UCX's own, which near peers can map.
type allocation struct {
	of     *allocations
	store  storage
	from   uint64 // address
	to     uint64
	users  int // registrations that lie in it; allocations.mu
	holds  int // of Hold; allocations.mu
	closed bool

	moving   sync.Mutex // one renew at a time; before allocations.mu
	landings hostmem.Landings
	renewals hostmem.Renewals
}

// allocations finds them by address: a Segment needs no mark, and any part of the
// memory is known for what it is, whatever cut it.
type allocations struct {
	mu   sync.Mutex
	list []*allocation // by address
}

// allocMax is more than a process can map.
const allocMax = 1 << 46

// Alloc implements driver.Backend: near peers map this memory, and reach it
// without a hand of this process. Without transports that share memory there is
// none, and the error is driver.ErrNotSupported.
func (b *Backend) Alloc(n uint64) (driver.Segment, io.Closer, error) {
	if !b.gate.Enter() {
		return driver.Segment{}, nil, fmt.Errorf("allocate memory: %w", driver.ErrClosed)
	}
	defer b.gate.Exit()
	if b.near == nil {
		return driver.Segment{}, nil, fmt.Errorf("allocate memory: Config.Transports %q has none "+
			"that shares memory, add posix: %w",
			b.cfg.Transports, driver.ErrNotSupported)
	}
	if n == 0 || n > allocMax {
		return driver.Segment{}, nil, fmt.Errorf("allocate %d bytes, want 1 to 64 Ti: %w", n,
			driver.ErrBounds)
	}
	store, err := b.near.net.allocate(n)
	if err != nil {
		return driver.Segment{}, nil, fmt.Errorf("allocate %d bytes: %w", n, err)
	}
	mem, a := store.Bytes()[:n:n], b.allocations.add(store)
	return driver.Segment{Kind: driver.DRAM, Len: n, Mem: mem, Shared: a}, a, nil
}

func (t *allocations) add(store storage) *allocation {
	from := addressOf(store.Bytes())
	a := &allocation{of: t, store: store, from: from, to: from + uint64(len(store.Bytes()))}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = slices.Insert(t.list, t.at(a.from), a)
	return a
}

// at returns the index of the first allocation that ends after an address.
func (t *allocations) at(address uint64) int {
	return sort.Search(len(t.list), func(i int) bool { return t.list[i].to > address })
}

// use returns the allocation that a range lies in, with one more user; nil: it
// lies in none.
func (t *allocations) use(mem []byte) *allocation {
	from := addressOf(mem)
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.at(from)
	if i == len(t.list) || from < t.list[i].from || from+uint64(len(mem)) > t.list[i].to ||
		t.list[i].closed {
		return nil
	}
	t.list[i].users++
	return t.list[i]
}

func (t *allocations) unuse(a *allocation) {
	if a == nil {
		return
	}
	t.mu.Lock()
	a.users--
	last := t.last(a)
	t.mu.Unlock()
	if last {
		_ = a.store.Close() // the program has closed it and is told no more
	}
}

// last takes an allocation off the list when it is not needed.
// Preconditions: t.mu is held.
func (t *allocations) last(a *allocation) bool {
	if !a.closed || a.users > 0 {
		return false
	}
	t.list = slices.DeleteFunc(t.list, func(other *allocation) bool { return other == a })
	return true
}

// Close implements io.Closer.
func (a *allocation) Close() error {
	a.of.mu.Lock()
	again := a.closed
	a.closed = true
	last := !again && a.of.last(a)
	a.of.mu.Unlock()
	if !last {
		return nil
	}
	return a.store.Close()
}

// origin is what UCX knows the allocation by; nil for none.
func (a *allocation) origin() *ucp.Allocation {
	if a == nil {
		return nil
	}
	u, _ := a.store.(*ucp.Allocation) // a test's own is none of UCX's
	return u
}
