// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
)

// imported is a peer's memory that we hold a token of.
type imported struct {
	key   uint32 // at the owner
	epoch uint64
	grant
	self  *memory    // the owner is this backend: no mapping is needed
	arena *peerArena // nil: foreign, or self
	token []byte
	refs  atomic.Int32 // one for the key, one for each run of a queued job
}

// peerArena is an arena of the peer as we see it.
type peerArena struct {
	index   uint32
	imports int // peer.mu
	mapping atomic.Pointer[mapping]

	refreshing bool // peer.mu: refresh is under way for parked jobs
}

// mapping is one generation of an arena, mapped. It is unmapped when the arena
// has let go of it and no copy is inside.
type mapping struct {
	b          *Backend
	mem        []byte
	extents    int
	generation uint64
	refs       atomic.Int32 // one of the arena, one of each copy inside
}

// What all mappings of peers' memory may take: a process has 128 TiB of addresses, and 65,530
// mappings by vm.max_map_count. The rest is the program's, whatever its peers say that they share.
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

const hugeBytes = 2 << 20 // mappings begin at multiples of it, so that huge pages fit

// Import implements driver.Peer. The first import of an arena, and the first
// after its pages moved, asks the owner for descriptors; others make no system call.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.exit()
	defer func() {
		if err != nil {
			err = fmt.Errorf("import memory: %w", err)
		}
	}()
	t, err := session.DecodeToken(tok, &p.owner.id)
	if err != nil {
		return 0, 0, err
	}
	g, err := p.table.check(&t)
	if err != nil {
		return 0, 0, err
	}
	if g.off+g.size < g.off {
		return 0, 0, fmt.Errorf("%d bytes at %d: %w", g.size, g.off, driver.ErrCorrupt)
	}
	m := &imported{key: t.Key, epoch: t.Epoch, grant: g, token: append([]byte(nil), tok...)}
	m.refs.Store(1)
	switch {
	case p.self:
		if m.self = p.b.memory(m.key); m.self == nil {
			err = driver.ErrRevoked
		}
	case m.flags&flagForeign != 0:
		err = probe(p.pid, m.base)
	default:
		err = p.attach(m)
	}
	if err == nil {
		key, err = p.addImport(m)
	}
	if err != nil {
		p.detach(m)
		return 0, 0, err
	}
	return key, g.size, nil
}

// addImport gives memory a key. Where the list is full another one of twice the size takes its
// place. Readers keep the old one, whose entries are the same: nothing is removed from a list that
// was replaced but by Drop, under mu.
func (p *peer) addImport(m *imported) (key uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.freeKeys) == 0 {
		old := *p.imports.Load()
		if len(old) >= p.b.cfg.KeysMax {
			return 0, fmt.Errorf("%d imports, raise Config.KeysMax: %w", len(old), driver.ErrFull)
		}
		list := make([]atomic.Pointer[imported], max(64, 2*len(old)))
		for i := range old {
			list[i].Store(old[i].Load())
		}
		for key := len(list) - 1; key >= len(old); key-- {
			p.freeKeys = append(p.freeKeys, uint32(key))
		}
		p.imports.Store(&list)
	}
	n := len(p.freeKeys) - 1
	key, p.freeKeys = p.freeKeys[n], p.freeKeys[:n]
	(*p.imports.Load())[key].Store(m)
	return key, nil
}

// imported returns what a key names, nil for nothing.
func (p *peer) imported(key uint32) *imported {
	list := *p.imports.Load()
	if key >= uint32(len(list)) {
		return nil
	}
	return list[key].Load()
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	if p.enter() != nil {
		return
	}
	defer p.exit()
	p.mu.Lock()
	list := *p.imports.Load()
	var m *imported
	if key < uint32(len(list)) {
		m = list[key].Swap(nil)
	}
	if m != nil {
		p.freeKeys = append(p.freeKeys, key)
	}
	p.mu.Unlock()
	p.unuse(m)
}

// use is imported with a reference that outlives Drop.
func (p *peer) use(key uint32) *imported {
	m := p.imported(key)
	for m != nil {
		n := m.refs.Load()
		if n == 0 {
			return nil
		}
		if m.refs.CompareAndSwap(n, n+1) {
			break
		}
	}
	return m
}

func (p *peer) unuse(m *imported) {
	if m != nil && m.refs.Add(-1) == 0 {
		p.detach(m)
	}
}

// attach finds or makes the mapping that a memory lies in. detach undoes it, also after an error.
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
	if have := a.acquire(); have != nil {
		defer have.release()
		if have.generation == p.table.generation(a.index).Load() &&
			m.off+m.size <= uint64(len(have.mem)) {
			return nil
		}
	}
	return p.refresh(m)
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
		m.arena.replace(nil)
	}
	p.mu.Unlock()
}

// replace puts another mapping in place of the present one.
func (a *peerArena) replace(next *mapping) {
	if old := a.mapping.Swap(next); old != nil {
		old.release()
	}
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
		_ = hostmem.Unmap(m.mem) // our own, whole: cannot fail
		m.b.mapped.give(uint64(len(m.mem)), m.extents)
	}
}

// mapExtents maps an arena as the owner described it, which may lie.
func (b *Backend) mapExtents(f *fetch) (_ *mapping, err error) {
	m := &mapping{b: b, extents: len(f.extents), generation: f.generation}
	size := (f.size + pageBytes - 1) &^ (pageBytes - 1)
	if err := b.mapped.take(size, m.extents); err != nil {
		return nil, err
	}
	if m.mem, err = hostmem.Reserve(size, hugeBytes); err != nil {
		b.mapped.give(size, m.extents)
		return nil, err
	}
	m.refs.Store(1)
	var at uint64
	for _, e := range f.extents {
		n := min(e.Len, f.size-min(f.size, e.Off))
		if e.Off != at || e.Off%pageBytes != 0 || e.FDOff%pageBytes != 0 || e.FD >= len(f.fds) ||
			n == 0 || e.FDOff+e.Len < e.FDOff {
			err = fmt.Errorf("extent at %d: %w", e.Off, driver.ErrCorrupt)
		} else if err = hostmem.CheckSealed(f.fds[e.FD], e.FDOff+n); err == nil {
			err = hostmem.Place(m.mem[e.Off:e.Off+n], f.fds[e.FD], e.FDOff)
		}
		if err != nil {
			break
		}
		at = e.Off + n
	}
	if err == nil && at < f.size {
		err = fmt.Errorf("%d of %d bytes: %w", at, f.size, driver.ErrCorrupt)
	}
	if err != nil {
		m.release()
		return nil, fmt.Errorf("map peer memory: %w", err)
	}
	_ = unix.Madvise(m.mem, unix.MADV_HUGEPAGE) // only a wish
	return m, nil
}
