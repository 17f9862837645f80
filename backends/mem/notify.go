// SPDX-License-Identifier: Apache-2.0

package mem

import "github.com/sluicehq/sluice/driver"

// Receive implements driver.Receiver.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	n := b.box.Receive(msgs)
	if n == 0 && b.closed.Load() {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// Count implements driver.Counting.
func (b *Backend) Count(counter uint32) uint64 { return b.box.Count(counter) }

// AwaitCount implements driver.Counting.
func (b *Backend) AwaitCount(counter uint32, n uint64) bool { return b.box.AwaitCount(counter, n) }
