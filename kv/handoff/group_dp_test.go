// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupsOfOneMux: one prefill rank serves two data-parallel decode groups, which end requests
// of the same number apart. A second GroupSender for the same peers is refused.
func TestGroupsOfOneMux(t *testing.T) {
	spec := grouped(3, 4, 16)
	from := sidesOf(t, spec, layout.Placement{BlockTokens: 4})
	c := newCrowd(t, crowdSetup{from: from, to: sidesOf(t, spec, layout.Placement{TP: 2,
		BlockTokens: 6})})
	_, err := NewGroupSender(c.from[0].mux, c.from[0].sender.cfg)
	require.ErrorIs(t, err, engine.ErrBusy)

	other := &crowd{}
	side := sidesOf(t, spec, layout.Placement{DP: 1, BlockTokens: 8})
	other.plan, err = layout.NewPlan(from, side)
	require.NoError(t, err)
	s := crowdSetup{backend: newMem}
	prefill := &member{eng: c.from[0].eng, mux: c.from[0].mux, side: from[0],
		regions: c.from[0].regions, free: c.from[0].free} // the same pool
	decode := newMember(t, "other-0", side[0], s)
	prefill.peers = []*engine.Peer{connect(t, prefill.eng, decode.eng)}
	decode.peers = []*engine.Peer{connect(t, decode.eng, prefill.eng)}
	prefill.sender, err = NewGroupSender(prefill.mux, other.config(prefill, 0, true, s))
	require.NoError(t, err)
	decode.receive, err = NewGroupReceiver(decode.mux, other.config(decode, 0, false, s))
	require.NoError(t, err)
	other.from, other.to = []*member{prefill}, []*member{decode}
	t.Cleanup(func() { other.close(t) })

	for range 3 {
		first := c.newJob(t, layout.Span{To: 30})
		second := other.newJob(t, layout.Span{From: 5, To: 41})
		require.Equal(t, first.number, second.number)
		first.begin(t)
		second.begin(t)
		require.NoError(t, first.pushes[0].Layer(within(t), 0))
		second.push(t)
		second.check(t)
		require.NoError(t, first.pushes[0].Abort(within(t)))
		first.awaitEnd(t)
		second.give()
		first.give()
	}
}

// TestGroupRankIsReplaced: when a rank is lost, the ranks of the other group make new objects,
// which have another one in its place. Those beside it keep theirs.
func TestGroupRankIsReplaced(t *testing.T) {
	overAll(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
		s := fourToTwo(t, open, false)
		c := newCrowd(t, s)
		lost := c.from[0]
		require.NoError(t, lost.sender.Close())
		lost.mux.Close()
		require.NoError(t, lost.eng.Close())
		for _, m := range c.to {
			select {
			case <-m.peers[0].Lost():
			case <-within(t).Done():
				require.Fail(t, "the peer is not lost")
			}
			tables := m.tables(t, 40)
			_, err := m.receive.Open(within(t), 1, tables, layout.Span{To: 40})
			require.ErrorIs(t, err, engine.ErrPeerLost)
			m.give(tables)
		}
		c.number++

		next := newMember(t, "prefill-0", lost.side, s)
		for i, m := range c.to {
			require.NoError(t, m.receive.Close())
			next.peers = append(next.peers, connect(t, next.eng, m.eng))
			m.peers[0] = connect(t, m.eng, next.eng)
			var err error
			m.receive, err = NewGroupReceiver(m.mux, c.config(m, i, false, s))
			require.NoError(t, err)
		}
		var err error
		next.sender, err = NewGroupSender(next.mux, c.config(next, 0, true, s))
		require.NoError(t, err)
		c.from[0] = next
		c.handOver(t, layout.Span{To: 40})
	})
}

// oneToOne is a crowd of one rank on either side.
func oneToOne(t *testing.T) (*crowd, crowdSetup) {
	t.Helper()
	spec := grouped(2, 4, 16)
	s := crowdSetup{from: sidesOf(t, spec, layout.Placement{BlockTokens: 4}),
		to: sidesOf(t, spec, layout.Placement{BlockTokens: 6})}
	return newCrowd(t, s), s
}

// TestGroupClosedTwice: a second Close does nothing to the object that came after the first.
func TestGroupClosedTwice(t *testing.T) {
	c, s := oneToOne(t)
	from, to := c.from[0], c.to[0]
	sender, receiver := from.sender, to.receive
	require.NoError(t, sender.Close())
	require.NoError(t, receiver.Close())
	var err error
	from.sender, err = NewGroupSender(from.mux, c.config(from, 0, true, s))
	require.NoError(t, err)
	to.receive, err = NewGroupReceiver(to.mux, c.config(to, 0, false, s))
	require.NoError(t, err)
	require.NoError(t, sender.Close())
	require.NoError(t, receiver.Close())
	c.handOver(t, layout.Span{To: 20})
}

// TestGroupBesideAnotherConnect: a program that connects to a rank once more, for something else,
// does not turn its messages away from the group.
func TestGroupBesideAnotherConnect(t *testing.T) {
	c, s := oneToOne(t)
	more := connect(t, c.from[0].eng, c.to[0].eng)
	connect(t, c.to[0].eng, c.from[0].eng)
	c.handOver(t, layout.Span{To: 20})

	cfg := c.config(c.from[0], 0, true, s)
	cfg.Peers = append(cfg.Peers, more)
	require.ErrorContains(t, cfg.check([]*layout.Side{s.from[0]}, []*layout.Side{s.to[0], s.to[0]}),
		"peer 1 (decode-0) is one of those before")
}
