// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"

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
	release  func() // of Holder.Hold; nil: not held
	off      uint64 // in the arena
	only     driver.Ranges
	readOnly bool

	revoked bool         // guarded by Backend.mu
	turn    session.Turn // of Revoke, and of the backend's Close until it is decided
	renewed uint64       // guarded by turn: writers have old pages under the bytes up to here
	gone    bool         // guarded by turn: the key is another memory's
	late    error        // guarded by turn: what Backend.Close could not prove
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
		off: seg.SharedOff, only: seg.Only, readOnly: seg.ReadOnly, turn: session.NewTurn()}
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
	t := token{secret: m.secret, key: m.key, epoch: m.b.table.epoch(m.key).Load()}
	return t.append(dst, &m.b.address.id), nil
}

// Revoke implements driver.Memory. It ends the epoch, so that no copy begins any more, and waits
// until none is announced. A peer that is in the memory for longer than Config.Grace is frozen, and
// is shut out, see shutOut. A copy of this backend's own goroutines has no pages but ours, and is
// always awaited: the goroutine is not frozen, or we were, too.
func (m *memory) Revoke(ctx context.Context) error {
	b := m.b
	b.revokes.RLock() // the table and the peers' pages stay
	defer b.revokes.RUnlock()
	m.endEpoch()
	if err := m.turn.Take(ctx); err != nil {
		return fmt.Errorf("revoke memory: another call looks for the proof: %w", err)
	}
	defer m.turn.Give()
	if m.gone {
		return m.late
	}
	if err := b.keepOut(ctx, m); err != nil {
		return err
	}
	m.forget()
	return nil
}

// endEpoch has all tokens refused from now on.
func (m *memory) endEpoch() {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if !m.revoked {
		m.revoked = true
		m.b.table.retract(m.key)
	}
}

// forget gives back the key and what else the memory has. Preconditions: m.turn is held.
func (m *memory) forget() {
	m.gone = true
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	m.b.memories[m.key].Store(nil)
	m.b.freeKeys = append(m.b.freeKeys, m.key)
	if m.release != nil {
		m.release()
	}
	if m.arena != nil {
		m.b.releaseArena(m.arena)
	}
}

// memory returns the registration of a key, nil without one.
func (b *Backend) memory(key uint32) *memory {
	if key >= uint32(len(b.memories)) {
		return nil
	}
	return b.memories[key].Load()
}
