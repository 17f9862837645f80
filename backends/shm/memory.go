// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// memory is one registration.
type memory struct {
	b        *Backend
	key      uint32
	bytes    []byte
	secret   [16]byte
	arena    *arena // nil: foreign
	release  func() // what Holder.Hold returned; nil: not held
	off      uint64 // in the arena
	only     driver.Ranges
	readOnly bool

	revoked    bool                // guarded by Backend.mu
	revokeLock session.ContextLock // held by Revoke, and by Backend.Close while it looks for proofs
	renewed    uint64              // guarded by revokeLock: bytes that have fresh pages
	gone       bool                // guarded by revokeLock: the key is another memory's
	closeErr   error               // guarded by revokeLock: what Backend.Close could not prove
}

// Register implements driver.Backend. A range of known shared memory costs a
// map look-up and a digest.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v memory: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return nil, fmt.Errorf("register memory: %w", driver.ErrClosed)
	}
	n := len(b.freeKeys)
	if n == 0 {
		return nil, fmt.Errorf("register memory: all %d keys are taken, raise Config.KeysMax: %w",
			b.cfg.KeysMax, driver.ErrFull)
	}
	m := &memory{b: b, key: b.freeKeys[n-1], bytes: seg.Mem, secret: seg.Secret,
		off: seg.SharedOff, only: seg.Only, readOnly: seg.ReadOnly,
		revokeLock: session.NewContextLock()}
	if err := b.place(m, &seg); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	b.freeKeys = b.freeKeys[:n-1]
	g := m.grant()
	b.table.publish(m.key, tagOf(&m.secret, m.key, &g), g)
	b.memories[m.key].Store(m)
	return m, nil
}

// place finds the arena of a segment.
func (b *Backend) place(m *memory, seg *driver.Segment) error {
	if seg.Shared == nil {
		return nil
	}
	a, err := b.arenaOf(seg.Shared)
	if err != nil {
		return err
	}
	if a == nil { // peers write there by system calls, and see no pages move
		return m.hold(seg.Shared)
	}
	if seg.SharedOff > a.size || seg.Len > a.size-seg.SharedOff {
		b.releaseArena(a)
		return fmt.Errorf("[%d, +%d) of %d shared bytes: %w",
			seg.SharedOff, seg.Len, a.size, driver.ErrBounds)
	}
	m.arena = a
	return nil
}

func (m *memory) hold(s driver.Shared) (err error) {
	if h, ok := s.(driver.Holder); ok {
		m.release, err = h.Hold()
	}
	return err
}

func (m *memory) grant() grant {
	g := grant{off: m.off, size: uint64(len(m.bytes))}
	if m.readOnly {
		g.flags |= flagReadOnly
	}
	if m.arena != nil {
		g.arena = m.arena.index
	} else {
		g.flags |= flagForeign
		g.base = addressOf(m.bytes)
	}
	return g
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if m.revoked {
		return dst, driver.ErrClosed
	}
	t := session.Token{Secret: m.secret, Key: m.key, Epoch: m.b.table.epoch(m.key).Load(),
		Size: uint64(len(m.bytes))}
	return t.Append(dst, &m.b.address.id), nil
}

// memory returns the registration of a key, nil without one.
func (b *Backend) memory(key uint32) *memory {
	if key >= uint32(len(b.memories)) {
		return nil
	}
	return b.memories[key].Load()
}

// arena is one Shared, however many ranges of it are registered. Its generation, in the
// table, moves on before pages of it do, also where another user of the Shared renews
// them: a peer that looks at it after its copy does that copy again, so that no write which
// still hit the old pages counts as done.
type arena struct {
	index  uint32
	shared driver.Shared
	size   uint64
	refs   int    // Backend.mu
	stop   func() // no renewal moves the generation on any more
}

// arenaOf returns the arena of a Shared with one more reference; nil: its owner lends nothing.
// Preconditions: Backend.mu is held.
func (b *Backend) arenaOf(s driver.Shared) (*arena, error) {
	if !reflect.TypeOf(s).Comparable() {
		return nil, fmt.Errorf("shared memory of type %T cannot be told apart: use a pointer: %w",
			s, driver.ErrNotSupported)
	}
	if a := b.arenas[s]; a != nil {
		a.refs++
		return a, nil
	}
	size, err := sharedSize(s)
	if errors.Is(err, driver.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	n := len(b.freeArenas)
	a := &arena{index: b.freeArenas[n-1], shared: s, size: size, refs: 1}
	generation := b.table.generation(a.index)
	a.stop = s.OnRenew(func() func() bool {
		generation.Add(1) // pairs with the announcement in move, before it takes the generation
		return b.oldWriters()
	})
	b.freeArenas = b.freeArenas[:n-1]
	b.arenas[s] = a
	return a, nil
}

func sharedSize(s driver.Shared) (size uint64, err error) {
	err = s.Lend(func(extents []driver.Extent) error {
		for _, e := range extents {
			if e.Off != size || e.FDOff%pageBytes != 0 || e.Off%pageBytes != 0 {
				return fmt.Errorf("extent at %d has a gap before it or is not page-aligned: %w",
					e.Off, driver.ErrBounds)
			}
			size += e.Len
		}
		return nil
	})
	return size, err
}

// releaseArena gives one reference back. The generation moves on, so that what a
// peer still has mapped is never taken for the next arena of this index.
// Preconditions: Backend.mu is held.
func (b *Backend) releaseArena(a *arena) {
	a.refs--
	if a.refs > 0 {
		return
	}
	a.stop()
	b.table.generation(a.index).Add(1)
	delete(b.arenas, a.shared)
	b.freeArenas = append(b.freeArenas, a.index)
}

// enter keeps the pages where they are during a copy of our own into this memory; leave
// ends that.
func (m *memory) enter() {
	if m.arena != nil {
		m.arena.shared.Enter()
	}
}

func (m *memory) leave() {
	if m.arena != nil {
		m.arena.shared.Leave()
	}
}
