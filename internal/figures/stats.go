// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Samples collects durations up to a fixed number without allocating; beyond
// it, every later sample replaces an earlier one in turn, so that the newest
// remain. The zero value keeps nothing: use NewSamples. Not for several
// goroutines at once.
type Samples struct {
	kept   []time.Duration
	next   int
	sorted bool
}

// NewSamples keeps up to limit samples.
func NewSamples(limit int) *Samples { return &Samples{kept: make([]time.Duration, 0, limit)} }

// Add takes one sample.
func (s *Samples) Add(d time.Duration) {
	s.sorted = false
	switch {
	case len(s.kept) < cap(s.kept):
		s.kept = append(s.kept, d)
	case cap(s.kept) > 0:
		s.kept[s.next] = d
		s.next = (s.next + 1) % cap(s.kept)
	}
}

// Percentile returns the smallest kept sample that p percent of the samples do
// not exceed (nearest rank); 0 without samples.
func (s *Samples) Percentile(p float64) time.Duration {
	if !s.sorted {
		slices.Sort(s.kept)
		s.next, s.sorted = 0, true
	}
	return Percentile(s.kept, p)
}

// Percentile is the nearest-rank percentile of an ordered list; the zero value
// of an empty one.
func Percentile[T cmp.Ordered](ordered []T, p float64) T {
	if len(ordered) == 0 {
		var zero T
		return zero
	}
	rank := int(math.Ceil(p / 100 * float64(len(ordered))))
	return ordered[min(max(rank, 1), len(ordered))-1]
}

// Median returns the middle of the values (the mean of the two middle ones of
// an even number); 0 without values. It does not change the list.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	v := slices.Clone(values)
	slices.Sort(v)
	if m := len(v) / 2; len(v)%2 == 0 {
		return (v[m-1] + v[m]) / 2
	}
	return v[len(v)/2]
}

// Micros converts to microseconds with three decimals, the resolution of the
// clock.
func Micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// GBps is bytes over time in 1e9 bytes a second; 0 without time.
func GBps(bytes uint64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(bytes) / float64(d.Nanoseconds())
}
