// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// fenceSlice is how long Fence waits in C at a time: the delay with which it obeys
// its context.
const fenceSlice = 5 * time.Millisecond

// Fence implements driver.Backend. The ticket changes, so that our threads refuse
// what shows the old one, and peers that were given direct access are asked
// whether they are out. Who does not answer within Config.FenceGrace is frozen;
// then fresh pages go under the range, and what such a peer still writes lands in
// pages that are nobody's.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	m := b.table.At(key)
	if m == nil {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	deadline := time.Now().Add(b.cfg.FenceGrace)
	select {
	case m.fencing <- struct{}{}:
		defer func() { <-m.fencing }()
	case <-ctx.Done():
		return fmt.Errorf("fence memory: %w", driver.ContextError(ctx))
	}
	if m.gone {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	if err := m.end(ctx, deadline); err != nil {
		return fmt.Errorf("fence memory: %w", err)
	}
	return nil
}

// end ends the epoch and proves it. When no peer was told a ticket since the last
// proof there is nobody to keep out, and nothing to do.
// Preconditions: m.fencing is held.
func (m *memory) end(ctx context.Context, deadline time.Time) error {
	ended, late, err := m.turn()
	for _, l := range late {
		if err == nil {
			err = m.prove(ctx, l, deadline)
		}
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.proved = ended
	m.mu.Unlock()
	return nil
}

// turn begins the next epoch, and returns which contexts have not proved that the
// one before has ended. The contexts learn of the new ticket under the lock: no
// peer is told that ticket together with an older generation.
func (m *memory) turn() (ended uint64, late []*line, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ended = m.epoch
	m.epoch++
	if m.told <= m.proved {
		return ended, nil, nil
	}
	m.ticket = newTicket()
	for _, l := range m.b.lines {
		err := l.net.Fence(m.key, m.ticket, 0)
		if err != nil && !isLate(err) {
			return ended, nil, err
		}
		if err != nil {
			late = append(late, l)
		}
	}
	return ended, late, nil
}

// prove waits until a context has the proof. Near, the strong means follow at the
// deadline. Far, what is under way is in our own thread's hand: that takes as long
// as one piece, but for the rendezvous of a frozen peer.
func (m *memory) prove(ctx context.Context, l *line, deadline time.Time) error {
	if !l.near {
		deadline = deadline.Add(m.b.cfg.Grace)
	}
	for {
		if ctx.Err() != nil {
			return driver.ContextError(ctx)
		}
		left := time.Until(deadline)
		if left <= 0 {
			break
		}
		if err := l.net.Fence(m.key, m.ticket, min(left, fenceSlice)); !isLate(err) {
			return err
		}
	}
	if !l.near {
		return fmt.Errorf("a peer does not end the rendezvous of a piece: close it, or leave Config.RendezvousMin at 0: %w", driver.ErrTimeout)
	}
	if err := l.net.Refresh(m.key); err != nil {
		return fmt.Errorf("put fresh pages under a frozen peer: %w", err)
	}
	return nil
}
