// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"testing"

	"github.com/sluicehq/sluice/internal/testing/atonce"
)

// TestArriveBesideAwaitCount counts while the owner says what it waits for: either AwaitCount sees
// the count, or what counts sees that the owner waits.
func TestArriveBesideAwaitCount(t *testing.T) {
	c, n := NewCounters(), uint64(0)
	await := func() bool { return c.AwaitCount(3, n+1) }
	atonce.OneSees(t, await, func() bool { return c.Arrive(3) }, func() {
		n++
		c.table[3].awaited.Store(0)
	})
}
