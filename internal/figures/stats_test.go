// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestPercentileIsNearestRank(t *testing.T) {
	v := []int{10, 20, 30, 40, 50}
	for _, tc := range []struct {
		p    float64
		want int
	}{{0, 10}, {1, 10}, {20, 10}, {21, 20}, {50, 30}, {99, 50}, {100, 50}} {
		if got := Percentile(v, tc.p); got != tc.want {
			t.Errorf("p%v = %d, want %d", tc.p, got, tc.want)
		}
	}
	if got := Percentile[int](nil, 50); got != 0 {
		t.Errorf("percentile of nothing = %d", got)
	}
}

func TestSamplesKeepTheNewest(t *testing.T) {
	s := NewSamples(100)
	for i := 1; i <= 250; i++ {
		s.Add(time.Duration(i))
	}
	if lo, hi := s.Percentile(1), s.Percentile(100); lo != 151 || hi != 250 {
		t.Errorf("kept %d..%d, want 151..250", lo, hi)
	}
	s.Add(1000)
	if hi := s.Percentile(100); hi != 1000 {
		t.Errorf("newest sample lost after sorting: max %d", hi)
	}
}

func TestSamplesDoNotAllocate(t *testing.T) {
	s := NewSamples(16)
	if n := testkit.AllocsPerRun(100, func() { s.Add(1) }); n != 0 {
		t.Errorf("Add allocates %v times", n)
	}
	var zero Samples
	zero.Add(1)
	if zero.Percentile(50) != 0 {
		t.Error("the zero Samples must keep nothing")
	}
}

func TestMedian(t *testing.T) {
	v := []float64{9, 1, 5}
	if Median(v) != 5 || v[0] != 9 {
		t.Error("median of an odd list, list unchanged")
	}
	if Median([]float64{4, 1, 2, 3}) != 2.5 || Median(nil) != 0 {
		t.Error("median of an even or empty list")
	}
}

func TestGBps(t *testing.T) {
	if got := GBps(2e9, time.Second); got != 2 {
		t.Errorf("GBps = %v", got)
	}
	if got := GBps(1, 0); got != 0 {
		t.Errorf("GBps without time = %v", got)
	}
}
