// SPDX-License-Identifier: Apache-2.0

package ownfiles

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Peer is a way of a backend to its own files: what its peers have in common. All is guarded by
// Flights.Mu.
type Peer[E any] struct {
	driver.PeerBase
	flights *Flights[E]
	closed  bool
	imports session.Imports[Memory[E]]
}

// Import implements driver.Peer. A token of another backend answers to ErrBadToken and
// ErrNotSupported.
func (p *Peer[E]) Import(token []byte) (uint32, uint64, error) {
	b := p.flights
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if p.closed {
		return 0, 0, driver.ErrClosed
	}
	t, err := session.DecodeToken(token, &b.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import file: %w (%w: %w)", err, b.distant, driver.ErrNotSupported)
	}
	m := b.table.At(t.Key)
	if m == nil {
		return 0, 0, fmt.Errorf("import file: its registration has ended: %w", driver.ErrRevoked)
	}
	if err := m.admit(&t); err != nil {
		return 0, 0, fmt.Errorf("import file: %w", err)
	}
	key, err := p.imports.Add(m)
	if err != nil {
		return 0, 0, fmt.Errorf("import file: %w", err)
	}
	return key, m.Size, nil
}

// Imported returns the memory that a remote key names, nil for none.
//
// Preconditions: Flights.Mu is held.
func (p *Peer[E]) Imported(key uint32) *Memory[E] {
	return p.imports.At(key)
}

// Drop implements driver.Peer.
func (p *Peer[E]) Drop(key uint32) {
	p.flights.Mu.Lock()
	defer p.flights.Mu.Unlock()
	p.imports.Drop(key)
}

// Closed reports whether Close has begun.
//
// Preconditions: Flights.Mu is held.
func (p *Peer[E]) Closed() bool { return p.closed }

// Cancel implements driver.Peer.
func (p *Peer[E]) Cancel(tag uint64) {
	b := p.flights
	if !b.Gate.Enter() {
		return
	}
	defer b.Gate.Exit()
	b.Mu.Lock()
	b.stop(driver.ErrAborted, func(j *Job[E]) bool { return j.by == p && j.Tag == tag })
	b.cfg.Leave()
}

// Close implements driver.Peer.
func (p *Peer[E]) Close() error {
	b := p.flights
	if !b.Gate.Enter() {
		return nil // Flights.Close has closed every peer
	}
	defer b.Gate.Exit()
	b.Mu.Lock()
	defer b.Mu.Unlock()
	p.closed = true
	err := b.end(context.Background(), driver.ErrClosed, func(j *Job[E]) bool { return j.by == p })
	p.imports = session.Imports[Memory[E]]{}
	delete(b.peers, p)
	return err
}
