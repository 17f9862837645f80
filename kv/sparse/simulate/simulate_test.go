// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"io"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/sparse"
)

func few() *Generated {
	return &Generated{Seed: 3, Layers: 3, Context: 8192, Queries: 2, Accepted: 1.7, Warm: 4,
		Steps: 5}
}

// The check of the generator: 6,400 slots keep the mean below 200, the first step is a spike
// without a warm-up, and none with it. And a seed is all that it depends on.
func TestCompare(t *testing.T) {
	claims, spike, err := Compare(t.Context(), DefaultCard(), 1, 12, 8)
	require.NoError(t, err)
	require.Len(t, claims, 8)
	warm, _, _ := spread(spike.Warm)
	require.Less(t, warm, 200.0)
	require.Less(t, spike.Warm[0], 1.5*warm)
	cold, _, _ := spread(spike.Cold[1:])
	require.Greater(t, spike.Cold[0], 5*cold)
	again, _, err := Compare(t.Context(), DefaultCard(), 1, 12, 8)
	require.NoError(t, err)
	require.Equal(t, claims, again)
	d := xml.NewDecoder(bytes.NewReader(Draw(spike)))
	for err == nil {
		_, err = d.Token()
	}
	require.Equal(t, io.EOF, err)
}

// A card on which nothing fits has no gain.
func TestCompareRefused(t *testing.T) {
	card := DefaultCard()
	card.Memory = 1000
	_, _, err := Compare(t.Context(), card, 1, 1, 2)
	require.ErrorIs(t, err, driver.ErrBounds)
	require.ErrorContains(t, err, "not one sequence of 32768 entries")
}

// The fixed time is what DefaultCard says: it gives the first gain of the report.
func TestFit(t *testing.T) {
	s := Settings[0]
	c, err := Count(t.Context(), &Generated{Seed: 1, Context: s.Context, Queries: s.Queries,
		Accepted: s.Accepted, Warm: WarmUp, Steps: 20}, 0, s.Ratio)
	require.NoError(t, err)
	card := DefaultCard()
	gain := card.Run(c.Load(s.Accepted), Chosen).Tokens / card.Run(c.Bare(s.Accepted), None).Tokens
	require.InDelta(t, s.Gain, 100*(gain-1), 0.5)
}

// A recorded series misses what the generated one does that was recorded.
func TestRecorded(t *testing.T) {
	var file bytes.Buffer
	var step sparse.TopK
	src := few()
	for src.Next(&step) == nil {
		for layer, entries := range step.Entries {
			require.NoError(t, json.NewEncoder(&file).Encode(map[string]any{"step": step.Step,
				"layer": layer, "context": step.Context,
				"entries": slices.Collect(slices.Chunk(entries, TopK))}))
		}
	}
	want, err := Count(t.Context(), few(), 0, 0.5)
	require.NoError(t, err)
	got, err := Count(t.Context(), sparse.NewSeriesReader(&file), 0, 0.5)
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Len(t, want.Misses, 5)
	require.Equal(t, 4096, want.Slots)
	mean, low, high := want.All()
	require.Less(t, low, mean)
	require.Less(t, mean, high)
}

func TestCountRefused(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Count(ctx, few(), 4096, 0)
	require.ErrorIs(t, err, context.Canceled)
	_, err = Count(t.Context(), few(), 2048, 0)
	require.ErrorIs(t, err, driver.ErrBounds)
	require.ErrorContains(t, err, "give it more")
	_, err = Count(t.Context(), &Generated{Context: 8192}, 4096, 0)
	require.ErrorIs(t, err, sparse.ErrSeries, "no step")
	_, err = Count(t.Context(), few(), -1, 0)
	require.ErrorIs(t, err, driver.ErrBounds)
}

func TestCurve(t *testing.T) {
	for name, c := range map[string]Curve{"1GiB": curves["1GiB"], "4GiB": curves["4GiB"],
		"10:2,20:3": {{10, 2}, {20, 3}}} {
		got, err := CurveOf(name)
		require.NoError(t, err)
		require.Equal(t, c, got)
		for _, p := range c {
			require.InDelta(t, p.Micros, c.Micros(p.Entries), 1e-9)
		}
	}
	c := Curve{{10, 2}, {20, 3}, {30, 5}}
	for entries, micros := range map[float64]float64{0: 0, 1: 1.1, 15: 2.5, 25: 4, 40: 7} {
		require.InDelta(t, micros, c.Micros(entries), 1e-9)
	}
	require.Zero(t, Curve{{10, 1}, {20, 100}}.Micros(1), "a line that is below 0 there")
	for _, text := range []string{"", "2GiB", "10:2", "10:2,20", "10:2,20:x", "10:2,10:3",
		"10:2,20:2", "-1:2,20:3", "10:NaN,20:3", "10:0,20:3"} {
		_, err := CurveOf(text)
		require.Error(t, err, text)
	}
}

// What a layer takes, by hand: a batch of 10, so that the indexer takes 20, the attention 40, of
// which 10 has to wait, and the rest 100 + 10.
func TestOverlap(t *testing.T) {
	card := Card{Fixed: 100, Query: 1, Attention: 4, Index: 2, Split: 1,
		Gather: Curve{{100, 10}, {200, 20}}} // 0.1 µs an entry
	l := Load{Context: 1024, Queries: 1, Accepted: 1, Asked: 40, Slots: 40}
	for misses, want := range map[float64][3]float64{
		0: {170, 170, 170},
		// 100 entries take 10, less than the attention to those that are there
		10: {180, 171, 174},
		// and here 30 of 40 miss: 300 take 30, the early attention 10
		30: {200, 191, 174},
	} {
		for way, micros := range want {
			require.InDelta(t, micros, card.layer(l, 10, misses, Overlap(way)), 1e-9,
				"%v misses, %v", misses, Overlap(way))
		}
	}
	// So many sequences fit, and each layer has the best way for its misses.
	l.Misses = []float64{10, 0, 30}
	card.Memory = uint64(10.5 * 3 * (40*EntryBytes + 1024*KeyBytes))
	r := card.Run(l, Chosen)
	require.Equal(t, 10, r.Batch)
	require.InDelta(t, 40*10*EntryBytes, r.Bytes, 1e-9)
	for _, way := range []Overlap{None, DA, DBA} {
		require.LessOrEqual(t, r.Step, card.Run(l, way).Step)
	}
	require.InDelta(t, r.Step, 3*170+r.Stall, 1e-9)
	require.InDelta(t, 10e6/r.Step, r.Tokens, 1e-9)
	card.Memory = 1000
	require.Zero(t, card.Run(l, Chosen))
}
