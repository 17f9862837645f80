// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

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
		c.handOver(t, layout.Span{From: 3, To: 40})
		for k, counts := range c.from[0].eng.Stats().Classes {
			require.Equal(t, engine.Class(k) == class, counts.Posts > 0, engine.Class(k))
		}
	}
}
