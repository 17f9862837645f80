// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// The operations that Gather measures, as results name them.
const (
	GatherOp  = "gather"  // entries at random places to one after the other: Op is Read
	ScatterOp = "scatter" // and back: Op is Write
)

// CPUName is what results call the gather kernel's twin on the CPU.
const CPUName = "cpu"

// gatherSlice is well below what the scheduler gives a thread at a time: on a busy machine most
// slices are whole, and the median is one of them.
const gatherSlice = 2 * time.Millisecond

// Gather measures the twin of the gather kernel beside a loop of memcpy over the same shape,
// each on memory of its own within this process. The shape needs Pages; its piece is an
// entry. A shape that the kernel cannot take is a *cuda.LayoutError.
func Gather(ctx context.Context, s Shape, o Options) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	if !s.Pages {
		return Result{}, fmt.Errorf("gather entries that do not lie apart: %w", ErrShape)
	}
	if err := layout(&s).Check(); err != nil {
		return Result{}, err
	}
	if o.Slice <= 0 {
		o.Slice = gatherSlice
	}
	o = o.withDefaults()
	o.lists = s.lists()
	g := &gathering{shape: s, plans: s.plans()}
	defer g.close()
	ways, err := g.ways()
	if err != nil {
		return Result{}, err
	}
	if err := race(ctx, ways, NewContest(nil), o, s.BatchBytes()); err != nil {
		return Result{}, fmt.Errorf("gather %d x %d bytes: %w", s.Batch, s.Size, err)
	}
	return g.sum(ways), nil
}

// layout is a Move of the shape without memory.
func layout(s *Shape) *cuda.Move {
	return &cuda.Move{Parts: []cuda.Part{{Entry: s.Size, DstStride: s.stride(),
		SrcStride: s.stride()}}}
}

// gathering holds what one run opened.
type gathering struct {
	shape Shape
	plans []plan
	owned []*memories
	notes []string
}

func (g *gathering) close() {
	for _, m := range g.owned {
		m.close()
	}
}

// ways makes the twin and then the baselines.
func (g *gathering) ways() ([]*way, error) {
	var list []*way
	for _, b := range []struct {
		name string
		huge hostmem.HugePolicy
		twin bool
	}{{CPUName, hostmem.HugeAuto, true}, {"memcpy", hostmem.HugeNone, false},
		{"memcpy-huge", hostmem.HugeAuto, false}} {
		m, err := allocMemories(&g.shape, b.huge)
		if err != nil {
			return nil, err
		}
		g.owned = append(g.owned, m)
		w, err := newWay(b.name, &g.shape, func(t int) (copier, error) {
			if b.twin {
				return newGathered(m, &g.plans[t]), nil
			}
			return m.plain(&g.plans[t]), nil
		})
		if err != nil {
			return nil, err
		}
		list = append(list, w)
	}
	if g.owned[0].scattered.PageSize() < 2<<20 {
		g.notes = append(g.notes, "the kernel had no huge pages for the pool")
	}
	if !cuda.Native {
		g.notes = append(g.notes, "built without cgo: the twin is a plain loop")
	}
	return list, nil
}

func (g *gathering) sum(ways []*way) Result {
	res := g.shape.result(CPUName, ways[0])
	res.Route, res.Memory, res.Notes = CPUName, string(HostMemory), g.notes
	res.SetBaselines([]Baseline{ways[1].baseline(), ways[2].baseline()})
	return res
}

// result is what a way came to, without what stands beside it.
func (s *Shape) result(by string, own *way) Result {
	res := Result{
		Backend: by, Op: GatherOp, Size: s.Size, Batch: s.Batch, Pages: true, Threads: s.Threads,
		Spread: uint64(s.slots()) * s.stride() * uint64(s.Threads),
		GBps:   Median(own.rates), P50us: Micros(own.lats.Percentile(50)),
		P99us:  Micros(own.lats.Percentile(99)),
		Rounds: len(own.rates), Ops: own.ops,
	}
	if s.Op == driver.Write {
		res.Op = ScatterOp
	}
	res.OpsPerS = res.GBps * 1e9 / float64(s.BatchBytes())
	if own.ops > 0 {
		res.AllocsPerOp = own.allocs / float64(own.ops)
	}
	return res
}

// gathered is the twin: a Move for each list of places, in turn.
type gathered struct{ moves []cuda.Move }

func newGathered(m *memories, p *plan) *gathered {
	compact, scattered := m.compact.Bytes()[p.local():], m.scattered.Bytes()[p.remote():]
	c := &gathered{}
	for _, places := range p.places {
		move := *layout(&p.shape)
		move.Count = len(places)
		if p.shape.Op == driver.Write {
			move.Parts[0].Dst, move.Parts[0].Src, move.Dst.U32 = scattered, compact, places
		} else {
			move.Parts[0].Dst, move.Parts[0].Src, move.Src.U32 = compact, scattered, places
		}
		c.moves = append(c.moves, move)
	}
	return c
}

func (c *gathered) do(i int) error {
	_, err := cuda.Run(&c.moves[i%len(c.moves)])
	return err
}
