// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/keys"
)

// memory is one registration.
type memory struct {
	b   *Backend
	key uint32
	seg driver.Segment

	// gate is held for reading by each piece that a peer has land here, or be read from
	// here; never while anybody waits for a peer.
	gate   sync.RWMutex
	epoch  uint64 // guarded by gate
	ticket uint64 // of this epoch: 64 bits that peers learn who showed the token; guarded by gate
	closed bool   // guarded by gate
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
	m := &memory{b: b, key: key, seg: seg, epoch: epoch, ticket: newTicket()}
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
	m.gate.RLock()
	defer m.gate.RUnlock()
	if m.closed {
		return dst, driver.ErrClosed
	}
	t := keys.Token{Secret: m.seg.Secret, Key: m.key, Epoch: m.epoch, Size: m.seg.Len}
	return t.Append(dst, &m.b.address.owner), nil
}

// Close implements driver.Memory. It waits for the pieces in hand.
func (m *memory) Close() error {
	m.gate.Lock()
	gone := m.closed
	m.closed, m.ticket = true, newTicket()
	next := m.epoch + 1
	m.gate.Unlock()
	if gone {
		return nil
	}
	m.b.memories.Remove(m.key)
	m.b.memories.GiveBack(m.key, next)
	return nil
}

// Fence implements driver.Fencer: a new ticket, once the pieces in hand have landed. No
// peer has a hand in it, so it takes as long as copying a piece.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m := b.memories.At(key)
	if m == nil {
		return fmt.Errorf("fence key %d: no such memory: %w", key, driver.ErrBounds)
	}
	m.gate.Lock()
	defer m.gate.Unlock()
	if m.closed {
		return fmt.Errorf("fence key %d: %w", key, driver.ErrClosed)
	}
	m.epoch, m.ticket = m.epoch+1, newTicket()
	return nil
}

// show returns the ticket for who shows the token.
func (b *Backend) show(key uint32, epoch uint64, secret []byte) (m *memory, ticket uint64, err error) {
	m = b.memories.At(key)
	if m == nil {
		return nil, 0, driver.ErrRevoked // the token has passed keys.Decode: it is of a memory that is gone
	}
	m.gate.RLock()
	defer m.gate.RUnlock()
	switch {
	case m.closed, epoch < m.epoch:
		return nil, 0, driver.ErrRevoked
	case epoch > m.epoch, subtle.ConstantTimeCompare(m.seg.Secret[:], secret) != 1:
		return nil, 0, driver.ErrBadToken
	}
	return m, m.ticket, nil
}

// opens reports whether a ticket is that of the present epoch; gate is held. Tickets are
// compared in constant time, as who guesses would measure it.
func (m *memory) opens(ticket uint64) bool {
	diff := m.ticket ^ ticket
	return subtle.ConstantTimeEq(int32(diff), 0)&subtle.ConstantTimeEq(int32(diff>>32), 0) == 1 && !m.closed
}
