// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupLateBeginOutlivesAnEnd: a rank begins a request whose end at a receiver takes long, and
// is forgotten meanwhile: Close ends what it has begun, too.
func TestGroupLateBeginOutlivesAnEnd(t *testing.T) {
	s := fourToTwo(t, newMem, false)
	s.config = func(_ bool, g *GroupConfig) { g.RequestsMax, g.MeetTimeout = 1, time.Hour }
	c := newCrowd(t, s)
	r := c.to[0].receive
	j := c.newJob(t, layout.Span{To: 40})
	first, err := r.take(j.number) // as Open does, which then takes long
	require.NoError(t, err)
	prepared := sync.OnceFunc(func() { close(first.prepared) })
	t.Cleanup(prepared)                   // before the Close that waits for it
	ended := func(n uint64) func() bool { // on both: one that remembers a number refuses it
		return func() bool {
			return r.Stats().Ended[Aborted] == n && c.to[1].receive.Stats().Ended[Aborted] == n
		}
	}
	begin := func(ctx context.Context, rank int, number uint64) chan error {
		begun := make(chan error, 1)
		go func() {
			_, err := c.from[rank].sender.Begin(ctx, number, j.from[rank], j.span)
			begun <- err
		}()
		await(t, "a begin", func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			q := r.requests[number]
			return q != nil && q.links[rank] != nil
		})
		return begun
	}
	for i, number := range []uint64{j.number, j.number + 1} {
		ctx, cancel := context.WithCancel(within(t))
		begun := begin(ctx, 0, number)
		cancel()
		require.ErrorIs(t, <-begun, engine.ErrAborted)
		await(t, "the news", ended(uint64(i)+1))
	}
	late := begin(within(t), 1, j.number)
	prepared() // and the first one ends
	<-first.closed
	closed := make(chan error, 1)
	go func() { closed <- r.Close() }()
	select {
	case err := <-late:
		require.ErrorIs(t, err, engine.ErrClosed)
	case <-within(t).Done():
		require.Fail(t, "Close leaves a request that was begun, and waits for it")
	}
	require.NoError(t, <-closed)
}
