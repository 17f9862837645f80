// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

var someDigest = layout.Digest{A: 1, B: 1 << 60, Cells: 3}

// groupMessages are one of each kind, well formed.
func groupMessages() map[string][]byte {
	fragment := func(to byte, k kind) []byte {
		return append(appendHeader(nil, to, k, 0, 7), 9, 0, 0, 0, 2, 0, 0, 0, 'a', 'b', 'c')
	}
	ask := question{3, 5, layout.Scope{Part: "k", Units: [2]int{1, 2},
		Tokens: layout.Span{From: 3, To: 1 << 33}}}
	return map[string][]byte{
		"begin": fragment(toReceiver, kindBegin), "grant": fragment(toSender, kindGrant),
		"layer":  appendLayer(nil, 7, 60),
		"digest": appendDigest(appendLayer(nil, 7, 60), someDigest),
		"done":   appendHeader(nil, toReceiver, kindDone, 0, 7),
		"abort":  appendHeader(nil, toReceiver, kindAbort, Aborted, 7),
		"taken":  appendHeader(nil, toSender, kindTaken, 0, 7),
		"end":    appendHeader(nil, toSender, kindEnd, OtherSpan, 7),
		"ask":    ask.append(appendHeader(nil, toSender, kindAsk, 0, 7)),
		"sum":    appendDigest(appendSum(nil, 7, 3), someDigest),
	}
}

func TestGroupMessagesReadBack(t *testing.T) {
	for name, b := range groupMessages() {
		m, err := decode(b)
		require.NoError(t, err, name)
		require.EqualValues(t, 7, m.session)
		switch name {
		case "begin", "grant":
			require.Equal(t, []any{uint32(9), uint32(2), "abc"},
				[]any{m.total, m.offset, string(m.bytes)}, name)
		case "digest":
			got, ok := decodeDigest(m.bytes)
			require.True(t, ok)
			require.Equal(t, someDigest, got)
		case "ask":
			q, ok := decodeQuestion(m.bytes)
			require.True(t, ok)
			require.Equal(t, m.bytes, q.append(nil))
			require.Equal(t, "k", q.scope.Part)
		}
	}
}

var somePlaces = places{layout.Tables{{1, 2, 1 << 31}, {}, {7}}, []token{
	{layerRange{0, 0, 4096}, []byte("a")}, {layerRange{3, 2, 7}, []byte("bc")}}}

func TestGroupPayloadsReadBack(t *testing.T) {
	for _, p := range []places{somePlaces, {}} {
		want := groupBegin{request: 1 << 60, plan: [32]byte{1, 2}, op: engine.Read, digests: true,
			seed: layout.Seed{9}, span: layout.Span{From: 2, To: 1 << 40}, places: p}
		b := want.append(nil)
		got, err := decodeGroupBegin(b)
		require.NoError(t, err)
		require.Equal(t, want, got)
		for n := range b {
			_, err = decodeGroupBegin(b[:n])
			require.ErrorIs(t, err, engine.ErrCorrupt, "%d of %d bytes", n, len(b))
		}
		_, err = decodeGroupBegin(append(b, 0))
		require.ErrorIs(t, err, engine.ErrCorrupt)
	}
}

func FuzzGroupPayloads(f *testing.F) {
	f.Add((&groupBegin{places: somePlaces}).append(nil))
	f.Add(somePlaces.append(nil))
	f.Add(groupMessages()["ask"][headerLen:])
	f.Fuzz(func(t *testing.T, b []byte) {
		if g, err := decodeGroupBegin(b); err == nil {
			require.Equal(t, b, g.append(nil))
		}
		if p, err := decodePlaces(b); err == nil {
			require.Equal(t, b, p.append(nil))
		}
		if q, ok := decodeQuestion(b); ok {
			require.Equal(t, b, q.append(nil))
		}
	})
}

// TestGroupBrokenProtocol: a rank that says what it must not ends the request on all ranks.
func TestGroupBrokenProtocol(t *testing.T) {
	layer := func(l int) func(uint64) []byte {
		return func(s uint64) []byte { return appendLayer(nil, s, l) }
	}
	fragment := func(to byte, k kind) func(uint64) []byte {
		return func(s uint64) []byte {
			return append(appendHeader(nil, to, k, 0, s), 1, 0, 0, 0, 0, 0, 0, 0, 'x')
		}
	}
	toReceivers := map[string]func(session uint64) []byte{
		"a layer that no edge carries": layer(3), "a layer number too large": layer(1 << 31),
		"a layer twice": layer(0),
		"a digest without a seed": func(s uint64) []byte {
			return appendDigest(appendLayer(nil, s, 1), someDigest)
		},
		"an answer without a question": func(s uint64) []byte {
			return appendDigest(appendSum(nil, s, 0), someDigest)
		},
		"a begin once more": fragment(toReceiver, kindBegin),
		"done with a reason": func(s uint64) []byte {
			return appendHeader(nil, toReceiver, kindDone, Aborted, s)
		},
		"a layer cut short": func(s uint64) []byte { return appendLayer(nil, s, 1)[:headerLen+3] },
	}
	toSenders := map[string]func(session uint64) []byte{
		"taken too early": func(s uint64) []byte {
			return appendHeader(nil, toSender, kindTaken, 0, s)
		},
		"a grant once more": fragment(toSender, kindGrant),
		"a grant of 0 bytes": func(s uint64) []byte {
			return append(appendHeader(nil, toSender, kindGrant, 0, s), make([]byte, 8)...)
		},
		"a byte of a grant of 0": func(s uint64) []byte {
			return append(appendHeader(nil, toSender, kindGrant, 0, s), make([]byte, 9)...)
		},
		"a question without digests": func(s uint64) []byte {
			return (&question{}).append(appendHeader(nil, toSender, kindAsk, 0, s))
		},
	}
	for _, list := range []map[string]func(uint64) []byte{toReceivers, toSenders} {
		for what, send := range list {
			t.Run(what, func(t *testing.T) {
				c := newCrowd(t, fourToTwo(t, newMem, false))
				j := c.newJob(t, layout.Span{To: 40})
				j.begin(t)
				require.NoError(t, j.pushes[0].Layer(within(t), 0))
				j.awaitEdges(t, 0, 1)
				to, msg := c.from[0].peers[0], send(j.pushes[0].links[0].session)
				if toSenders[what] != nil {
					to, msg = c.to[0].peers[3], send(j.pushes[3].links[0].session)
				}
				require.NoError(t, to.Notify(within(t), msg))
				j.awaitEnd(t)
				for i, err := range j.errs() {
					require.ErrorIs(t, err, engine.ErrCorrupt, "rank %d", i)
				}
			})
		}
	}
}

// TestGroupStrangers: messages of a session from another rank, and of none, are strays.
func TestGroupStrangers(t *testing.T) {
	c := newCrowd(t, fourToTwo(t, newMem, false))
	j := c.newJob(t, layout.Span{To: 40})
	j.begin(t)
	session := j.pushes[0].links[0].session
	abort := appendHeader(nil, toReceiver, kindAbort, Aborted, session)
	require.NoError(t, c.from[1].peers[0].Notify(within(t), abort)) // not its session
	for name, b := range groupMessages() {
		if name != "begin" && name != "grant" {
			require.NoError(t, c.from[0].peers[0].Notify(within(t), b))
			require.NoError(t, c.to[0].peers[0].Notify(within(t), b))
		}
	}
	j.push(t)
	j.check(t)
	require.EqualValues(t, 1+5, c.to[0].receive.Stats().Strays)
	require.EqualValues(t, 3, c.from[0].sender.Stats().Strays)
}

// TestGroupDoneTwice: the last word said again, as a second Finish does, is neither garbled nor a
// sign of life: it would hold the blocks for ever.
func TestGroupDoneTwice(t *testing.T) {
	r := newCrowd(t, fourToTwo(t, newMem, false)).to[0].receive
	q, l := newGroupRequest(r, 1), newInLink(r, 0, 1)
	q.links[0], l.q, l.granted = l, q, true
	for _, want := range []int{1, 0, 0} {
		l.receive(&message{kind: kindDone})
		require.Len(t, q.alive, want)
		require.Nil(t, q.end)
		for len(q.alive) > 0 {
			<-q.alive
		}
	}
}

// TestGroupBegunTwice: a second begin of a rank for one request is refused, and the first goes on.
func TestGroupBegunTwice(t *testing.T) {
	c := newCrowd(t, fourToTwo(t, newMem, false))
	j := c.newJob(t, layout.Span{To: 40})
	j.begin(t)
	again := groupBegin{request: j.number, plan: c.to[0].receive.plan, op: engine.Write,
		span: j.span}
	require.NoError(t, sendFragments(within(t), c.from[0].peers[0], toReceiver, kindBegin, 9,
		again.append(nil), MessageMin))
	await(t, "it is refused", func() bool { return c.from[0].sender.Stats().Strays == 1 })
	require.EqualValues(t, 1, c.to[0].receive.Stats().Ended[Garbled])
	j.push(t)
	j.check(t)
}

// TestGroupCloseRefuses: a begin that comes while a rank is being closed is refused at once.
func TestGroupCloseRefuses(t *testing.T) {
	c := newCrowd(t, fourToTwo(t, newMem, false))
	r := c.to[0].receive
	r.running.Add(1) // Close waits for it
	done := sync.OnceFunc(r.running.Done)
	defer done()
	closed := make(chan error, 1)
	go func() { closed <- r.Close() }()
	await(t, "it refuses", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.closed
	})
	begin := groupBegin{request: 1, plan: r.plan, op: engine.Write}
	require.NoError(t, sendFragments(within(t), c.from[0].peers[0], toReceiver, kindBegin, 9,
		begin.append(nil), MessageMin))
	await(t, "it is refused", func() bool { return c.from[0].sender.Stats().Strays == 1 })
	require.EqualValues(t, 1, r.Stats().Ended[Closed])
	require.Empty(t, closed)
	done()
	require.NoError(t, <-closed)
}

// TestGroupGarbage sends all ranks messages with a flipped bit while requests are handed over.
func TestGroupGarbage(t *testing.T) {
	c := newCrowd(t, fourToTwo(t, newMem, false))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		r := rand.New(rand.NewPCG(5, 6))
		for !isClosed(stop) {
			for _, b := range groupMessages() {
				b[r.IntN(len(b))] ^= byte(1 << r.IntN(8))
				_ = c.from[r.IntN(4)].peers[r.IntN(2)].Notify(within(t), b)
				_ = c.to[r.IntN(2)].peers[r.IntN(4)].Notify(within(t), b)
			}
		}
	}()
	for range 20 {
		c.handOver(t, layout.Span{To: 40}).give()
	}
	close(stop)
	<-stopped
}

// TestGroupDisagreement: ranks that do not mean the same are refused at once, with the reason.
func TestGroupDisagreement(t *testing.T) {
	other, err := layout.NewPlan(sidesOf(t, grouped(3, 4, 16), layout.Placement{TP: 4,
		BlockTokens: 4}), sidesOf(t, grouped(3, 4, 16), layout.Placement{TP: 2, BlockTokens: 6,
		Order: layout.VLLMHND}))
	require.NoError(t, err)
	for what, c := range map[string]struct {
		config func(sends bool, g *GroupConfig)
		span   layout.Span // of sending rank 1
		want   error
	}{
		"plan": {func(sends bool, g *GroupConfig) {
			if sends && g.Index == 1 {
				g.Plan = other
			}
		}, layout.Span{To: 40}, ErrGeometry},
		"operation": {func(sends bool, g *GroupConfig) {
			if !sends {
				g.Edge = func(e *layout.Edge) { e.Op = driver.Read }
			}
		}, layout.Span{To: 40}, ErrGeometry},
		"span": {nil, layout.Span{From: 1, To: 40}, ErrSpan},
	} {
		t.Run(what, func(t *testing.T) {
			s := fourToTwo(t, newMem, false)
			if c.config != nil {
				s.config = c.config
			}
			crowd := newCrowd(t, s)
			j := crowd.newJob(t, layout.Span{To: 40})
			j.open(t)
			_, err := crowd.from[1].sender.Begin(within(t), j.number, j.from[1], c.span)
			require.ErrorIs(t, err, c.want)
			for i := range j.requests {
				require.Empty(t, j.ready(t, i))
				require.ErrorIs(t, j.requests[i].Err(), c.want)
				if l := j.requests[i].links[1]; l != nil && l.edge != nil {
					require.False(t, l.granted, "a grant for what has ended")
				}
			}
			_, err = crowd.from[0].sender.Begin(within(t), j.number, j.from[0], j.span)
			require.ErrorIs(t, err, c.want, "a rank that comes late")
		})
	}
}

// TestLeasesOfOneLayerAreFew: a peer may name each layer of a region once, in order.
func TestLeasesOfOneLayerAreFew(t *testing.T) {
	side := &layout.Side{Views: []layout.View{{Layer: 2, Region: 0}, {Layer: 3, Region: 0},
		{Layer: 2, Region: 1}}}
	good := []token{{layerRange{0, 0, 3}, nil}, {layerRange{0, 3, 9}, nil},
		{layerRange{1, 2, 3}, nil}}
	require.NoError(t, checkLeases(nil, side))
	require.NoError(t, checkLeases(good, side))
	for name, p := range map[string]layerRange{"once more": {1, 2, 3}, "in part": {1, 1, 4},
		"region before": {0, 9, 10}, "no layer there": {1, 3, 9}, "none": {1, 3, 3},
		"no such region": {2, 2, 3}} {
		bad := append(slices.Clone(good), token{p, nil})
		require.ErrorContains(t, checkLeases(bad, side), "a lease of layers", name)
	}
}
