// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// fourToTwo are two receivers of two edges each.
func fourToTwo(t testing.TB, open func(testing.TB) driver.Backend, pull bool) crowdSetup {
	spec := grouped(3, 4, 16)
	return crowdSetup{backend: open,
		from: sidesOf(t, spec, layout.Placement{TP: 4, BlockTokens: 4}),
		to:   sidesOf(t, spec, layout.Placement{TP: 2, BlockTokens: 6}),
		config: func(_ bool, g *GroupConfig) {
			g.Edge = func(e *layout.Edge) {
				if e.Op = engine.Write; pull {
					e.Op = engine.Read
				}
			}
		}}
}

// pushAndPull runs a test with both operations over all backends.
func pushAndPull(t *testing.T, test func(t *testing.T, s crowdSetup)) {
	for name, pull := range map[string]bool{"push": false, "pull": true} {
		t.Run(name, func(t *testing.T) {
			overAll(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
				test(t, fourToTwo(t, open, pull))
			})
		})
	}
}

// awaitEdges waits until a receiver has n layers of edges.
func (j *job) awaitEdges(t *testing.T, i, n int) {
	t.Helper()
	await(t, "layers arrive", func() bool {
		j.c.to[i].receive.mu.Lock()
		defer j.c.to[i].receive.mu.Unlock()
		got := 0
		for _, l := range j.requests[i].links {
			if l != nil && l.edge != nil {
				got += len(l.edge.Layers) - l.left
			}
		}
		return got == n
	})
}

// TestGroupLayerIsReadyWithItsLastEdge: one sender is ahead by all layers, and nothing is ready
// until the other one has handed over the same layer.
func TestGroupLayerIsReadyWithItsLastEdge(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		j := c.newJob(t, layout.Span{To: 40})
		j.begin(t)
		for l := range 3 {
			require.NoError(t, j.pushes[1].Layer(within(t), l))
		}
		j.awaitEdges(t, 0, 3)
		for n, l := range []int{2, 0, 1} {
			require.Empty(t, j.requests[0].Ready())
			require.NoError(t, j.pushes[0].Layer(within(t), l))
			j.awaitEdges(t, 0, 4+n)
			require.Equal(t, l, <-j.requests[0].Ready())
		}
		require.Empty(t, j.requests[1].Ready())
		require.NoError(t, j.pushes[2].Abort(within(t)))
		j.awaitEnd(t)
	})
}

// awaitEnd waits for the end on all ranks.
func (j *job) awaitEnd(t testing.TB) {
	t.Helper()
	for _, p := range j.pushes {
		if p != nil {
			select {
			case <-p.Ended():
			case <-within(t).Done():
				require.Fail(t, "a push does not end")
			}
		}
	}
	for i := range j.requests {
		j.ready(t, i)
		<-j.requests[i].Done()
	}
}

// errs returns the outcome of each rank, senders first.
func (j *job) errs() (list []error) {
	for _, p := range j.pushes {
		list = append(list, p.Err())
	}
	for _, q := range j.requests {
		list = append(list, q.Err())
	}
	return list
}

// end ends a request from the rank of that number, senders first.
func (j *job) end(t testing.TB, rank int) {
	t.Helper()
	if rank < len(j.pushes) {
		require.NoError(t, j.pushes[rank].Abort(within(t)))
	} else {
		require.NoError(t, j.requests[rank-len(j.pushes)].Cancel(within(t)))
	}
}

// TestGroupEndReachesAll: three of four edges are done when any one rank ends the request. All
// others end for the same reason, no layer of the missing edge becomes ready, no lease is left,
// and what a sender still has imported opens nothing.
func TestGroupEndReachesAll(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		for rank := range 6 {
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			for _, p := range j.pushes[:3] {
				for l := range 3 {
					require.NoError(t, p.Layer(within(t), l))
				}
			}
			j.awaitEdges(t, 0, 6)
			j.awaitEdges(t, 1, 3)
			j.end(t, rank)
			require.Equal(t, rank >= 4, errors.Is(j.errs()[rank], ErrCancelled))
			require.Len(t, j.ready(t, 0), 3)
			require.Empty(t, j.ready(t, 1))
			j.awaitEnd(t)
			want := Aborted
			if rank >= 4 {
				want = Cancelled
			}
			for i, err := range j.errs() {
				var end *EndError
				require.ErrorAs(t, err, &end, "rank %d", i)
				require.Equal(t, []any{want, i != rank, j.number},
					[]any{end.Reason, end.Remote, end.Request}, "rank %d: %v", i, err)
			}
			j.nothingIsOpen(t)
			j.give()
		}
	})
}

// TestGroupEndsWhatStands: writes and reads that stand are over when the rank that makes them has
// ended.
func TestGroupEndsWhatStands(t *testing.T) {
	rules := []fault.Rule{{On: fault.Write, AtLeast: 100, Do: fault.Swallow()},
		{On: fault.Read, Do: fault.Swallow()}}
	for name, pull := range map[string]bool{"write": false, "read": true} {
		t.Run(name, func(t *testing.T) {
			c := newCrowd(t, fourToTwo(t, func(t testing.TB) driver.Backend {
				b, err := fault.Wrap(newMem(t), 0, rules...)
				require.NoError(t, err)
				return b
			}, pull))
			for rank := range 6 {
				j := c.newJob(t, layout.Span{To: 40})
				j.begin(t)
				for _, p := range j.pushes {
					for l := range 2 {
						require.NoError(t, p.Layer(within(t), l))
					}
				}
				for _, m := range slices.Concat(c.from, c.to) {
					stands := m.sender != nil && !pull || m.sender == nil && pull
					await(t, "transfers stand", func() bool {
						return !stands || m.eng.Stats().Posted >= 2
					})
				}
				j.end(t, rank)
				j.awaitEnd(t)
				for _, m := range slices.Concat(c.from, c.to) {
					await(t, "messages go", func() bool { return m.eng.Stats().Posted == 0 })
				}
				j.compare(t, 0, nothing)
				j.compare(t, 1, nothing)
				j.give()
			}
		})
	}
}

// nothingIsOpen wants no lease on any rank, and what the others still have imported of it to open
// nothing.
func (j *job) nothingIsOpen(t *testing.T) {
	t.Helper()
	for _, m := range slices.Concat(j.c.from, j.c.to) {
		require.Zero(t, m.eng.Stats().Leases)
	}
	tried := 0
	try := func(m *member, op engine.Op, lines []*groupLine, others []*member,
		tables []layout.Tables) {
		for k, line := range lines {
			for region, remote := range line.cachedImports {
				tried++
				leased, err := others[k].side.Ranges(region, 0, 99, tables[k], j.span)
				require.NoError(t, err)
				tr, err := m.eng.NewTransfer(m.peers[k], op, engine.Route{})
				require.NoError(t, err)
				err = tr.Add(m.regions[0], 0, remote, leased[0].Off, leased[0].Len)
				require.NoError(t, err)
				require.NoError(t, tr.Post())
				require.ErrorIs(t, tr.Wait(within(t)), engine.ErrRevoked)
				require.NoError(t, tr.Close())
			}
		}
	}
	before := [][][]byte{j.c.to[0].memory(), j.c.to[1].memory()}
	for _, m := range j.c.from {
		try(m, engine.Write, m.sender.lines, j.c.to, j.to)
	}
	require.Equal(t, before, [][][]byte{j.c.to[0].memory(), j.c.to[1].memory()})
	for _, m := range j.c.to {
		try(m, engine.Read, m.receive.lines, j.c.from, j.from)
	}
	require.NotZero(t, tried)
}

// TestGroupLostRank: the engine of any one rank is closed in the middle of a request. All others
// learn that a peer was lost, and leave nothing.
func TestGroupLostRank(t *testing.T) {
	for rank := range 6 {
		t.Run(fmt.Sprint(rank), func(t *testing.T) {
			pushAndPull(t, func(t *testing.T, s crowdSetup) {
				c := newCrowd(t, s)
				j := c.newJob(t, layout.Span{To: 40})
				j.begin(t)
				for _, p := range j.pushes[:3] {
					require.NoError(t, p.Layer(within(t), 1))
				}
				m := slices.Concat(c.from, c.to)[rank]
				m.closed = true
				require.NoError(t, m.eng.Close())
				j.awaitEnd(t)
				for i, err := range j.errs() {
					if i != rank && !errors.Is(err, engine.ErrClosed) { // its last words
						require.ErrorIs(t, err, engine.ErrPeerLost, "rank %d", i)
					}
				}
				if rank < 4 { // the receivers that are left refuse the next one at once
					<-c.to[0].peers[rank].Lost()
					_, err := c.to[0].receive.Open(within(t), 77, j.to[0], j.span)
					require.ErrorIs(t, err, engine.ErrPeerLost)
				} else {
					<-c.from[0].peers[rank-4].Lost()
					_, err := c.from[0].sender.Begin(within(t), 77, j.from[0], j.span)
					require.ErrorIs(t, err, engine.ErrPeerLost)
				}
			})
		})
	}
}
