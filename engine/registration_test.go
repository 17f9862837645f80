// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestConnectKeepsNothingOfTheDescription uses the buffer of a description again: a write goes to
// the region that was described under its name.
func TestConnectKeepsNothingOfTheDescription(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	src := register(t, a, "src", 64)
	fill(src.Bytes(), 5)
	one, two := register(t, b, "one", 64), register(t, b, "two", 64)
	describe := func(r *Region) []byte {
		d, err := b.Describe(r)
		require.NoError(t, err)
		return d
	}
	buffer := describe(one)
	p, err := a.Connect(within(t), buffer)
	require.NoError(t, err)
	other := describe(two)
	copy(buffer, other[:min(len(other), len(buffer))])
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, remote(t, p, "one"), 0, 64))
	run(t, tr)
	require.Equal(t, src.Bytes(), one.Bytes())
	require.NotEqual(t, src.Bytes(), two.Bytes())
	again := describe(two)
	require.NoError(t, p.Refresh(again))
	clear(again)
	check(t, tr.Reset())
	check(t, tr.Add(src, 0, remote(t, p, "two"), 0, 64))
	run(t, tr)
	require.Equal(t, src.Bytes(), two.Bytes())
}

func TestDescribeRegionOfAnotherEngine(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	_, err := a.Describe(register(t, b, "r", 64))
	require.ErrorIs(t, err, ErrBounds)
}

// TestImportsOfOldRegistrations registers a region anew many times: what was imported of the
// old ones is dropped, once no transfer lists them.
func TestImportsOfOldRegistrations(t *testing.T) {
	e, other := open(t, "e"), open(t, "other")
	src := register(t, e, "src", 4096)
	mine := register(t, other, "mine", 4096)
	self, err := e.Self()
	require.NoError(t, err)
	peer := connect(t, other, e)
	held := transfer(t, self, Write)
	var first *Remote
	for i := range 200 {
		r := register(t, e, "kv", 4096)
		d, err := e.Describe()
		require.NoError(t, err)
		require.NoError(t, peer.Refresh(d))
		for p, from := range map[*Peer]*Region{self: src, peer: mine} {
			m := remote(t, p, "kv")
			tr := transfer(t, p, Write)
			check(t, tr.Add(from, 0, m, 0, 4096))
			run(t, tr)
			require.Less(t, tr.groups[0].descs[0].RemoteKey, uint32(16))
			check(t, tr.Close())
			if i == 0 && p == self {
				first = m
				check(t, held.Add(src, 0, m, 0, 1))
			}
		}
		check(t, r.Close())
	}
	first.mu.Lock()
	require.True(t, first.imports[0].known, "dropped though a transfer lists it")
	first.mu.Unlock()
	check(t, held.Close())
	first.mu.Lock()
	require.False(t, first.imports[0].known)
	first.mu.Unlock()
}

// TestMeter measures a connection by the bytes of all transfers over the time in which any was
// under way, and forgets.
func TestMeter(t *testing.T) {
	const declared = 1e9
	var m meter
	now := time.Duration(0)
	for range rateSamplesMin { // one at a time: 1 MiB in 1 ms
		m.enter(now)
		now += time.Millisecond
		m.leave(now, 1<<20, true)
		now += time.Second
	}
	now -= time.Second
	alone, measured := m.estimate(now, declared)
	require.True(t, measured)
	require.InEpsilon(t, float64(1<<20)*1000, alone, 0.001)
	for range 4 { // 128 at once, a millisecond each, one behind the other
		for range 128 {
			m.enter(now)
		}
		for range 128 {
			now += time.Millisecond
			m.leave(now, 1<<20, true)
		}
	}
	rate, _ := m.estimate(now, declared)
	require.InEpsilon(t, alone, rate, 0.01, "a burst has changed the rate")
	m.enter(now)
	now += time.Minute
	m.leave(now, 1<<20, false)
	rate, _ = m.estimate(now, declared)
	require.Less(t, rate, alone)
	rate, _ = m.estimate(now+rateHalfLife, alone*100)
	require.Greater(t, rate, 40*alone)
	_, measured = m.estimate(now+time.Hour, declared)
	require.False(t, measured)
}
