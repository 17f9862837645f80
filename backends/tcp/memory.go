// SPDX-License-Identifier: Apache-2.0

package tcp

import (
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

	// gate is held for reading while a piece lands here for a peer, or is read for one, and never
	// while a goroutine waits for a peer. The ticket of the piece is checked while the gate is
	// held: who holds the gate for writing after the ticket has changed knows that no earlier piece
	// is left.
	gate   sync.RWMutex
	ticket atomic.Uint64 // 64 random bits, which a peer is told if it has the token

	mu      sync.Mutex // guards what follows, and changes of ticket; no lock is taken under it
	revoked bool
	proved  bool          // no piece is left, and the key is free
	awaited chan struct{} // closed when the pieces that Revoke waits for have landed; nil: none
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

// openToken returns the memory of a token, and its ticket.
func (b *Backend) openToken(key uint32, epoch uint64, secret []byte) (m *memory, ticket uint64,
	err error) {
	m = b.memories.At(key)
	if m == nil {
		// The initiator has decoded the token: it is of a memory that was revoked.
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
