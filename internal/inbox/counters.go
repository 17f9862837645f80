// SPDX-License-Identifier: Apache-2.0

package inbox

import (
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Counters count arrivals. Any goroutine may use them at any time.
type Counters [driver.CountersMax]struct {
	value   atomic.Uint64
	awaited atomic.Uint64 // the count that wakes the program; 0: none does
}

// Arrive adds one, and reports whether the program is to be woken for it. Arrive adds before
// it looks at what is awaited, and Await stores before it looks at the value: one of the two
// sees the other.
func (s *Counters) Arrive(number uint32) (wake bool) {
	c := &s[number]
	value := c.value.Add(1)
	n := c.awaited.Load()
	return n != 0 && value >= n
}

// Count returns how many have arrived; 0 for a number that is no counter.
func (s *Counters) Count(number uint32) uint64 {
	if number >= driver.CountersMax {
		return 0
	}
	return s[number].value.Load()
}

// Await has Arrive report the n-th, and reports whether it has arrived already. A number that
// is no counter never arrives.
func (s *Counters) Await(number uint32, n uint64) bool {
	if number >= driver.CountersMax {
		return false
	}
	c := &s[number]
	c.awaited.Store(n)
	return c.value.Load() >= n
}
