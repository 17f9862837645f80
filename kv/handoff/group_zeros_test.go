// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupZerosThatDoNotEnd: zeros that are on their way into the blocks when Open ends may land
// later, and Open says so, also where another rank has ended the request meanwhile.
func TestGroupZerosThatDoNotEnd(t *testing.T) {
	for name, aborted := range map[string]bool{"alone": false, "aborted meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			c, backends := withReluctant(t, false)
			r := c.to[0].receive
			r.memory[0] = nil // as if it were of a device
			require.NoError(t, r.prepareZeros())
			j := c.newJob(t, layout.Span{To: 40})
			slow := backends[len(c.from)]
			slow.hold()
			ctx, cancel := context.WithCancel(within(t))
			opened := make(chan error, 1)
			go func() {
				_, err := r.Open(ctx, j.number, j.to[0], j.span)
				opened <- err
			}()
			await(t, "the zeros", func() bool { return slow.count() > 0 })
			if aborted {
				c.abortedBegin(t, j)
			}
			cancel()
			err := <-opened
			slow.let()
			c.leaves()
			require.ErrorIs(t, err, engine.ErrUnproven)
		})
	}
}

// abortedBegin has sending rank 0 begin a request, and give up.
func (c *crowd) abortedBegin(t *testing.T, j *job) {
	t.Helper()
	ctx, cancel := context.WithCancel(within(t))
	begun := make(chan error, 1)
	go func() {
		_, err := c.from[0].sender.Begin(ctx, j.number, j.from[0], j.span)
		begun <- err
	}()
	r := c.to[0].receive
	await(t, "a begin", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		q := r.requests[j.number]
		return q != nil && q.links[0] != nil
	})
	cancel()
	require.ErrorIs(t, <-begun, engine.ErrAborted)
	await(t, "the news", func() bool { return r.Stats().Ended[Aborted] == 1 })
}
