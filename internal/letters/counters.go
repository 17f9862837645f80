// SPDX-License-Identifier: Apache-2.0

package letters

import (
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Counters count arrivals, for driver.Counting. Any goroutine may use them at any time.
type Counters [driver.CountersMax]struct {
	value   atomic.Uint64
	awaited atomic.Uint64 // whoever reaches it wakes the sleeper; 0: nobody waits
}

// Arrive adds one, and reports whether somebody waits for that, who is to be woken. The value goes up
// before the look, and Await does it the other way round: one of the two sees the other.
func (s *Counters) Arrive(number uint32) (wake bool) {
	c := &s[number]
	value := c.value.Add(1)
	n := c.awaited.Load()
	return n != 0 && value >= n
}

// Count returns what arrived.
func (s *Counters) Count(number uint32) uint64 { return s[number].value.Load() }

// Await has Arrive tell of the n-th, and reports whether that is there already.
func (s *Counters) Await(number uint32, n uint64) bool {
	c := &s[number]
	c.awaited.Store(n)
	return c.value.Load() >= n
}
