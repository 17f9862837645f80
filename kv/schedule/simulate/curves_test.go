// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestDefaultCurves compares with what docs/simulate.md derives: 80 layers, a width of 8192, eight
// cards of 312 TFLOPS of which 0.39 are reached, and 2.039 TB/s of which 0.84 are.
func TestDefaultCurves(t *testing.T) {
	c := DefaultCurves()
	flops := 8 * 312e12 * 0.39
	require.InEpsilon(t, 80*22*8192.*8192./flops*1e9, c.Prefill[1], 0.01)
	require.InEpsilon(t, 80*4*8192./flops*1e9, c.Prefill[2], 0.01)
	bytes := 8 * 2.039e12 * 0.84
	require.InEpsilon(t, 141.2e9/bytes*1e9, c.Decode[0], 0.01)
	require.InEpsilon(t, 2*70.6e9/flops*1e9, c.Decode[1], 0.01)
	require.InEpsilon(t, 327680/bytes*1e9, c.Decode[2], 0.01)
}

func TestSteps(t *testing.T) {
	c := Curves{Decode: [3]float64{10, 2, 1}}
	// 10+4+5, then 2 tokens more: 21, 23
	require.Equal(t, time.Duration(19), c.steps(1, 2, 5))
	require.Equal(t, time.Duration(63), c.steps(3, 2, 5))
	for long, want := range map[time.Duration]int64{-1: 0, 0: 0, 1: 1, 19: 1, 20: 2, 40: 2, 41: 3,
		63: 3} {
		require.Equal(t, want, c.stepsWithin(long, 2, 5), long)
	}
	require.Equal(t, longest, c.steps(1<<40, 1<<20, 1<<40))
	// no part for context
	c.Decode[2] = 0
	require.Equal(t, int64(1e9), c.stepsWithin(14e9, 2, 5))
}

func TestFitCurves(t *testing.T) {
	truth := Curves{Prefill: [3]float64{9e6, 1e5, 2}, Decode: [3]float64{8e6, 2e5, 30}}
	var text strings.Builder
	for _, n := range []int{1000, 8000, 32000, 128000} {
		for _, p := range []int{0, n / 2} {
			fmt.Fprintf(&text, `{"tokens":%d,"cached":%d,"ms":%v}`+"\n\n", n, p,
				float64(truth.prefill(n, p))/1e6)
		}
	}
	prefillOnly := text.String()
	for _, batch := range []int{1, 8, 64} {
		for _, each := range []int64{100, 10000} {
			context := int64(batch) * each
			fmt.Fprintf(&text, `{"batch":%d,"context":%d,"ms":%v}`+"\n", batch, context,
				float64(truth.steps(1, batch, context))/1e6)
		}
	}
	got, off, err := FitCurves(strings.NewReader(text.String()), Curves{})
	require.NoError(t, err)
	require.Less(t, off, 1e-6)
	for k := range 3 {
		require.InEpsilon(t, truth.Prefill[k], got.Prefill[k], 1e-3)
		require.InEpsilon(t, truth.Decode[k], got.Decode[k], 1e-3)
	}
	got, _, err = FitCurves(strings.NewReader(prefillOnly), DefaultCurves())
	require.NoError(t, err)
	require.Equal(t, DefaultCurves().Decode, got.Decode)

	// Two points of which the longer one takes less for a token: no part is below 0.
	got, off, err = FitCurves(strings.NewReader(`{"tokens":1000,"cached":0,"ms":100}
		{"tokens":2000,"cached":0,"ms":150}`), DefaultCurves())
	require.NoError(t, err)
	require.Less(t, off, 1e-9)
	require.InEpsilon(t, 50e6, got.Prefill[0], 1e-6)
	// (c/100-1)² + (c/200-1)² is least at 120, which is 20 and 40 % off.
	got, off, err = FitCurves(strings.NewReader(`{"tokens":1000,"ms":100}
		{"tokens":1000,"ms":200}`), DefaultCurves())
	require.NoError(t, err)
	require.Equal(t, 120*ms, got.prefill(1000, 0))
	require.InDelta(t, 0.4, off, 1e-9)
	// The longer one takes less: all that is left is a fixed part, (1/100+1/50)/(1/100²+1/50²).
	got, _, err = FitCurves(strings.NewReader(`{"tokens":1000,"ms":100}
		{"tokens":2000,"ms":50}`), DefaultCurves())
	require.NoError(t, err)
	require.Equal(t, [3]float64{60e6, 0, 0}, got.Prefill)
}

func TestFitCurvesErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "no points",
		"\n{":                              "line 2: ",
		`{"tokens":1,"ms":1,"x":1}`:        "unknown field",
		`{"ms":1}`:                         "line 1: want tokens, cached and ms, or batch",
		`{"tokens":1,"batch":1}`:           "want tokens, cached and ms, or batch",
		`{"tokens":1,"ms":0}`:              "want ms above 0",
		`{"tokens":1,"ms":1e99}`:           "want ms above 0",
		`{"tokens":10,"cached":10,"ms":1}`: "cached below them",
		`{"batch":0,"context":1,"ms":1}`:   "want a batch of 1",
		`{"tokens":1,"ms":1} {}`:           "want tokens",
		strings.Repeat(" ", pointLineMax+1) + "1": "line 1: ",
	} {
		_, _, err := FitCurves(strings.NewReader(text), DefaultCurves())
		require.ErrorContains(t, err, want, text)
	}
}

func TestTimesStayWithinBounds(t *testing.T) {
	c := Curves{Prefill: [3]float64{1e15, 1e15, 1e15}}
	require.Equal(t, longest, c.prefill(math.MaxInt32, 0))
}
