// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// A crossing that looks for the proof takes so long at most: where ctx is over, and else.
const (
	revokeQuick = 100 * time.Microsecond // twice what a thread copies under one hold of a lock
	revokeTurn  = 5 * time.Millisecond
)

// endEpoch has no message admitted to the memory from now on, and all tokens refused.
func (m *memory) endEpoch() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.revoked {
		m.revoked = true
		_ = m.b.net.Revoke(m.key, 0) // the proof is looked for later
	}
}

// Revoke implements driver.Memory. When each thread of ours that had admitted a message has let go
// of its worker, those messages have landed. So Revoke waits for no peer, but for a thread that
// stands in a page which does not come. It may run beside Backend.Close, and after it.
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
