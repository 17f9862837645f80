// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"testing"
)

func TestLine(t *testing.T) {
	for _, c := range []struct {
		xs, ys      []float64
		begin, rise float64
	}{
		{[]float64{1, 2, 4}, []float64{7, 9, 13}, 5, 2},
		{[]float64{0, 1, 2, 3}, []float64{1, 0, 3, 2}, 0.6, 0.6},
		{[]float64{3, 3}, []float64{1, 5}, 3, 0},
	} {
		begin, rise := line(c.xs, c.ys)
		if math.Abs(begin-c.begin) > 1e-9 || math.Abs(rise-c.rise) > 1e-9 {
			t.Errorf("%v, %v: %v and %v, want %v and %v", c.xs, c.ys, begin, rise, c.begin, c.rise)
		}
	}
}
