// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
)

// What results call a Move by a card, and by what stands in for one in tests, whose figures
// say nothing of a card.
const (
	CUDAName    = "cuda"
	StandInName = "stand-in"
)

// Card is what GatherOnDevice measures on.
type Card struct {
	Device *cuda.Device
	Budget cuda.Budget
	// Neighbour, unless nil, is measured alone and beside the Moves.
	Neighbour *cuda.Neighbour
}

// The short Moves that are measured alone: what a layer of a decode step takes, cold and warm.
var aloneBatches = []int{2048, 200}

// GatherOnDevice measures Moves of a shape between pinned memory of the host and memory of a
// card, all in alternation in one run: by the variant that the Device chooses, beside one large
// copy of as many bytes by the copy engine in either direction, and every variant that serves.
// Shape.Threads must be 1: Moves of a Device go one after the other. Extra has the fixed cost and
// the slope of a line through several sizes, and what the Moves cost a neighbour. Further results
// are 2,048 and 200 entries alone, from call to completion, also as a replayed graph.
func GatherOnDevice(ctx context.Context, card Card, s Shape, o Options) ([]Result, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	if !s.Pages || s.Threads != 1 {
		return nil, fmt.Errorf("gather on a device by one thread, entries that lie apart: %w",
			ErrShape)
	}
	o = o.withDefaults()
	o.lists = 2 // the pool is mapped when it is pinned
	o.Time /= 4
	g, err := openDevicePool(card, s)
	if err != nil {
		return nil, err
	}
	defer g.close()
	list, err := g.all(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("gather %d x %d bytes on %s: %w", s.Batch, s.Size,
			card.Device.Name(), err)
	}
	return list, nil
}

// all measures the batch, then what goes beside it, then the short Moves.
func (g *devicePool) all(ctx context.Context, o Options) ([]Result, error) {
	first, err := g.whole(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := g.fit(ctx, &first); err != nil {
		return nil, err
	}
	if err := g.disturb(ctx, &first, o); err != nil {
		return nil, err
	}
	list := []Result{first}
	for _, batch := range aloneBatches {
		if batch >= g.shape.Batch {
			continue
		}
		r, err := g.alone(ctx, batch, o)
		if err != nil {
			return nil, err
		}
		list = append(list, r)
	}
	return list, nil
}

// name is the device that the results are of.
func (g *devicePool) name() string {
	if strings.Contains(g.dev.Name(), StandInName) {
		return StandInName
	}
	return CUDAName
}

// whole measures the shape itself.
func (g *devicePool) whole(ctx context.Context, o Options) (Result, error) {
	s := &g.shape
	back := "copy-engine-d2h"
	if s.Op == driver.Write {
		back = "copy-engine-h2d"
	}
	ways := []*way{g.way(g.name(), s, g.moves("", s.Batch)),
		g.way("copy-engine", s, &copyEngine{g, s.BatchBytes(), s.Op == driver.Write}),
		g.way(back, s, &copyEngine{g, s.BatchBytes(), s.Op != driver.Write})}
	more, notes, err := g.variants(s)
	if err != nil {
		return Result{}, err
	}
	ways = append(ways, more...)
	if err := race(ctx, ways, NewContest(nil), o, s.BatchBytes()); err != nil {
		return Result{}, err
	}
	return g.sum(s, ways, notes)
}

// alone measures the first entries of each list.
func (g *devicePool) alone(ctx context.Context, batch int, o Options) (Result, error) {
	s := g.shape
	s.Batch = batch
	ways := []*way{g.way(g.name(), &s, g.moves("", batch)),
		g.way("copy-engine", &s, &copyEngine{g, s.BatchBytes(), s.Op == driver.Write})}
	replays, err := g.replays(batch)
	if err != nil && !errors.Is(err, driver.ErrNotSupported) && !errors.Is(err, cuda.ErrBudget) {
		return Result{}, err
	}
	defer replays.close()
	if err == nil {
		ways = append(ways, g.way("replay", &s, replays))
	}
	more, notes, err := g.variants(&s)
	if err != nil {
		return Result{}, err
	}
	ways = append(ways, more...)
	if err := race(ctx, ways, NewContest(nil), o, s.BatchBytes()); err != nil {
		return Result{}, err
	}
	r, err := g.sum(&s, ways, notes)
	for _, w := range ways[2:] {
		if w.name == "replay" {
			r.Extra = map[string]float64{"replay-p99-us": Micros(w.lats.Percentile(99))}
		}
	}
	return r, err
}

// variants are the ways of those that serve; the notes say why the others do not.
func (g *devicePool) variants(s *Shape) (list []*way, notes []string, err error) {
	for _, v := range cuda.Variants() {
		_, err := g.dev.Explain(g.move(0, s.Batch, v), g.budget, v)
		var no *cuda.VariantError
		switch {
		case errors.As(err, &no):
			notes = append(notes, no.Error())
		case err != nil:
			return nil, nil, err
		default:
			list = append(list, g.way(v, s, g.moves(v, s.Batch)))
		}
	}
	return list, notes, nil
}

func (g *devicePool) way(name string, s *Shape, c copier) *way {
	w, _ := newWay(name, s, func(int) (copier, error) { return c, nil }) // which fails if that does
	return w
}

func (g *devicePool) sum(s *Shape, ways []*way, notes []string) (Result, error) {
	c, err := g.dev.Explain(g.move(0, s.Batch, ""), g.budget, "")
	if err != nil {
		return Result{}, err
	}
	res := s.result(g.name(), ways[0])
	res.Memory, res.Route = CUDAName, c.Variant
	res.Spread = g.shape.ScatteredBytes()
	var list []Baseline
	for _, w := range ways[1:] {
		list = append(list, w.baseline())
	}
	res.SetBaselines(list)
	res.Notes = append([]string{"on " + g.dev.Name() + ", " + c.String()}, notes...)
	if g.name() == StandInName {
		res.Notes = append(res.Notes, "these are figures of a software stand-in of the driver, "+
			"not of a card")
	}
	return res, nil
}
