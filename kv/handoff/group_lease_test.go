// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupLeaseIsOfTheRequest: what a rank has leased out for a request opens its bytes, and
// neither what lies behind its last token nor another request's blocks.
func TestGroupLeaseIsOfTheRequest(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		j, other := c.newJob(t, layout.Span{To: 40}), c.newJob(t, layout.Span{To: 40})
		j.begin(t)
		other.begin(t)
		m, op, remote, holder, tables := c.from[0], engine.Write, j.pushes[0].links[0].imports,
			c.to[0], [2][]layout.Tables{j.to, other.to}
		if c.from[0].sender.op(0) == engine.Read {
			await(t, "the receiver imports", func() bool {
				holder := c.to[0].receive
				holder.mu.Lock()
				defer holder.mu.Unlock()
				return j.requests[0].links[0].granted
			})
			m, op, remote, holder, tables = c.to[0], engine.Read, j.requests[0].links[0].imports,
				c.from[0], [2][]layout.Tables{j.from, other.from}
		}
		require.Len(t, remote, 1)
		require.Len(t, holder.regions, 1)
		try := func(r layout.Range) error {
			tr, err := m.eng.NewTransfer(m.peers[0], op, engine.Route{})
			require.NoError(t, err)
			defer tr.Close()
			if err = tr.Add(m.regions[0], 0, remote[0].remote, r.Off, r.Len); err == nil {
				if err = tr.Post(); err == nil {
					err = tr.Wait(within(t))
				}
			}
			return err
		}
		before := holder.memory()
		foreign, err := holder.side.Ranges(0, 0, 9, tables[1][0], j.span)
		require.NoError(t, err)
		require.ErrorIs(t, try(foreign[0]), engine.ErrBounds)
		mine, err := holder.side.Ranges(0, 0, 9, tables[0][0], j.span)
		require.NoError(t, err)
		require.ErrorIs(t, try(layout.Range{Off: mine[0].Off, Len: mine[0].Len + 1}),
			engine.ErrBounds)
		require.Equal(t, before, holder.memory())
		require.NoError(t, try(mine[0]))
		require.NoError(t, j.pushes[0].Abort(within(t)))
		j.awaitEnd(t)
		require.NoError(t, other.pushes[0].Abort(within(t)))
		other.awaitEnd(t)
	})
}

// TestGroupManyRanges: requests of more ranges than a lease may have are leased by layers.
func TestGroupManyRanges(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		for _, m := range c.from {
			m.sender.rangesMax = 20
		}
		for _, m := range c.to {
			m.receive.rangesMax = 20
		}
		for range 2 {
			j := c.newJob(t, layout.Span{From: 3, To: 40})
			j.begin(t)
			leases := 0
			for _, m := range append(c.from, c.to...) {
				leases += m.eng.Stats().Leases
			}
			require.Greater(t, leases, 2*len(c.to))
			j.push(t)
			j.check(t)
			j.give()
		}
	})
}

// newStubbornCrowd is a crowd one rank of which cannot prove anything for a while.
func newStubbornCrowd(t *testing.T, pull bool, rank int) (c *crowd, fails *atomic.Int64) {
	t.Helper()
	fails = new(atomic.Int64)
	made := 0
	s := fourToTwo(t, func(t testing.TB) driver.Backend {
		if made++; made-1 != rank {
			return newMem(t)
		}
		return stubborn{newMem(t).(*mem.Backend), fails}
	}, pull)
	edge := s.config
	s.config = func(sends bool, g *GroupConfig) {
		edge(sends, g)
		g.RevokeTimeout = 10 * time.Millisecond
	}
	return newCrowd(t, s), fails
}

// TestGroupWithoutAProof: a rank that cannot revoke a lease says so, when the request is ended and
// when all bytes came; a proof that comes late is one.
func TestGroupWithoutAProof(t *testing.T) {
	for name, pull := range map[string]bool{"receiver": false, "sender": true} {
		rank := 4
		if pull {
			rank = 0
		}
		outcome := func(t *testing.T, j *job) error { // of ending it there
			if pull {
				return j.pushes[0].Abort(within(t))
			}
			return j.requests[0].Cancel(within(t))
		}
		testkit.RunInVirtualTime(t, name+", ended", func(t *testing.T) {
			c, fails := newStubbornCrowd(t, pull, rank)
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			fails.Store(1 << 40)
			err := outcome(t, j)
			require.ErrorIs(t, err, engine.ErrUnproven)
			require.NotErrorIs(t, err, ErrInUse)
			var stand *LeasesError
			require.ErrorAs(t, err, &stand)
			j.awaitEnd(t)
			fails.Store(0)
			c.unproven(t, rank)
			<-stand.Leases[0].Revoked() // the engine has looked again
		})
		testkit.RunInVirtualTime(t, name+", late", func(t *testing.T) {
			c, fails := newStubbornCrowd(t, pull, rank)
			c.to[0].receive.cfg.RevokeTimeout, c.from[0].sender.cfg.RevokeTimeout = limit, limit
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			fails.Store(9)
			require.NoError(t, outcome(t, j))
			j.awaitEnd(t)
		})
		testkit.RunInVirtualTime(t, name+", all came", func(t *testing.T) {
			c, fails := newStubbornCrowd(t, pull, rank)
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			fails.Store(1 << 40)
			for _, p := range j.pushes {
				for l := range 3 {
					require.NoError(t, p.Layer(within(t), l))
				}
			}
			errs := make(chan error, 4)
			for _, p := range j.pushes[1:] {
				go func() { errs <- p.Finish(within(t)) }()
			}
			err := j.pushes[0].Finish(within(t))
			for range 3 {
				<-errs
			}
			if !pull { // the senders learn that it failed there
				require.ErrorIs(t, j.requests[0].Err(), engine.ErrUnproven)
				var end *EndError
				require.ErrorAs(t, err, &end)
				require.Equal(t, []any{Failed, true}, []any{end.Reason, end.Remote})
			} else {
				require.ErrorIs(t, err, engine.ErrUnproven)
				require.NoError(t, j.requests[0].Err())
			}
			j.awaitEnd(t)
			fails.Store(0)
			c.unproven(t, rank)
		})
	}
}

// unproven wants the lease of one rank to stand, and closes its engine.
func (c *crowd) unproven(t *testing.T, rank int) {
	t.Helper()
	m := append(c.from, c.to...)[rank]
	require.Equal(t, 1, m.eng.Stats().Leases)
	m.closed = true
}

// TestGroupAbortAsksForTheProof: a write, or a read, that ended by itself may have done so without
// one.
func TestGroupAbortAsksForTheProof(t *testing.T) {
	for name, pull := range map[string]bool{"write": false, "read": true} {
		t.Run(name, func(t *testing.T) {
			var all []*doubtful
			c := newCrowd(t, fourToTwo(t, func(t testing.TB) driver.Backend {
				all = append(all, &doubtful{Backend: newMem(t).(*mem.Backend)})
				return all[len(all)-1]
			}, pull))
			rank := 0
			if pull {
				rank = 4
			}
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			all[rank].mu.Lock()
			all[rank].doubt = true
			all[rank].mu.Unlock()
			require.NoError(t, j.pushes[0].Layer(within(t), 0))
			j.awaitEnd(t)
			require.ErrorIs(t, j.errs()[rank], engine.ErrUnproven)
			if pull {
				require.ErrorIs(t, j.requests[0].Cancel(within(t)), engine.ErrUnproven)
			} else {
				require.ErrorIs(t, j.pushes[0].Abort(within(t)), engine.ErrUnproven)
			}
			for i, err := range j.errs() {
				require.Error(t, err, "rank %d", i)
			}
		})
	}
}
