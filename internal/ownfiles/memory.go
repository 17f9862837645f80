// SPDX-License-Identifier: Apache-2.0

package ownfiles

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Memory is one registration: memory of a device or of the host, or a range of a file. It is a
// driver.Memory.
type Memory[E any] struct {
	Kind     driver.Kind
	Size     uint64
	ReadOnly bool
	Extent   E // the backend's own

	flights *Flights[E]
	key     uint32
	epoch   uint64 // the generation of the key
	secret  [16]byte

	giving sync.Mutex // held by Revoke while it gives back; before Flights.Mu
	gone   bool       // guarded by giving: nothing is left to give back

	revoked bool // guarded by Flights.Mu
}

// Register makes a segment a memory. find says where it lies, before anybody can see the memory.
func (b *Flights[E]) Register(seg *driver.Segment, find func(*Memory[E]) error) (driver.Memory,
	error) {
	if err := seg.Check(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if b.closed.Load() || !b.Gate.Enter() {
		return nil, fmt.Errorf("register memory: %w", driver.ErrClosed)
	}
	defer b.Gate.Exit()
	m := &Memory[E]{Kind: seg.Kind, Size: seg.Len, ReadOnly: seg.ReadOnly, flights: b,
		secret: seg.Secret}
	var err error
	if m.key, m.epoch, err = b.table.Take(); err != nil {
		return nil, fmt.Errorf("register memory: %w", err)
	}
	if err := find(m); err != nil {
		b.table.Free(m.key)
		return nil, fmt.Errorf("register %v with %s: %w", seg.Kind, b.cfg.Name, err)
	}
	b.table.Put(m.key, m)
	if b.closed.Load() { // Close may have listed the memories before
		return nil, errors.Join(fmt.Errorf("register memory: %w", driver.ErrClosed),
			m.revoke(context.Background()))
	}
	return m, nil
}

// Key implements driver.Memory.
func (m *Memory[E]) Key() uint32 { return m.key }

// AppendToken implements driver.Memory. It is of use in this process alone.
func (m *Memory[E]) AppendToken(dst []byte) ([]byte, error) {
	b := m.flights
	b.Mu.Lock()
	t := session.Token{Secret: m.secret, Key: m.key, Epoch: m.epoch, Size: m.Size}
	revoked := m.revoked
	b.Mu.Unlock()
	if revoked {
		return dst, driver.ErrClosed
	}
	return t.Append(dst, &b.owner), nil
}

// Revoke implements driver.Memory. It ends what is in flight and waits for it.
func (m *Memory[E]) Revoke(ctx context.Context) error {
	b := m.flights
	if !b.Gate.Enter() {
		return nil // Flights.Close ends every memory
	}
	defer b.Gate.Exit()
	return m.revoke(ctx)
}

// revoke is Revoke within the gate.
func (m *Memory[E]) revoke(ctx context.Context) error {
	b := m.flights
	b.Mu.Lock()
	m.revoked = true
	err := b.end(ctx, driver.ErrRevoked, func(j *Job[E]) bool { return j.uses(m) })
	b.Mu.Unlock()
	if err != nil {
		return fmt.Errorf("revoke key %d: %s has not answered: %w", m.key, b.cfg.Mover, err)
	}
	m.giving.Lock()
	defer m.giving.Unlock()
	if m.gone {
		return nil
	}
	if err := b.cfg.Release(m); err != nil {
		return err // the key stays taken: the next Revoke, or Flights.Close, goes on here
	}
	m.gone = true
	b.table.Free(m.key)
	return nil
}

// admit compares what a token says with the memory.
//
// Preconditions: Flights.Mu is held.
func (m *Memory[E]) admit(t *session.Token) error {
	switch {
	case m.revoked || t.Epoch < m.epoch:
		return driver.ErrRevoked
	case t.Epoch > m.epoch, t.Size != m.Size, subtle.ConstantTimeCompare(t.Secret[:],
		m.secret[:]) != 1:
		return driver.ErrBadToken
	case m.Kind != driver.File:
		return m.flights.foreign
	}
	return nil
}
