// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"math/rand/v2"
	"runtime"
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
		{Off: 1<<40 - 1, Len: 1}}, blocks(1), blocks(128), irregular()} {
		b, err := Encode(nil, lease(ranges))
		require.NoError(t, err)
		d, err := Decode(b)
		require.NoError(t, err)
		require.Equal(t, ranges, d.Regions[0].Only)
	}
}

// irregular are ranges that repeat for a while, in other places and next to others.
func irregular() (list driver.Ranges) {
	r, end := rand.New(rand.NewPCG(3, 4)), uint64(0)
	for range 200 {
		for i, n := r.IntN(8), r.IntN(20); n > 0; i, n = i+1, n-1 {
			list = append(list, driver.Range{Off: end + 1 + uint64(i%8), Len: uint64(1 + i%3)})
			end = list[len(list)-1].Off + list[len(list)-1].Len
		}
	}
	return list
}

// TestRangesAreFewBytes: 512 blocks in each of 160 planes would take 300 KB one by one.
func TestRangesAreFewBytes(t *testing.T) {
	b, err := Encode(nil, lease(blocks(512)))
	require.NoError(t, err)
	require.Less(t, len(b), 2<<10)
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

// TestBadRepeats are encodings that no list has.
func TestBadRepeats(t *testing.T) {
	const far = "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01" // a gap of half of all numbers
	for b, want := range map[string]string{
		"\x02\x03":                    "has 3 where at most 2",
		"\x02\x02\x03\x01":            "ends early",
		"\x02\x00\x02\x00":            "a repeat of no ranges",
		"\x02\x00\x00\x00":            "a repeat of no ranges",
		"\x02\x01\x03\x01\x00\x01":    "a repeat of no ranges",
		"\x02\x01\x03\x01\x01\x00":    "a repeat of no ranges",
		"\x02\x01\x03\x01\x01\x02":    "has 2 where at most 1",
		"\x02\x01\x03\x01\x02\x01":    "has 2 where at most 1",
		"\x02\x02" + far + far:        "too large",
		"\x02\x01" + far + "\x01\x01": "too large",
		"\x01\x01\x03" + far:          "has 922",
	} {
		r := &reader{rest: []byte(b), spare: 1 << 20}
		r.ranges()
		require.ErrorContains(t, r.err, want, "%x", b)
	}
}

// TestRangesOfManyRegions: what it takes to read ranges does not depend on how many regions have
// them.
func TestRangesOfManyRegions(t *testing.T) {
	d := lease(driver.Ranges{{Off: 1, Len: 1}})
	for range 2000 {
		d.Regions = append(d.Regions, d.Regions[0])
	}
	b, err := Encode(nil, d)
	require.NoError(t, err)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err = Decode(b)
	runtime.ReadMemStats(&after)
	require.NoError(t, err)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(64*len(b)))
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
