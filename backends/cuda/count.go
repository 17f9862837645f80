// SPDX-License-Identifier: Apache-2.0

package cuda

import "sync/atomic"

// counter counts arrivals.
type counter struct {
	value   atomic.Uint64
	awaited atomic.Uint64 // whoever reaches it wakes the sleeper; 0: nobody waits
}

// count adds an arrival. The value goes up before the look, and AwaitCount does it the
// other way round: one of the two sees the other.
func (b *Backend) count(number uint32) {
	c := &b.counters[number]
	value := c.value.Add(1)
	if n := c.awaited.Load(); n != 0 && value >= n {
		b.news.Store(true)
		b.signal()
	}
}

// Count implements backends.Counting.
func (b *Backend) Count(counter uint32) uint64 { return b.counters[counter].value.Load() }

// AwaitCount implements backends.Counting.
func (b *Backend) AwaitCount(counter uint32, n uint64) bool {
	c := &b.counters[counter]
	c.awaited.Store(n)
	return c.value.Load() >= n
}
