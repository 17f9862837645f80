// SPDX-License-Identifier: Apache-2.0

// Package simulate says what a pool of package sparse saves and costs a card that decodes
// DeepSeek-V3.2. The misses are counted: a series runs through the lookup of the pool. The times
// are those of a model, Card, whose parameters are measured, computed from published rates, or
// named as assumed or fitted. docs/sparse.md compares the outcome with the ESS report.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"

	lookup "github.com/sluicehq/sluice/csrc/sparse"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/kv/sparse"
)

// The shape of DeepSeek-V3.2.
const (
	Layers     = 61
	TopK       = 2048 // entries that a query reads
	EntryBytes = 656
	KeyBytes   = 132 // of the indexer, a token and layer; they all stay on the card
)

// StepsMax bounds the steps that are counted.
const StepsMax = 1 << 14

// Source gives a series of top-k: a sparse.SeriesReader, or a Generated.
type Source interface {
	Next(t *sparse.TopK) error // io.EOF: there is no more
}

// Generated is a series that is made up. What a step accepts is what the next one goes on behind.
type Generated struct {
	Seed     uint64
	Layers   int     // 0: those of the model
	Context  int     // entries, more than TopK
	Queries  int     // of a step, as of MTP
	Accepted float64 // tokens a step, at most Queries
	Warm     int     // queries of the prefill that come first
	Steps    int

	series *sparse.Series
	next   int
}

// Next makes the next step.
func (g *Generated) Next(t *sparse.TopK) error {
	if g.Layers == 0 {
		g.Layers = Layers
	}
	if g.series == nil {
		g.series, g.next = sparse.NewSeries(g.Seed, g.Layers, TopK), -g.Warm
	}
	if g.next == g.Steps {
		return io.EOF
	}
	*t = sparse.TopK{Step: g.next, Context: g.Context + g.next, Queries: 1, Entries: t.Entries}
	if g.next >= 0 {
		t.Context, t.Queries = g.Context+int(float64(g.next)*g.Accepted), g.Queries
	}
	if t.Entries == nil {
		t.Entries = make([][]uint32, g.Layers)
	}
	for layer := range t.Entries {
		if len(t.Entries[layer]) != t.Queries*TopK {
			t.Entries[layer] = make([]uint32, t.Queries*TopK)
		}
		g.series.Step(layer, t.Context, t.Entries[layer])
	}
	g.next++
	return nil
}

// Counts are the misses of a sequence: entries that the host has to give. Those that the step
// itself adds to the context are none.
type Counts struct {
	Context int // entries at the first step
	Slots   int // of a layer
	Queries int // of a step
	Asked   float64
	Misses  [][]int // by step and layer
}

// Count runs a series through the lookup of a pool that has so many slots a layer, or, if that is
// 0, a ratio of the context. Steps below 0 warm the pool up and are not counted.
func Count(ctx context.Context, src Source, slots int, ratio float64) (*Counts, error) {
	c := &Counts{Slots: slots}
	var t sparse.TopK
	var table *lookup.Table
	var m sparse.Misses
	b := sparse.Batch{Shift: 6, Counts: make([]uint32, 1), Sets: make([]uint32, 1)}
	seen := make([]uint32, sparse.SeriesContextMax+sparse.SeriesQueriesMax)
	asked, tick := 0, uint32(0)
	for {
		if err := src.Next(&t); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if table == nil {
			if c.Slots == 0 {
				c.Slots = int(ratio * float64(t.Context))
			}
			var err error
			if table, err = lookup.New(len(t.Entries), c.Slots); err != nil {
				return nil, err
			}
			c.Slots = table.Slots()
		}
		for len(b.Blocks)<<b.Shift < t.Context+t.Queries {
			b.Blocks = append(b.Blocks, uint32(len(b.Blocks)))
		}
		b.Starts = []uint32{0, uint32(len(b.Blocks))}
		misses := make([]int, len(t.Entries))
		for layer, entries := range t.Entries {
			// A set may be asked for no more entries than it has slots: what several queries
			// ask for is asked once.
			tick++
			b.Sets[0], b.Entries = uint32(layer), b.Entries[:0]
			for _, entry := range entries {
				if seen[entry] != tick {
					seen[entry] = tick
					b.Entries = append(b.Entries, entry)
				}
			}
			if len(b.Entries) > c.Slots {
				return nil, fmt.Errorf("the queries of step %d ask layer %d for %d entries, and "+
					"the pool has %d slots: give it more: %w", t.Step, layer, len(b.Entries),
					c.Slots, driver.ErrBounds)
			}
			b.Slots = append(b.Slots[:0], b.Entries...)
			if err := table.Lookup(&b, &m); err != nil {
				return nil, err
			}
			for _, place := range m.Place {
				if int(b.Entries[place]) < t.Context-1 { // the step itself writes the others
					misses[layer]++
				}
			}
			if t.Step >= 0 {
				asked += len(b.Entries)
			}
		}
		if t.Step < 0 {
			continue
		}
		if c.Misses == nil {
			c.Context = t.Context
		}
		if len(c.Misses) == StepsMax {
			return nil, fmt.Errorf("the series has more than %d steps: %w", StepsMax,
				driver.ErrBounds)
		}
		c.Queries = max(c.Queries, t.Queries)
		c.Misses = append(c.Misses, misses)
	}
	if c.Misses == nil {
		return nil, fmt.Errorf("the series has no step from 0 on: %w", sparse.ErrSeries)
	}
	c.Asked = float64(asked) / float64(len(c.Misses)*c.Layers())
	return c, nil
}

// Layers returns the number of layers.
func (c *Counts) Layers() int { return len(c.Misses[0]) }

// Step returns the misses of a layer at a step: their mean, the fewest and the most.
func (c *Counts) Step(step int) (mean, low, high float64) {
	var list []float64
	for _, n := range c.Misses[step] {
		list = append(list, float64(n))
	}
	return spread(list)
}

// ByLayer returns the mean misses of a step, by layer.
func (c *Counts) ByLayer() []float64 {
	list := make([]float64, c.Layers())
	for _, misses := range c.Misses {
		for layer, n := range misses {
			list[layer] += float64(n) / float64(len(c.Misses))
		}
	}
	return list
}

// All returns the mean misses of a layer and step, and of the layers with the fewest and the most.
func (c *Counts) All() (mean, low, high float64) { return spread(c.ByLayer()) }

func spread(list []float64) (mean, low, high float64) {
	low, high = list[0], list[0]
	for _, x := range list {
		mean += x / float64(len(list))
		low, high = min(low, x), max(high, x)
	}
	return mean, low, high
}
