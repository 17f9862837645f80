// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// The limits of one call into C that looks for the proof.
const (
	revokeQuick = 100 * time.Microsecond // once ctx is over: twice a thread's copy under a lock
	revokeTurn  = 5 * time.Millisecond   // before that
)

// endEpoch ends the epoch of the memory: from now on no message reaches it, and its tokens are
// refused.
func (m *memory) endEpoch() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.revoked {
		m.revoked = true
		_ = m.b.net.Revoke(m.key, 0) // Revoke looks for the proof later
	}
}

// Revoke implements driver.Memory. The messages that were let in before have landed once each
// thread of ours that handled one has released its worker. So Revoke waits for no peer, but it does
// wait for a thread that is blocked by a page which does not come. It may run beside Backend.Close,
// and after it.
func (m *memory) Revoke(ctx context.Context) error {
	m.endEpoch()
	if err := m.revokeLock.Lock(ctx); err != nil {
		return fmt.Errorf("revoke memory: another call looks for the proof: %w", err)
	}
	defer m.revokeLock.Unlock()
	if m.gone {
		return nil
	}
	for {
		limit := revokeTurn
		if ctx.Err() != nil {
			limit = revokeQuick
		}
		err := m.b.net.Revoke(m.key, limit)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return fmt.Errorf("revoke memory: %w: %w", err, driver.ContextError(ctx))
		}
	}
	m.gone = true
	m.pinner.Unpin()
	m.b.table.Free(m.key)
	return nil
}
