// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func lease(ranges driver.Ranges) *Description {
	return &Description{Backends: []Backend{{Name: "tcp"}}, Regions: []Region{{Name: "kv",
		Size: 1 << 40, Only: ranges, Set: 1, Tokens: [][]byte{{1}}}}}
}

// blocks are the ranges of a request in a pool of K and V apart, layer by layer: 80 layers of
// 4,096 blocks of 8 KiB, of which the request has n.
func blocks(n int) driver.Ranges {
	var list []driver.Range
	table := rand.New(rand.NewPCG(1, 2)).Perm(4096)[:n]
	for plane := range uint64(2 * 80) {
		for _, block := range table {
			list = append(list, driver.Range{Off: plane*4096*8192 + uint64(block)*8192, Len: 8192})
		}
	}
	set, err := driver.NewRanges(list, 1<<40)
	if err != nil {
		panic(err)
	}
	return set
}

func TestRangesTravel(t *testing.T) {
	for _, ranges := range []driver.Ranges{nil, {{Off: 0, Len: 1}}, {{Off: 5, Len: 3},
		{Off: 1<<40 - 1, Len: 1}}, blocks(128)} {
		b, err := Encode(nil, lease(ranges))
		require.NoError(t, err)
		d, err := Decode(b)
		require.NoError(t, err)
		require.Equal(t, ranges, d.Regions[0].Only)
	}
}

// TestRangesAreFewBytes: 512 blocks in each of 160 planes would take 300 KB one by one.
func TestRangesAreFewBytes(t *testing.T) {
	b, err := Encode(nil, lease(blocks(512)))
	require.NoError(t, err)
	require.Less(t, len(b), 12<<10)
}

func TestBadRanges(t *testing.T) {
	for name, ranges := range map[string]driver.Ranges{
		"empty":    {{Off: 3}},
		"past":     {{Off: 1 << 40, Len: 1}},
		"overlap":  {{Off: 0, Len: 2}, {Off: 1, Len: 2}},
		"adjacent": {{Off: 0, Len: 2}, {Off: 2, Len: 2}},
		"none":     {},
	} {
		b := seal(appendRegion(append([]byte("x"), 0), "", &lease(ranges).Regions[0]), 0)
		r := &reader{rest: b[2 : len(b)-checksumLen], spare: 1 << 20}
		region := r.region(1, nil)
		if r.err == nil {
			r.err = region.Only.Check(region.Size)
		}
		require.Error(t, r.err, name)
	}
}

// TestRangesDoNotSwell: a few bytes may name no more ranges than one lease has.
func TestRangesDoNotSwell(t *testing.T) {
	var list driver.Ranges
	for i := range uint64(driver.RangesMax) {
		list = append(list, driver.Range{Off: 2 * i, Len: 1})
	}
	d := lease(list)
	b, err := Encode(nil, d)
	require.NoError(t, err)
	require.Less(t, len(b), 4<<10)
	_, err = Decode(b)
	require.NoError(t, err)
	d.Regions = append(d.Regions, d.Regions[0])
	b, err = Encode(nil, d)
	require.NoError(t, err)
	_, err = Decode(b)
	require.ErrorIs(t, err, driver.ErrCorrupt)
	require.ErrorContains(t, err, "too many ranges")
}

func BenchmarkRanges(b *testing.B) {
	d := lease(blocks(128))
	for b.Loop() {
		packed, _ := Encode(nil, d)
		_, _ = Decode(packed)
	}
}
