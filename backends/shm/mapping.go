// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// peerArena is an arena of the peer as we see it.
type peerArena struct {
	index   uint32
	imports int // peer.mu
	mapping atomic.Pointer[mapping]
	fetches bool // peer.mu: a parked job has asked for fresh pages
}

// mapping is one generation of an arena, mapped. It is unmapped when the arena
// has let go of it and no copy is inside.
type mapping struct {
	b          *Backend
	mem, whole []byte
	extents    int
	generation uint64
	refs       atomic.Int32 // one of the arena, one of each copy inside
}

// acquire returns the mapping for one copy, nil without one.
func (a *peerArena) acquire() *mapping {
	for {
		m := a.mapping.Load()
		if m == nil {
			return nil
		}
		if n := m.refs.Load(); n > 0 && m.refs.CompareAndSwap(n, n+1) {
			return m
		}
	}
}

func (m *mapping) release() {
	if m.refs.Add(-1) == 0 {
		_ = unmapAddresses(m.whole) // our own reservation, whole: cannot fail
		m.b.mapped.give(uint64(len(m.mem)), m.extents)
	}
}

// What all mappings of a backend may take: a process has 128 TiB of addresses, and 65,530 mappings
// by vm.max_map_count. The rest is the program's, whatever its peers say that they share.
const (
	mappedBytesMax   = 1 << 45
	mappedExtentsMax = 32 << 10
)

// budget counts what is mapped.
type budget struct {
	mu      sync.Mutex
	bytes   uint64
	extents int
}

func (u *budget) take(bytes uint64, extents int) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if bytes > mappedBytesMax-u.bytes || extents > mappedExtentsMax-u.extents {
		return fmt.Errorf("peers share %d bytes in %d mappings, and %d in %d more are too many: "+
			"close peers, or share less: %w", u.bytes, u.extents, bytes, extents, driver.ErrFull)
	}
	u.bytes, u.extents = u.bytes+bytes, u.extents+extents
	return nil
}

func (u *budget) give(bytes uint64, extents int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.bytes, u.extents = u.bytes-bytes, u.extents-extents
}

// retire puts another mapping in place of the present one.
func (a *peerArena) retire(next *mapping) {
	if old := a.mapping.Swap(next); old != nil {
		old.release()
	}
}

// mapExtents maps an arena as the owner described it.
func (b *Backend) mapExtents(f *fetch) (*mapping, error) {
	if err := b.mapped.take(f.size, len(f.extents)); err != nil {
		return nil, err
	}
	mem, whole, err := reserveAddresses(f.size)
	if err != nil {
		b.mapped.give(f.size, len(f.extents))
		return nil, fmt.Errorf("reserve %d bytes of addresses: %w", f.size, err)
	}
	m := &mapping{b: b, mem: mem, whole: whole, extents: len(f.extents), generation: f.generation}
	m.refs.Store(1)
	var at uint64
	for _, e := range f.extents {
		if err := placeExtent(mem, e, f.fds, &at); err != nil {
			m.release()
			return nil, fmt.Errorf("map peer memory: %w", err)
		}
	}
	if at < f.size {
		m.release()
		return nil, fmt.Errorf("map peer memory: %d of %d bytes: %w", at, f.size, driver.ErrCorrupt)
	}
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // only a wish
	return m, nil
}

// placeExtent checks one extent, whose FD is an index, and maps it.
func placeExtent(mem []byte, e driver.Extent, fds []int, at *uint64) error {
	size := uint64(len(mem))
	if e.Off != *at || e.Off%pageBytes != 0 || e.FDOff%pageBytes != 0 || e.FD >= len(fds) ||
		e.Len == 0 || e.Off >= size || e.FDOff+e.Len < e.FDOff {
		return fmt.Errorf("extent at %d: %w", e.Off, driver.ErrCorrupt)
	}
	n := min(e.Len, size-e.Off)
	if err := hostmem.CheckSealed(fds[e.FD], e.FDOff+n); err != nil {
		return err
	}
	if err := placeShared(mem[e.Off:e.Off+n], fds[e.FD], e.FDOff); err != nil {
		return err
	}
	*at = e.Off + n
	return nil
}

// attach finds or makes the mapping that a memory lies in.
func (p *peer) attach(m *imported) error {
	p.mu.Lock()
	a := p.arenas[m.grant.arena]
	if a == nil {
		a = &peerArena{index: m.grant.arena}
		p.arenas[a.index] = a
	}
	a.imports++
	m.arena = a
	p.mu.Unlock()
	if p.current(m) {
		return nil
	}
	if err := p.refresh(m); err != nil {
		p.detach(m)
		return err
	}
	return nil
}

// current reports whether the arena's pages of today are mapped.
func (p *peer) current(m *imported) bool {
	have := m.arena.acquire()
	if have == nil {
		return false
	}
	defer have.release()
	return have.generation == p.table.generation(m.arena.index).Load() &&
		m.off+m.size <= uint64(len(have.mem))
}

// detach gives an arena back when its last memory goes.
func (p *peer) detach(m *imported) {
	if m.arena == nil {
		return
	}
	p.mu.Lock()
	m.arena.imports--
	if m.arena.imports == 0 {
		delete(p.arenas, m.arena.index)
		m.arena.retire(nil)
	}
	p.mu.Unlock()
}
