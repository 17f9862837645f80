// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/keys"
)

// fenceSlice is how long Fence waits in C at a time: the delay with which it obeys
// its context.
const fenceSlice = 5 * time.Millisecond

// Fence implements driver.Backend. The ticket changes, so that our threads refuse
// what shows the old one, and peers that were given direct access are asked
// whether they are out. A peer that does not answer within Config.FenceGrace is frozen;
// then fresh pages go under the range, and what such a peer still writes lands in
// pages that nothing uses.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	m := b.table.At(key)
	if m == nil || m.isClosed() {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	deadline := time.Now().Add(b.cfg.FenceGrace)
	if err := m.turn(); err != nil {
		return fmt.Errorf("fence memory: %w", err)
	}
	select {
	case m.fencing <- struct{}{}:
		defer func() { <-m.fencing }()
	case <-ctx.Done():
		return fmt.Errorf("fence memory: %w", driver.ContextError(ctx))
	}
	if m.gone {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	if err := m.proof(ctx, deadline); err != nil {
		return fmt.Errorf("fence memory: %w", err)
	}
	return nil
}

// turn begins the next epoch. The contexts learn of its ticket under the lock: no peer is
// told that ticket together with an older generation.
func (m *memory) turn() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.epoch++
	m.secret = keys.NewSecret()
	if m.told <= m.proved {
		return nil // no peer was told a ticket since the last proof
	}
	m.ticket = newTicket()
	late := false
	for _, l := range m.b.sides {
		err := l.net.Fence(m.key, m.ticket, 0)
		if err != nil && !isLate(err) {
			return err
		}
		late = late || err != nil
	}
	if !late {
		m.proved = m.epoch - 1
	}
	return nil
}

// proof waits until no access of an epoch that has ended can land.
// Preconditions: m.fencing is held.
func (m *memory) proof(ctx context.Context, deadline time.Time) error {
	m.mu.Lock()
	ended, needed := m.epoch-1, m.told > m.proved
	m.mu.Unlock()
	for _, l := range m.b.sides {
		if !needed {
			break
		}
		if err := m.prove(ctx, l, deadline); err != nil {
			return err
		}
	}
	m.mu.Lock()
	m.proved = max(m.proved, ended)
	m.mu.Unlock()
	return nil
}

// prove waits until a context has the proof, which it has at once unless peers have mapped the
// memory. The strong means follow at the deadline.
func (m *memory) prove(ctx context.Context, l *side, deadline time.Time) error {
	for {
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		left := max(time.Until(deadline), 0)
		if err := l.net.Fence(m.key, 0, min(left, fenceSlice)); !isLate(err) {
			return err
		}
		if left == 0 {
			break
		}
	}
	if err := m.refresh(ctx, l); err != nil {
		return fmt.Errorf("put fresh pages under a frozen peer: %w", err)
	}
	return nil
}

func (m *memory) refresh(ctx context.Context, l *side) error {
	if m.in == nil {
		return l.net.Refresh(m.key)
	}
	return m.in.renew(ctx, func() error { return l.net.Refresh(m.key) })
}
