// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// imported is a peer's memory that we hold a token of.
type imported struct {
	key   uint32 // at the owner
	epoch uint64
	grant
	self   *memory    // the owner is this backend: no mapping is needed
	arena  *peerArena // nil: foreign, or self
	token  []byte
	refs   atomic.Int32 // one for the key, one for each run of a queued job
	broken atomic.Pointer[fetchError]
}

// Import implements driver.Peer. The first import of an arena, and the first
// after its pages moved, asks the owner for descriptors; others make no system call.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.exit()
	t, err := decodeToken(tok, &p.owner.id)
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	g, err := t.open(&p.table)
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	if g.size == 0 || g.off+g.size < g.off {
		return 0, 0, fmt.Errorf("import memory: %d bytes at %d: %w", g.size, g.off,
			driver.ErrCorrupt)
	}
	m := &imported{key: t.key, epoch: t.epoch, grant: g, token: append([]byte(nil), tok...)}
	m.refs.Store(1)
	if err := p.reach(m); err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	key, err = p.addImport(m)
	if err != nil {
		p.detach(m)
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	return key, g.size, nil
}

// reach finds the way to a memory.
func (p *peer) reach(m *imported) error {
	switch {
	case p.self:
		m.self = p.b.memory(m.key)
		if m.self == nil {
			return driver.ErrRevoked
		}
		return nil
	case m.flags&flagForeign != 0:
		return probe(p.pid, m.base)
	}
	return p.attach(m)
}

func (p *peer) addImport(m *imported) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.freeKeys) == 0 {
		if err := p.growImports(); err != nil {
			return 0, err
		}
	}
	n := len(p.freeKeys) - 1
	key := p.freeKeys[n]
	p.freeKeys = p.freeKeys[:n]
	(*p.imports.Load())[key].Store(m)
	return key, nil
}

// growImports doubles the list. Readers keep the old one, whose entries are the
// same: nothing is removed from a list that was replaced but by Drop, under mu.
func (p *peer) growImports() error {
	old := *p.imports.Load()
	size := max(64, 2*len(old))
	if len(old) >= p.b.cfg.KeysMax {
		return fmt.Errorf("%d imports, raise Config.KeysMax: %w", len(old), driver.ErrFull)
	}
	list := make([]atomic.Pointer[imported], size)
	for i := range old {
		list[i].Store(old[i].Load())
	}
	for key := size - 1; key >= len(old); key-- {
		p.freeKeys = append(p.freeKeys, uint32(key))
	}
	p.imports.Store(&list)
	return nil
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
