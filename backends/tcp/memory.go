// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// memory is one registration.
type memory struct {
	b     *Backend
	key   uint32
	epoch uint64 // the generation of the key
	seg   driver.Segment

	// gate is held for reading by each piece that a peer has land here, or be read from
	// here; never while a goroutine waits for a peer. A piece looks at ticket behind it, so
	// that a goroutine that takes gate once a ticket has changed knows that no piece of before is
	// left.
	gate   sync.RWMutex
	ticket atomic.Uint64 // 64 bits, which a peer learns for the token

	mu      sync.Mutex // a leaf; guards what follows, and changes of ticket
	revoked bool
	proved  bool          // no piece is left, and the key may be another memory's
	landed  chan struct{} // closed once pieces in hand have landed; nil: no goroutine waits
}

// Register implements driver.Backend.
func (b *Backend) Register(seg driver.Segment) (driver.Memory, error) {
	if seg.Kind != driver.DRAM {
		return nil, fmt.Errorf("register %v memory: %w", seg.Kind, driver.ErrNotSupported)
	}
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if !b.entry.Enter() {
		return nil, fmt.Errorf("register memory: %w", driver.ErrClosed)
	}
	defer b.entry.Exit()
	key, epoch, err := b.memories.Take()
	if err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	m := &memory{b: b, key: key, seg: seg, epoch: epoch}
	m.ticket.Store(newTicket())
	b.memories.Put(key, m)
	return m, nil
}

func newTicket() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	return binary.LittleEndian.Uint64(b[:])
}

// Key implements driver.Memory.
func (m *memory) Key() uint32 { return m.key }

// AppendToken implements driver.Memory.
func (m *memory) AppendToken(dst []byte) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.revoked {
		return dst, driver.ErrClosed
	}
	t := session.Token{Secret: m.seg.Secret, Key: m.key, Epoch: m.epoch, Size: m.seg.Len}
	return t.Append(dst, &m.b.address.owner), nil
}

// Revoke implements driver.Memory: the ticket that peers know opens nothing any more, and then it
// waits for the pieces in hand, which are of bounded size. No peer takes part.
func (m *memory) Revoke(ctx context.Context) error {
	m.mu.Lock()
	m.revoked = true
	m.ticket.Store(newTicket()) // no peer learns it
	m.mu.Unlock()
	if err := m.awaitPieces(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.proved {
		m.proved = true
		m.b.memories.Free(m.key)
	}
	return nil
}

// awaitPieces returns once no piece is in hand that looked at an earlier ticket. It begins no
// goroutine unless there is one, and none beside one that waits already: that one clears landed
// while it keeps pieces out, so a Revoke that finds it there has changed the ticket before.
func (m *memory) awaitPieces(ctx context.Context) error {
	if m.gate.TryLock() {
		m.gate.Unlock()
		return nil
	}
	m.mu.Lock()
	landed := m.landed
	if landed == nil {
		landed = make(chan struct{})
		m.landed = landed
		go func() {
			m.gate.Lock()
			m.mu.Lock()
			m.landed = nil
			m.mu.Unlock()
			m.gate.Unlock()
			close(landed)
		}()
	}
	m.mu.Unlock()
	select {
	case <-landed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("revoke key %d: a piece is being copied: %w",
			m.key, driver.ContextError(ctx))
	}
}

// show returns the ticket for a token.
func (b *Backend) show(key uint32, epoch uint64, secret []byte) (m *memory, ticket uint64,
	err error) {
	m = b.memories.At(key)
	if m == nil {
		// The token has passed session.DecodeToken: it is of a memory that is gone.
		return nil, 0, driver.ErrRevoked
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.revoked, epoch < m.epoch:
		return nil, 0, driver.ErrRevoked
	case epoch > m.epoch, subtle.ConstantTimeCompare(m.seg.Secret[:], secret) != 1:
		return nil, 0, driver.ErrBadToken
	}
	return m, m.ticket.Load(), nil
}

// opens reports whether a ticket is that of the memory. Where gate is held, it stays so
// for every Revoke that returns before gate is given back. Tickets are compared in constant time.
func (m *memory) opens(ticket uint64) bool {
	diff := m.ticket.Load() ^ ticket
	return subtle.ConstantTimeEq(int32(diff), 0)&subtle.ConstantTimeEq(int32(diff>>32), 0) == 1
}

// enter begins a piece. It reports false, and leave must not follow, where the ticket opens
// nothing any more.
func (m *memory) enter(ticket uint64) bool {
	m.gate.RLock()
	if !m.opens(ticket) {
		m.gate.RUnlock()
		return false
	}
	return true
}

func (m *memory) leave() { m.gate.RUnlock() }
