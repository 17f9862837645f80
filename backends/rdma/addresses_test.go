// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/promise"
)

// TestAddressesComeRound grants more often than there are addresses. Addresses are given out again
// only when the queue pairs are gone over which requests for them may be under way, and those of a
// grant that lasts never. What uses the queue pairs then goes on.
func TestAddressesComeRound(t *testing.T) {
	p := openPair(t, Config{addresses: 4 * areaUnit})
	l, lasting := register(t, p.near, 100), register(t, p.far, 100)
	remote, told, again := p.imports(t, lasting), map[uint64][]uint32{}, 0
	for range 12 {
		r := register(t, p.far, 100)
		key := p.imports(t, r)
		if r.at/areaUnit == lasting.at/areaUnit {
			promise.Breaks(t, "two grants have the addresses from %#x on", r.at)
		}
		if slices.ContainsFunc(told[r.at/areaUnit], fakePairIsThere) {
			promise.Breaks(t, "addresses from %#x on are given out again while a queue pair is "+
				"there whose peer was told of them", r.at)
		}
		again += len(told[r.at/areaUnit])
		told[r.at/areaUnit] = fakeOf(p.far).pairs()
		require.NoError(t, p.await(t, p.write(t, l, key, nil)))
		require.NoError(t, p.await(t, p.write(t, l, remote, nil)))
		require.NoError(t, r.Revoke(t.Context()))
	}
	require.NotZero(t, again, "no addresses were given out again")
}

// TestAddressesOfGrants has grants of several sizes within two rounds.
func TestAddressesOfGrants(t *testing.T) {
	memoryOf := func(base, size uint64) *memory {
		return &memory{span: span{base: base, size: size}}
	}
	a := addresses{end: 8 * areaUnit, granted: map[*memory]area{}}
	take := func(m *memory, want uint64) {
		t.Helper()
		at, ok := a.take(m)
		require.True(t, ok)
		require.Equal(t, want, at)
	}
	lasting, across := memoryOf(areaUnit+5, 10), memoryOf(areaUnit-1, 2)
	take(memoryOf(4096, areaUnit), 4096) // two units, since it begins within one
	take(lasting, 2*areaUnit+5)
	take(across, 4*areaUnit-1)
	take(memoryOf(0, 3*areaUnit), 5*areaUnit)
	_, ok := a.take(memoryOf(0, 1))
	require.False(t, ok)
	for m := range a.granted {
		if m != lasting {
			a.giveBack(m)
		}
	}
	a.begin(a.all())
	a.giveBack(lasting) // all the same, this round leaves its addresses out
	take(memoryOf(0, 2*areaUnit), 0)
	take(memoryOf(0, areaUnit), 3*areaUnit)
	_, ok = a.take(memoryOf(0, 5*areaUnit))
	require.False(t, ok)
}
