// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math"
	"math/bits"
	"time"
)

// A Histogram has eight buckets for each power of two, from histogramMin on.
const (
	histogramSteps   = 8
	histogramBits    = 6  // of the first power: 64 ns
	histogramPowers  = 33 // up to 2^39 ns, nine minutes
	histogramMin     = 1 << histogramBits
	histogramBuckets = 1 + histogramPowers*histogramSteps
)

// Histogram counts durations. Bounds says what a bucket holds.
type Histogram struct {
	Buckets [histogramBuckets]uint64
}

// bucketOf returns the bucket of a duration.
func bucketOf(d time.Duration) int {
	if d < histogramMin {
		return 0
	}
	power := bits.Len64(uint64(d)) - 1
	step := int(d>>(power-3)) % histogramSteps
	return min(1+(power-histogramBits)*histogramSteps+step, histogramBuckets-1)
}

// Bounds returns which durations bucket i holds: those from low on that are below high. They
// differ by an eighth. The first holds all below 64 ns, the last all from its low on.
func (h *Histogram) Bounds(i int) (low, high time.Duration) {
	if i <= 0 {
		return 0, histogramMin
	}
	i--
	shift := histogramBits + i/histogramSteps - 3
	n := time.Duration(histogramSteps + i%histogramSteps)
	return n << shift, (n + 1) << shift
}

// Quantile returns the q-th quantile, 0 when empty. It is off by an eighth at most.
func (h *Histogram) Quantile(q float64) time.Duration {
	var total uint64
	for _, n := range h.Buckets {
		total += n
	}
	rank := uint64(math.Ceil(min(max(q, 0), 1) * float64(total)))
	rank = max(rank, min(1, total))
	for i, n := range h.Buckets {
		if n >= rank && rank > 0 {
			low, high := h.Bounds(i)
			return low + time.Duration(float64(high-low)*float64(rank)/float64(n))
		}
		rank -= min(n, rank)
	}
	return 0
}
