// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"fmt"
	"maps"

	"github.com/sluicehq/sluice/driver"
)

// Fence implements driver.Fencer. The NICs forget the keys of the epoch: that is a call
// of our own kernel, and no peer, frozen, dead or cut off, has a hand in it. Those that
// were told the keys are told that they are void, so that they stop by themselves and not
// by a queue pair that breaks.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	m := b.table.At(key)
	if m == nil {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
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
	if err := m.end(); err != nil {
		return fmt.Errorf("fence memory: %w", err)
	}
	return nil
}

// end ends the epoch and proves it. Where the NICs take no requests there is nobody to
// keep out, and nothing to do. When they do not let go of a key, because requests with it
// are under way, the queue pairs of those that may have sent them go first.
// Preconditions: m.fencing is held.
func (m *memory) end() error {
	grants, owed := m.turn()
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
		return fmt.Errorf("the NIC keeps a key: %w", err)
	}
	m.revoked, m.owed = grants, nil
	return nil
}

// turn begins the next epoch, tells those that know the keys of the one before, and
// returns how many grants there were, and whom the proof must keep out.
func (m *memory) turn() (grants uint64, owed map[*inbound]struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	news := (&expired{key: m.key, epoch: m.epoch}).encode()
	m.epoch++
	for c := range m.told {
		c.ch.send(news)
	}
	if m.owed == nil {
		m.owed, m.told = m.told, nil
	} else {
		maps.Copy(m.owed, m.told)
		clear(m.told)
	}
	return m.grants, m.owed
}
