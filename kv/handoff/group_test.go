// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
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

// TestGroupClass: what a group moves is swap-ins to an engine with a schedule, unless the program
// says otherwise.
func TestGroupClass(t *testing.T) {
	spec := grouped(3, 4, 16)
	for _, class := range []engine.Class{engine.SwapIn, engine.Replicate} {
		c := newCrowd(t, crowdSetup{
			from:   sidesOf(t, spec, layout.Placement{TP: 2, BlockTokens: 4}),
			to:     sidesOf(t, spec, layout.Placement{BlockTokens: 6, Order: layout.VLLMHND}),
			engine: func(cfg *engine.Config) { cfg.Schedule = &engine.Schedule{} },
			config: func(_ bool, cfg *GroupConfig) { cfg.Class = class }})
		j := c.newJob(t, layout.Span{From: 3, To: 40})
		j.begin(t)
		j.push(t)
		j.check(t)
		for k, counts := range c.from[0].eng.Stats().Classes {
			require.Equal(t, engine.Class(k) == class, counts.Posts > 0, engine.Class(k))
		}
	}
}
