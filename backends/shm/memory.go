// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"
	"sync"

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
	fresh    freshness

	ending sync.Mutex // held by Close, and by the backend's until it is decided
	late   error      // ending: what Backend.Close could not prove
	closed bool       // Backend.mu: no token is given out any more
	gone   bool       // Backend.mu: nothing is left to close
	given  uint64     // Backend.mu: the epoch after that of the newest token; 0: none was given out
	proved uint64     // Backend.mu: nothing of an epoch before this one lands any more
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
		off: seg.SharedOff, only: seg.Only, readOnly: seg.ReadOnly}
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
	if m.closed {
		return dst, driver.ErrClosed
	}
	t := token{secret: m.secret, key: m.key, epoch: m.b.table.epoch(m.key).Load()}
	m.given = max(m.given, t.epoch+1)
	return t.append(dst, &m.b.address.id), nil
}

// endEpoch begins the next one, which has a secret of its own: a holder of a token of the one
// before cannot make one for it.
func (m *memory) endEpoch() (epoch uint64, known bool) {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if m.b.memory(m.key) != m { // closed meanwhile: the key may be another's
		return 0, false
	}
	// pairs with the announcement in move, before it looks at the epoch
	epoch = m.b.table.epoch(m.key).Add(1)
	m.secret = session.NewSecret()
	g := m.grant()
	setTag(m.b.table.slot(m.key), tagOf(&m.secret, m.key, &g))
	return epoch, true
}

// Close implements driver.Memory. It first keeps out the peers that have a token of an epoch after
// the last proof. After an error it may be called again, and then looks for the proof again; what
// Backend.Close could not prove stays an error.
func (m *memory) Close() error {
	m.ending.Lock()
	defer m.ending.Unlock()
	b := m.b
	b.fences.RLock()
	defer b.fences.RUnlock()
	b.mu.Lock()
	m.closed = true
	known := !m.gone && m.given > m.proved
	b.mu.Unlock()
	if known {
		if err := b.fence(&patience{context.Background(), 2 * b.cfg.Grace}, m); err != nil {
			return fmt.Errorf("close memory: %w", err)
		}
	}
	m.end()
	return m.late
}

// end makes the memory unknown, and its epoch over.
func (m *memory) end() {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if m.gone {
		return
	}
	m.closed, m.gone = true, true
	m.b.table.retract(m.key)
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
