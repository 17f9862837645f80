// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupThin hands one request from two ranks to one.
func TestGroupThin(t *testing.T) {
	overAll(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
		spec := grouped(3, 4, 16)
		c := newCrowd(t, crowdSetup{backend: open,
			from: sidesOf(t, spec, layout.Placement{TP: 2, BlockTokens: 4}),
			to:   sidesOf(t, spec, layout.Placement{BlockTokens: 6, Order: layout.VLLMHND})})
		j := c.newJob(t, layout.Span{From: 3, To: 40})
		j.begin(t)
		j.push(t)
		j.check(t)
	})
}
