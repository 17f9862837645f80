// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"fmt"
	"maps"

	"github.com/sluicehq/sluice/driver"
)

// Fence implements driver.Backend. The epoch ends at once; the proof is that the NICs
// forget its keys, which is a call of our own kernel: no peer, frozen, dead or cut off, has
// a hand in it. Peers that know the keys are told that they are void, so that they stop by
// themselves and not by a queue pair that breaks.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	m := b.table.At(key)
	if m == nil {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	m.endEpoch()
	if ctx.Err() != nil {
		return fmt.Errorf("fence memory: %w", driver.ContextError(ctx))
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
	if err := m.prove(); err != nil {
		return fmt.Errorf("fence memory: %w", err)
	}
	return nil
}

// endEpoch begins the next epoch, and tells the peers that know the keys of the one before.
// Until they are proved to have no use of them, the memory owes that proof.
func (m *memory) endEpoch() {
	m.mu.Lock()
	defer m.mu.Unlock()
	news := (&expired{key: m.key, epoch: m.epoch}).encode()
	m.epoch++
	for c := range m.told {
		c.ch.send(news)
	}
	m.owe(m.told)
	m.told = nil
}

// prove has the NICs forget the keys of all epochs that have ended. Where the NICs were
// asked to take no requests since the last proof there is nothing to do. When a NIC does
// not let go of a key, because requests with it are under way, the queue pairs of the
// peers that may have sent them end first.
// Preconditions: m.fencing is held.
func (m *memory) prove() error {
	m.mu.Lock()
	grants, owed := m.grants, m.owed
	m.owed = nil
	m.mu.Unlock()
	if grants == m.revoked {
		return nil
	}
	err := m.b.net.Revoke(m.key)
	if err != nil {
		for c := range owed {
			c.breakLanes()
		}
		err = m.b.net.Revoke(m.key)
	}
	if err != nil {
		m.mu.Lock()
		m.owe(owed)
		m.mu.Unlock()
		return fmt.Errorf("the NIC keeps a key: %w", err)
	}
	m.revoked = grants
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
