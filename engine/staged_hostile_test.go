// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
)

// TestStagedForgeries sends the peer's engine requests that it must not obey: nothing of its
// memory changes, and honest ones go on.
func TestStagedForgeries(t *testing.T) { testkit.InVirtualTime(t, stagedForgeries) }

func stagedForgeries(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	b := newHost(t, "b")
	honest, liar := newHost(t, "honest"), newHost(t, "liar")
	p, q := connect(t, honest.e, b.e), connect(t, liar.e, b.e)
	good, bad := transfer(t, p, Write), transfer(t, q, Write)
	check(t, good.Add(honest.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
	m := remote(t, q, "hbm")
	check(t, bad.Add(liar.hbm, 0, m, 0, hostBytes))
	fill(honest.mem, 5) // what was written stays in the slots, for a forgery to place
	fill(liar.mem, 77)
	run(t, good)
	run(t, bad)
	fill(b.mem, 42)
	before := bytes.Clone(b.mem)

	token := m.tokens[liar.e.stager.lane.index]
	honestHop := wire.Hop{Slot: 1, Number: 1 << 20, Token: token, Count: 1}
	lie := func(change func(h *wire.Hop)) []byte {
		h := honestHop
		change(&h)
		return h.Append([]byte{wire.KindPut})
	}
	changed := func(b []byte, at int, to byte) []byte {
		b = bytes.Clone(b)
		b[at] = to
		return b
	}
	secret := changed(token, 0, token[0]+1)
	key := changed(token, 16, token[16]+1)
	for name, msg := range map[string][]byte{
		"a slot too many": lie(func(h *wire.Hop) { h.Slot = slotsMax }),
		"another secret":  lie(func(h *wire.Hop) { h.Token = secret }),
		"another key":     lie(func(h *wire.Hop) { h.Token = key }),
		"too long a list": lie(func(h *wire.Hop) { h.Count = wire.DescsMax + 1 }),
		"no list":         lie(func(h *wire.Hop) { h.Count = 0 }),
		"too many entries": lie(func(h *wire.Hop) {
			h.Paged, h.Count, h.EntryLen = true, 2, pieceBytes
		}),
		"empty entries": lie(func(h *wire.Hop) { h.Paged, h.Count = true, 2 }),
		"past the end": lie(func(h *wire.Hop) {
			h.Paged, h.EntryLen, h.Base = true, 8, 1<<60
		}),
		"strides that lap": lie(func(h *wire.Hop) {
			h.Paged, h.Count, h.EntryLen, h.Stride = true, 9, 8, 1<<62
		}),
		"flags of no-one": changed(lie(func(*wire.Hop) {}),
			1+wire.HopName+wire.HopToken, 0xff),
		"cut":                lie(func(*wire.Hop) {})[:1+20],
		"nothing":            {wire.KindPut},
		"an unknown kind":    {200},
		"a window from afar": {wire.KindWindow},
		"a second hello":     append([]byte{wire.KindHello}, make([]byte, 200)...),
		"a short withdrawal": {wire.KindWithdrawn, 1},
		"an answer to none":  append([]byte{wire.KindHopEnd}, make([]byte, 30)...),
		"the end of a part":  {wire.KindPart, wire.LastPart, 1, 2, 3},
	} {
		require.NoError(t, q.sendOne(within(t), q.conns[0].lane, msg), "%s", name)
	}
	behind := transfer(t, q, Read)
	check(t, behind.Add(liar.hbm, 0, m, 0, 1))
	run(t, behind) // its request came behind them all
	until(t, "the hops have ended", func() bool { return b.e.slots.posted() == 0 })
	require.True(t, bytes.Equal(b.mem, before), "a forgery has changed the peer's memory")
	fill(honest.mem, 3)
	run(t, good)
	if !bytes.Equal(b.mem, honest.mem) || bytes.Equal(before, b.mem) {
		t.Error("the peer's memory has other bytes than the honest ones")
	}
	run(t, bad) // its own rights it has kept
	require.True(t, bytes.Equal(b.mem, liar.mem), "an honest request of the same peer has failed")
	require.Zero(t, len(b.e.Notifications()), "the program has received messages")
}

// TestStagedRevokeWaitsForHops waits for the hops through a memory, and lets none begin any more.
func TestStagedRevokeWaitsForHops(t *testing.T) {
	testkit.InVirtualTime(t, stagedRevokeWaitsForHops)
}

func stagedRevokeWaitsForHops(t *testing.T) {
	h := newHost(t, "h")
	s := h.e.stager
	memory := h.hbm.mems[s.lane.index].(*stagedMemory)
	token, err := memory.AppendToken(nil)
	check(t, err)
	m, err := s.enter(token)
	check(t, err)
	soon, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, memory.Revoke(soon), ErrTimeout, "with a hop under way")
	revoked := make(chan error, 1)
	go func() { revoked <- memory.Revoke(within(t)) }()
	require.ErrorIs(t, second(s.enter(token)), ErrRevoked, "a token of revoked memory")
	m.leave()
	check(t, <-revoked)
	require.ErrorIs(t, second(s.enter(token)), ErrRevoked, "a token of memory that is forgotten")
	check(t, memory.Revoke(within(t)))
}
