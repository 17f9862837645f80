// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupMeet: ranks begin and open a request in any order.
func TestGroupMeet(t *testing.T) { testkit.InVirtualTime(t, groupMeet) }

func groupMeet(t *testing.T) {
	c := newCrowd(t, fourToTwo(t, newMem, false))
	r := rand.New(rand.NewPCG(1, 1))
	for range 12 {
		j := c.newJob(t, layout.Span{To: 40})
		var all sync.WaitGroup
		for _, rank := range r.Perm(6) {
			var err error
			if rank >= 4 {
				i := rank - 4
				j.requests[i], err = c.to[i].receive.Open(within(t), j.number, j.to[i], j.span)
				require.NoError(t, err)
				continue
			}
			all.Go(func() {
				p, err := c.from[rank].sender.Begin(within(t), j.number, j.from[rank], j.span)
				if err != nil {
					t.Error(err)
				}
				j.pushes[rank] = p
			})
			if r.IntN(2) == 0 { // its begin comes before what is next
				await(t, "a begin", func() bool { return c.hasBegun(rank, j.number) })
			}
		}
		all.Wait()
		j.push(t)
		j.check(t)
		j.give()
	}
}

// hasBegun reports whether the receivers know of a request from a sending rank.
func (c *crowd) hasBegun(rank int, number uint64) bool {
	for _, m := range c.to {
		m.receive.mu.Lock()
		q := m.receive.requests[number]
		ok := q != nil && q.links[rank] != nil
		m.receive.mu.Unlock()
		if !ok {
			return false
		}
	}
	return true
}

// TestGroupMeetingIsBounded: ranks that wait for others that do not come end, and all learn it.
func TestGroupMeetingIsBounded(t *testing.T) {
	impatient := func(sends bool) crowdSetup {
		s := fourToTwo(t, newMem, false)
		s.config = func(of bool, g *GroupConfig) {
			if of == sends {
				g.MeetTimeout = 50 * time.Millisecond
			}
		}
		return s
	}
	const late = "the receivers do not open it, the senders give up"
	testkit.RunInVirtualTime(t, late, func(t *testing.T) {
		c := newCrowd(t, impatient(true))
		j := c.newJob(t, layout.Span{To: 40})
		_, err := c.from[2].sender.Begin(within(t), j.number, j.from[2], j.span)
		require.ErrorIs(t, err, engine.ErrTimeout)
		await(t, "the receivers hear of it", func() bool {
			return c.to[1].receive.Stats().Ended[TimedOut] == 1
		})
		_, err = c.to[1].receive.Open(within(t), j.number, j.to[1], j.span)
		require.ErrorIs(t, err, engine.ErrTimeout)
		_, err = c.from[3].sender.Begin(within(t), j.number, j.from[3], j.span)
		require.ErrorIs(t, err, engine.ErrTimeout)
	})
	testkit.RunInVirtualTime(t, "the receivers do not open it, they give up", func(t *testing.T) {
		c := newCrowd(t, impatient(false))
		j := c.newJob(t, layout.Span{To: 40})
		_, err := c.from[2].sender.Begin(within(t), j.number, j.from[2], j.span)
		var end *EndError
		require.ErrorAs(t, err, &end)
		require.True(t, end.Reason == TimedOut && end.Remote, "%v", err)
	})
	testkit.RunInVirtualTime(t, "a sender does not begin it", func(t *testing.T) {
		c := newCrowd(t, impatient(false))
		j := c.newJob(t, layout.Span{To: 40})
		var err error
		j.requests[0], err = c.to[0].receive.Open(within(t), j.number, j.to[0], j.span)
		require.NoError(t, err)
		require.Empty(t, j.ready(t, 0))
		require.ErrorIs(t, j.requests[0].Err(), engine.ErrTimeout)
		require.ErrorContains(t, j.requests[0].Err(), "sending ranks [0 1 2 3] have not begun it")
	})
}

// TestGroupIdle: a sender that says nothing more ends the request within IdleTimeout, also one of
// no bytes that others wait for.
func TestGroupIdle(t *testing.T) {
	for name, lazy := range map[string]int{"of bytes": 3, "of none": 0} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			s := fourToTwo(t, newMem, false)
			s.config = func(sends bool, g *GroupConfig) {
				if !sends && g.Index == 1 {
					g.IdleTimeout = 300 * time.Millisecond
				}
			}
			c := newCrowd(t, s)
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			for i, p := range j.pushes {
				for l := range 3 {
					if i != lazy || name == "of none" {
						require.NoError(t, p.Layer(within(t), l))
					}
				}
				if i != lazy {
					go p.Finish(within(t))
				}
			}
			j.awaitEnd(t)
			require.ErrorContains(t, j.requests[1].Err(),
				fmt.Sprintf("sending ranks [%d] are not", lazy))
			for i, err := range j.errs() {
				require.ErrorIs(t, err, engine.ErrTimeout, "rank %d", i)
			}
		})
	}
}

// TestGroupMisuse: what is wrong with a call is refused, and ends nothing.
func TestGroupMisuse(t *testing.T) {
	s := fourToTwo(t, newMem, false)
	s.config = func(_ bool, g *GroupConfig) { g.RequestsMax = 1 }
	c := newCrowd(t, s)
	j := c.newJob(t, layout.Span{To: 40})
	_, err := c.from[0].sender.Begin(within(t), 9, nil, j.span)
	require.ErrorIs(t, err, layout.ErrRequest)
	_, err = c.to[0].receive.Open(within(t), 9, nil, j.span)
	require.ErrorIs(t, err, layout.ErrRequest)
	j.begin(t)
	_, err = c.from[0].sender.Begin(within(t), j.number, j.from[0], j.span)
	require.ErrorIs(t, err, engine.ErrBusy)
	_, err = c.from[0].sender.Begin(within(t), 9, j.from[0], j.span)
	require.ErrorIs(t, err, engine.ErrFull)
	_, err = c.to[0].receive.Open(within(t), j.number, j.to[0], j.span)
	require.ErrorIs(t, err, engine.ErrBusy)
	_, err = c.to[0].receive.Open(within(t), 9, j.to[0], j.span)
	require.ErrorIs(t, err, engine.ErrFull)
	p := j.pushes[0]
	require.ErrorIs(t, p.Layer(within(t), 3), engine.ErrBounds)
	require.ErrorIs(t, p.Layer(within(t), -1), engine.ErrBounds)
	require.NoError(t, p.Layer(within(t), 1))
	require.ErrorIs(t, p.Layer(within(t), 1), engine.ErrBusy)
	require.ErrorIs(t, p.Finish(within(t)), engine.ErrBusy)
	require.NoError(t, p.Layer(within(t), 0))
	require.NoError(t, p.Layer(within(t), 2))
	for _, p := range j.pushes[1:] {
		for l := range 3 {
			require.NoError(t, p.Layer(within(t), l))
		}
	}
	over, cancel := context.WithCancel(within(t))
	cancel()
	require.ErrorIs(t, p.Finish(over), context.Canceled) // and may be called again
	var all sync.WaitGroup
	for _, p := range j.pushes {
		all.Go(func() {
			if err := p.Finish(within(t)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	j.check(t)
	require.ErrorIs(t, p.Finish(within(t)), engine.ErrClosed)
	require.ErrorIs(t, p.Layer(within(t), 0), engine.ErrClosed)
	require.NoError(t, p.Abort(within(t)))
	require.NoError(t, j.requests[0].Cancel(within(t)))
	require.NoError(t, j.requests[0].Err())
}

// TestGroupPlacesMax: what the other group sends of all requests has a limit, which ends the one
// that is beyond it, and is there again once all have ended (crowd.close).
func TestGroupPlacesMax(t *testing.T) {
	for _, sends := range []bool{true, false} {
		s := fourToTwo(t, newMem, false)
		s.config = func(at bool, g *GroupConfig) {
			if at == sends {
				g.PlacesMax = 1000
			}
		}
		c := newCrowd(t, s)
		j := c.newJob(t, layout.Span{To: 40})
		var ended error
		for n := uint64(1); ended == nil && n < 100; n++ { // a request has some hundred bytes
			for i, m := range c.to {
				_, err := m.receive.Open(within(t), n, j.to[i], j.span)
				require.NoError(t, err)
			}
			_, ended = c.from[0].sender.Begin(within(t), n, j.from[0], j.span)
		}
		want := ErrRefused
		if sends {
			want = engine.ErrFull
		}
		require.ErrorIs(t, ended, want)
	}
}

func TestGroupBadConfigs(t *testing.T) {
	s := fourToTwo(t, newMem, false)
	c := newCrowd(t, s)
	for what, change := range map[string]func(*GroupConfig){
		"no plan":         func(g *GroupConfig) { g.Plan = nil },
		"no such rank":    func(g *GroupConfig) { g.Index = 4 },
		"a negative rank": func(g *GroupConfig) { g.Index = -1 },
		"too few peers":   func(g *GroupConfig) { g.Peers = g.Peers[1:] },
		"a peer that is nil": func(g *GroupConfig) {
			g.Peers = make([]*engine.Peer, len(g.Peers))
		},
		"too few regions":      func(g *GroupConfig) { g.Regions = nil },
		"a region that is nil": func(g *GroupConfig) { g.Regions = []*engine.Region{nil} },
		"a negative timeout":   func(g *GroupConfig) { g.TakenTimeout = -1 },
		"a window of nothing":  func(g *GroupConfig) { g.Window = -1 },
		"too many requests":    func(g *GroupConfig) { g.RequestsMax = 1 << 30 },
		"no room for places":   func(g *GroupConfig) { g.PlacesMax = -1 },
		"short messages":       func(g *GroupConfig) { g.MessageMax = 10 },
		"an unknown operation": func(g *GroupConfig) {
			g.Edge = func(e *layout.Edge) { e.Op = 9 }
		},
		"a second one of a Mux": func(*GroupConfig) {},
	} {
		from, to := c.config(c.from[0], 0, true, s), c.config(c.to[0], 0, false, s)
		change(&from)
		change(&to)
		_, err := NewGroupSender(c.from[0].mux, from)
		require.Error(t, err, what)
		_, err = NewGroupReceiver(c.to[0].mux, to)
		require.Error(t, err, what)
	}
}

// TestGroupClose ends what is under way, with its reason.
func TestGroupClose(t *testing.T) {
	for rank := range 6 {
		c := newCrowd(t, fourToTwo(t, newMem, false))
		j := c.newJob(t, layout.Span{To: 40})
		j.begin(t)
		if rank < 4 {
			require.NoError(t, c.from[rank].sender.Close())
			_, err := c.from[rank].sender.Begin(within(t), 9, j.from[rank], j.span)
			require.ErrorIs(t, err, engine.ErrClosed)
		} else {
			require.NoError(t, c.to[rank-4].receive.Close())
			_, err := c.to[rank-4].receive.Open(within(t), 9, j.to[rank-4], j.span)
			require.ErrorIs(t, err, engine.ErrClosed)
		}
		j.awaitEnd(t)
		for i, err := range j.errs() {
			require.ErrorIs(t, err, engine.ErrClosed, "rank %d", i)
		}
	}
}

// TestGroupManyRequests hands two requests over at once, again and again, and has a rank end some
// of them at some moment. What is not ended is whole; of the others nothing is left, and nothing
// lands in their blocks any more.
func TestGroupManyRequests(t *testing.T) {
	for name, pull := range map[string]bool{"push": false, "pull": true} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			groupManyRequests(t, newSlowMem, pull)
		})
	}
	t.Run("shm", func(t *testing.T) { groupManyRequests(t, newShm, false) })
}

// TestSoakGroupManyRequests does so over backends of which nobody knows how far they are.
func TestSoakGroupManyRequests(t *testing.T) {
	for name, pull := range map[string]bool{"push": false, "pull": true} {
		t.Run(name, func(t *testing.T) {
			t.Run("mem", func(t *testing.T) { groupManyRequests(t, newMem, pull) })
			t.Run("shm", func(t *testing.T) { groupManyRequests(t, newShm, pull) })
			t.Run("tcp", func(t *testing.T) { groupManyRequests(t, newTCP, pull) })
		})
	}
}

func groupManyRequests(t *testing.T, open func(testing.TB) driver.Backend, pull bool) {
	s := fourToTwo(t, open, pull)
	spec := grouped(3, 4, 1024) // layers that backends copy by workers
	s.from = sidesOf(t, spec, layout.Placement{TP: 4, BlockTokens: 4})
	s.to = sidesOf(t, spec, layout.Placement{TP: 2, BlockTokens: 6})
	c := newCrowd(t, s)
	r := rand.New(rand.NewPCG(3, 4))
	ended := 0
	for range 25 {
		var all sync.WaitGroup
		jobs := [2]*job{c.newJob(t, layout.Span{To: 90}),
			c.newJob(t, layout.Span{From: 2, To: 90})}
		for _, j := range jobs {
			j.begin(t)
			for i, p := range j.pushes {
				all.Go(func() {
					for _, l := range layersOf(c.from[i].side) {
						if p.Layer(within(t), l) != nil {
							return
						}
					}
					_ = p.Finish(within(t))
				})
			}
			if rank, after := r.IntN(9), r.IntN(2000); rank < 6 {
				all.Go(func() {
					time.Sleep(time.Duration(after) * time.Microsecond) // any moment will do
					j.end(t, rank)
				})
			}
		}
		all.Wait()
		for _, j := range jobs {
			j.awaitEnd(t)
			ended += j.settle(t)
			j.give()
		}
	}
	t.Logf("%d of 100 ranks did not get their request", ended)
	require.NotZero(t, ended)
}

// settle checks what the receivers that are done hold, marks the blocks of the others, and looks
// again once all ranks have ended. It returns how many did not get it all.
func (j *job) settle(t *testing.T) (ended int) {
	t.Helper()
	for i, q := range j.requests {
		whole := q.Err() == nil
		if !whole {
			ended++
		}
		j.c.to[i].each(j.to[i], j.span, func(v *layout.View, unit int, token uint64, cell []byte) {
			if whole && string(cell) != string(cellOf(j.number, v, unit, token)) {
				testkit.FatalBroken(t, "a request that is done is not whole")
			}
			clear(cell)
		})
	}
	for i := range j.requests {
		j.c.to[i].each(j.to[i], j.span, func(_ *layout.View, _ int, _ uint64, cell []byte) {
			if !bytes.Equal(cell, make([]byte, len(cell))) {
				testkit.FatalBroken(t, "something landed after the end")
			}
		})
	}
	return ended
}
