// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// Revoke implements driver.Memory. The proof is that the NICs forget the memory's keys, which is a
// call of our own kernel: no peer, frozen, dead or cut off, has a hand in it. A NIC may give a key
// out again: see addresses. Peers that know the keys are told that they are void, so that they
// stop by themselves and not by a queue pair that breaks.
func (m *memory) Revoke(ctx context.Context) error {
	if !m.b.gate.Enter() {
		return m.b.Close() // which revokes every memory, or says why not
	}
	defer m.b.gate.Exit()
	return m.revoke(ctx)
}

// revoke is Revoke within the gate. Where another call has its turn for longer than ctx, this one
// goes on beside: what peers begin later must be refused all the same.
func (m *memory) revoke(ctx context.Context) error {
	m.end()
	if err := m.turn.Take(ctx); err != nil {
		m.b.tasks.Start(func() {
			_ = m.turn.Take(context.Background()) // never fails
			defer m.turn.Give()
			_ = m.prove(context.Background()) // the next call looks for the proof again
		})
		return fmt.Errorf("revoke memory: another call waits for the NIC: %w", err)
	}
	defer m.turn.Give()
	if err := m.prove(ctx); err != nil {
		return fmt.Errorf("revoke memory: %w", err)
	}
	if m.shown {
		if err := m.b.net.Unmap(m.key); err != nil {
			return fmt.Errorf("revoke memory: %w", err)
		}
		m.shown = false
	}
	if m.gone {
		return nil
	}
	if err := m.unpin(); err != nil {
		return fmt.Errorf("revoke memory: %w", err)
	}
	m.gone = true
	m.b.table.Free(m.key)
	return nil
}

// end has imports refused from now on, and tells the peers that know the keys.
func (m *memory) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.revoked {
		return
	}
	m.revoked = true
	news := (&expired{key: m.key, epoch: m.epoch}).encode()
	for c := range m.peersWithKey {
		c.ch.send(news)
	}
}

// prove has the NICs forget the keys, unless they were asked to take no requests. When a NIC does
// not let go of a key, because requests with it are under way, the queue pairs of the peers that
// may have sent them end first: those of peers that have none any more have ended.
// ctx is looked at before they end, not before the NICs are told.
// Preconditions: m.turn is held, and the memory is revoked.
func (m *memory) prove(ctx context.Context) error {
	if !m.granted {
		return nil
	}
	err := m.b.net.Revoke(m.key)
	if err != nil && ctx.Err() == nil {
		m.mu.Lock()
		peers := slices.Collect(maps.Keys(m.peersWithKey))
		m.mu.Unlock()
		for _, c := range peers {
			_ = c.breakPairs() // the NIC says what is left
		}
		err = m.b.net.Revoke(m.key)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("the NIC keeps a key: %w", err), driver.ContextError(ctx))
	}
	m.granted = false
	m.b.addresses.giveBack(m)
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.peersWithKey {
		c.knowing.Lock()
		delete(c.knows, m)
		c.knowing.Unlock()
	}
	m.peersWithKey = nil
	return nil
}
