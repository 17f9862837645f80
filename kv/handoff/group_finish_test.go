// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupFinishAgain: where the context of Finish ends, the push goes on, to be finished.
func TestGroupFinishAgain(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		j := c.newJob(t, layout.Span{To: 40})
		j.begin(t)
		for l := range 3 {
			require.NoError(t, j.pushes[1].Layer(within(t), l))
		}
		for range 10 { // the other ranks have not handed over anything
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			require.ErrorIs(t, j.pushes[1].Finish(ctx), context.DeadlineExceeded)
			require.NoError(t, j.pushes[1].Err(), "the push goes on")
			cancel()
		}
		for i, p := range j.pushes {
			if i != 1 {
				for l := range 3 {
					require.NoError(t, p.Layer(within(t), l))
				}
				go func() { _ = p.Finish(within(t)) }()
			}
		}
		require.NoError(t, j.pushes[1].Finish(within(t)))
		j.check(t)
		j.awaitEnd(t)
	})
}
