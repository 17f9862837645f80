// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Setting is one of the ESS report (arXiv 2512.10576), with the gain of tokens a second that it has
// by its own simulation.
type Setting struct {
	Context  int
	Queries  int     // MTP
	Accepted float64 // tokens a step
	Ratio    float64 // slots by entries
	Gain     float64 // percent
}

// Settings are those of the report. The accepted tokens of MTP 2 are assumed: as many for each
// query as MTP 4 has. A gain depends on them only in how fast the context grows.
var Settings = []Setting{
	{32 << 10, 2, 1.7, 0.2, 69.4},
	{32 << 10, 4, 3.4, 0.2, 45.8},
	{128 << 10, 2, 1.7, 0.1, 123},
}

// Claim is a figure of the report beside that of the simulation.
type Claim struct {
	What   string
	Report string
	Here   float64
	Off    *float64 // of a gain: points of a percentage
	Basis  string   // what the figure here follows from
}

// Spike are the mean misses of a layer by step, with a warm-up and without.
type Spike struct{ Warm, Cold []float64 }

// WarmUp is how many queries of the prefill warm a pool up, in the report.
const WarmUp = 32

// Compare runs what the report says, with a generated series. Of layers there are as many as
// in the model, if it is 0.
func Compare(ctx context.Context, card Card, seed uint64, layers, steps int) (claims []Claim,
	spike Spike, err error) {
	count := func(s Setting, slots, warm int) (*Counts, error) {
		return Count(ctx, &Generated{Seed: seed, Layers: layers, Context: s.Context,
			Queries: s.Queries, Accepted: s.Accepted, Warm: warm, Steps: steps}, slots, s.Ratio)
	}
	for _, run := range []struct {
		warm int
		list *[]float64
	}{{0, &spike.Cold}, {WarmUp, &spike.Warm}} {
		c, err := count(Settings[0], 6400, run.warm)
		if err != nil {
			return nil, spike, err
		}
		for step := range c.Misses {
			mean, _, _ := c.Step(step)
			*run.list = append(*run.list, mean)
		}
	}
	mean, _, _ := spread(spike.Warm)
	cold, _, _ := spread(spike.Cold[1:])
	warm, _, _ := spread(spike.Warm[1:])
	claims = []Claim{
		{"misses, mean, 6,400 slots", "below 200", mean, nil, "the generator"},
		{"first step by the later ones, cold", "a spike", spike.Cold[0] / cold, nil, "follows"},
		{"first step by the later ones, warmed up", "no spike", spike.Warm[0] / warm, nil,
			"the generator"},
	}
	for i, s := range Settings {
		c, err := count(s, 0, WarmUp)
		if err != nil {
			return nil, spike, err
		}
		if i == 0 {
			_, low, high := c.All()
			claims = append(claims,
				Claim{"misses, fewest of a layer, ratio 0.2", "17", low, nil, "the generator"},
				Claim{"misses, most of a layer, ratio 0.2", "605", high, nil, "the generator, " +
					"of which a layer renews at most 605"})
		}
		bare := card.Run(c.Bare(s.Accepted), None)
		if bare.Batch == 0 {
			return nil, spike, fmt.Errorf("not one sequence of %d entries fits in the memory of "+
				"the card: give it more: %w", s.Context, driver.ErrBounds)
		}
		gain := 100 * (card.Run(c.Load(s.Accepted), Chosen).Tokens/bare.Tokens - 1)
		off, basis := gain-s.Gain, "predicted"
		if i == 0 {
			basis = "fitted, by the default of --fixed"
		}
		claims = append(claims, Claim{fmt.Sprintf("gain in %%, %d K, MTP %d, ratio %v",
			s.Context>>10, s.Queries, s.Ratio), fmt.Sprint(s.Gain), gain, &off, basis})
	}
	return claims, spike, nil
}

// Load returns what a card decodes with the pool that was counted.
func (c *Counts) Load(accepted float64) Load {
	return Load{c.Context, c.Slots, c.Queries, accepted, c.Asked, c.ByLayer()}
}

// Bare returns the same without a pool.
func (c *Counts) Bare(accepted float64) Load {
	return Load{Context: c.Context, Queries: c.Queries, Accepted: accepted,
		Misses: make([]float64, c.Layers())}
}
