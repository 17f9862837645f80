// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// cluster has times that are given, or a millisecond for each token.
type cluster struct {
	tokens int
	cached []int // by prefill instance, in tokens
	queue  []int // ms
	copies []int // ms a token, by the instance that sends
	step   []int // ms, by decode instance; -1: no room
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func (c *cluster) Len() int                           { return len(c.cached) }
func (c *cluster) Cached(i int) int                   { return c.cached[i] }
func (c *cluster) Queue(i int) time.Duration          { return ms(c.queue[i]) }
func (c *cluster) Compute(_, has int) time.Duration   { return ms(c.tokens - has) }
func (c *cluster) Transfer(f, _, n int) time.Duration { return ms(c.copies[f] * n) }

type decoders []int

func (d decoders) Len() int { return len(d) }
func (d decoders) Step(i int) time.Duration {
	if d[i] < 0 {
		return Never
	}
	return ms(d[i])
}

func TestPlace(t *testing.T) {
	base := cluster{tokens: 1000, cached: []int{800, 100, 0}, queue: []int{900, 500, 0},
		copies: []int{1, 1, 1}, step: []int{30, 20, 20}}
	for name, c := range map[string]struct {
		threshold float64
		change    func(c *cluster)
		want      Placement
	}{
		// 0: 900+200 = 1100; 1: 700 copied, 700+500+200 = 1400; 2: 800 copied, 800+0+200 = 1000
		"a copy to an idle instance": {1, nil, Placement{2, 1, 0, 800, 800, ms(800), 0, ms(200),
			ms(1000), ms(20)}},
		// 2: 0+1000 computed, as nothing is copied; 1: 500+900 = 1400
		"no copies": {math.Inf(1), nil, Placement{2, 1, -1, 0, 0, 0, 0, ms(1000), ms(1000),
			ms(20)}},
		// 800 is no more than 8.5 times 100, so 1 computes 900; with nothing 2 copies in any case,
		// 2400+200
		"a threshold": {8.5, func(c *cluster) { c.copies[0], c.queue[0], c.queue[1] = 3, 2000, 0 },
			Placement{1, 1, -1, 0, 100, 0, 0, ms(900), ms(900), ms(20)}},
		"exactly the threshold": {8, func(c *cluster) { c.queue = []int{2000, 0, 2000} },
			Placement{1, 1, -1, 0, 100, 0, 0, ms(900), ms(900), ms(20)}},
		// 1 has the prefix, too, and is the faster sender
		"the sender that is there soonest": {1, func(c *cluster) {
			c.cached[1], c.copies[0], c.copies[1] = 800, 2, 1
			c.queue = []int{5000, 5000, 0}
		}, Placement{2, 1, 1, 800, 800, ms(800), 0, ms(200), ms(1000), ms(20)}},
		"the first of equals": {1, func(c *cluster) {
			c.cached, c.queue, c.step = []int{5, 5, 5}, []int{7, 7, 7}, []int{9, 9}
		}, Placement{0, 0, -1, 0, 5, 0, ms(7), ms(995), ms(1002), ms(9)}},
		"all of it": {1, func(c *cluster) { c.cached[0], c.queue[0] = 1000, 0 },
			Placement{0, 1, -1, 0, 1000, 0, 0, 0, 0, ms(20)}},
	} {
		t.Run(name, func(t *testing.T) {
			one := base
			one.cached = append([]int(nil), base.cached...)
			one.queue = append([]int(nil), base.queue...)
			one.copies = append([]int(nil), base.copies...)
			if c.change != nil {
				c.change(&one)
			}
			got, err := (&Conductor{Threshold: c.threshold}).Place(&one, decoders(one.step))
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestPlaceRefuses(t *testing.T) {
	c := &cluster{tokens: 1000, cached: []int{0}, queue: []int{500}, copies: []int{1}}
	for _, q := range []struct {
		c     Conductor
		steps decoders
		want  *RefusedError
		text  string
	}{
		{Conductor{TTFT: ms(1500), TBT: ms(20)}, decoders{20}, nil, ""},
		{Conductor{TTFT: ms(1499), TBT: ms(19)}, decoders{20},
			&RefusedError{"TTFT", ms(1500), ms(1499)}, "TTFT would be 1.5s, more than 1.499s"},
		{Conductor{TBT: ms(19)}, decoders{20}, &RefusedError{"TBT", ms(20), ms(19)}, "later"},
		{Conductor{}, decoders{-1, -1}, &RefusedError{"TBT", Never, 0},
			"no decode instance has room"},
		{Conductor{}, decoders{-1, 500}, nil, ""},
	} {
		_, err := q.c.Place(c, q.steps)
		if q.want == nil {
			require.NoError(t, err)
			continue
		}
		var refused *RefusedError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, q.want, refused)
		require.ErrorContains(t, err, q.text)
	}
	for _, d := range []struct {
		c *cluster
		d decoders
	}{{&cluster{}, decoders{1}}, {c, nil}} {
		_, err := (&Conductor{}).Place(d.c, d.d)
		require.ErrorIs(t, err, ErrNoInstance)
	}
}

// TestPlaceIsTheBest compares with all that could have been chosen: no other one is better, and a
// request is refused only if all of them break the limit.
func TestPlaceIsTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	refusals := 0
	for range 2000 {
		c := &cluster{tokens: 1 + r.IntN(100)}
		best := 0
		for range 1 + r.IntN(6) {
			has := r.IntN(c.tokens)
			best = max(best, has)
			c.cached, c.queue = append(c.cached, has), append(c.queue, r.IntN(100))
			c.copies = append(c.copies, r.IntN(3))
		}
		steps := decoders{r.IntN(50), r.IntN(50)}
		by := Conductor{Threshold: []float64{0, 1, 2, math.Inf(1)}[r.IntN(4)], TTFT: ms(r.IntN(90)),
			TBT: ms(r.IntN(40))}
		least := math.MaxInt
		for i, has := range c.cached {
			way := c.queue[i] + c.tokens - has
			if best > has && (has == 0 && !math.IsInf(by.Threshold, 1) ||
				has > 0 && float64(best) > by.Threshold*float64(has)) {
				way = math.MaxInt
				for from, theirs := range c.cached {
					if theirs == best {
						way = min(way, c.copies[from]*(best-has)+c.queue[i]+c.tokens-best)
					}
				}
			}
			least = min(least, way)
		}
		step := min(steps[0], steps[1])
		got, err := by.Place(c, steps)
		require.Equal(t, ms(least), got.TTFT)
		require.Equal(t, got.TTFT, got.Transfer+got.Queue+got.Compute)
		require.Equal(t, ms(step), got.TBT)
		late := by.TTFT > 0 && ms(least) > by.TTFT || by.TBT > 0 && ms(step) > by.TBT
		require.Equal(t, late, err != nil)
		if late {
			refusals++
		}
	}
	require.Greater(t, refusals, 200)
	require.Less(t, refusals, 1900)
}

func TestSumStaysWithinBounds(t *testing.T) {
	require.Equal(t, Never, sum(Never, 1))
	require.Equal(t, Never, sum(Never/2, Never/2, 2))
	require.Equal(t, ms(6), sum(ms(1), ms(2), ms(3)))
}
