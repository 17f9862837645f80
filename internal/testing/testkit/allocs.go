// SPDX-License-Identifier: Apache-2.0

package testkit

import "testing"

// windows is how often AllocsPerRun counts at most.
const windows = 5

// AllocsPerRun calls testing.AllocsPerRun up to five times and returns the lowest count. A count is
// of the whole process: on a busy machine it includes allocations of the runtime, and of goroutines
// of earlier tests that are still ending. What f allocates on each run is in all counts.
func AllocsPerRun(runs int, f func()) float64 {
	least := testing.AllocsPerRun(runs, f)
	for i := 1; i < windows && least > 0; i++ {
		least = min(least, testing.AllocsPerRun(runs, f))
	}
	return least
}
