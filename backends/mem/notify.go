// SPDX-License-Identifier: Apache-2.0

package mem

import "github.com/sluicehq/sluice/backends"

// Receive implements backends.Receiver.
func (b *Backend) Receive(msgs []backends.Message) (int, error) {
	n := b.box.Receive(msgs)
	if n == 0 && b.closed.Load() {
		return 0, backends.ErrClosed
	}
	return n, nil
}

// Count implements backends.Counting.
func (b *Backend) Count(counter uint32) uint64 { return b.box.Count(counter) }

// AwaitCount implements backends.Counting.
func (b *Backend) AwaitCount(counter uint32, n uint64) bool { return b.box.AwaitCount(counter, n) }
