// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Fence implements driver.Backend. The epoch ends at once; the proof is that the NICs
// forget its keys, which is a call of our own kernel: no peer, frozen, dead or cut off, has
// a hand in it. A NIC may give a key out again: see addresses. Peers that know the keys are told
// that they are void, so that they stop by themselves and not by a queue pair that breaks.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	m := b.table.At(key)
	if m == nil || m.isClosed() {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	m.endEpoch()
	if err := m.fence(ctx); err != nil {
		return fmt.Errorf("fence memory: %w", err)
	}
	return nil
}

// fence proves that the epochs before are over. Where another fence is looking for its proof
// for longer than ctx, this one goes on beside: what begins later must be refused all the
// same.
func (m *memory) fence(ctx context.Context) error {
	select {
	case m.fencing <- struct{}{}:
		return m.proveAlone(ctx)
	default:
	}
	select {
	case m.fencing <- struct{}{}:
		return m.proveAlone(ctx)
	case <-ctx.Done():
		m.b.tasks.Start(func() {
			m.fencing <- struct{}{}
			_ = m.proveAlone(context.Background()) // the next fence looks for the proof again
		})
		return driver.ContextError(ctx)
	}
}

// proveAlone gives the place in m.fencing back.
func (m *memory) proveAlone(ctx context.Context) error {
	defer func() { <-m.fencing }()
	if m.gone {
		return errUnknownKey
	}
	return m.prove(ctx)
}

// endEpoch begins the next epoch, and tells the peers that know the keys of the one before.
// Until they are proved to have no use of them, the memory owes that proof.
func (m *memory) endEpoch() {
	m.mu.Lock()
	defer m.mu.Unlock()
	news := (&expired{key: m.key, epoch: m.epoch}).encode()
	m.epoch++
	m.secret = session.NewSecret()
	m.due = true
	for c := range m.told {
		c.ch.send(news)
		c.knowing.Lock()
		delete(c.knows, m)
		c.knowing.Unlock()
	}
	m.owe(m.told)
	m.told = nil
}

// prove has the NICs forget the keys of all epochs that have ended: all keys, as no grant is made
// between the end of an epoch and its proof. Where none has ended since the last proof, or the NICs
// were asked to take no requests, there is nothing to do. When a NIC does
// not let go of a key, because requests with it are under way, the queue pairs of the
// peers that may have sent them end first.
// ctx is looked at before they end, not before the NICs are told.
// Preconditions: m.fencing is held.
func (m *memory) prove(ctx context.Context) error {
	m.mu.Lock()
	due, owed := m.due, m.owed
	m.due, m.owed = false, nil
	m.mu.Unlock()
	if !due || !m.granted {
		return nil
	}
	err := m.b.net.Revoke(m.key)
	if err != nil && ctx.Err() == nil {
		for c := range owed {
			_ = c.breakPairs() // the NIC says what is left
		}
		err = m.b.net.Revoke(m.key)
	}
	if err != nil {
		m.mu.Lock()
		m.due = true
		m.owe(owed)
		m.mu.Unlock()
		return errors.Join(fmt.Errorf("the NIC keeps a key: %w", err), driver.ContextError(ctx))
	}
	m.granted = false
	m.b.addresses.giveBack(m)
	return nil
}

// owe adds peers to those that the next proof must keep out. Preconditions: m.mu is held.
func (m *memory) owe(peers map[*inbound]struct{}) {
	if m.owed == nil {
		m.owed = peers
	} else {
		maps.Copy(m.owed, peers)
	}
}
