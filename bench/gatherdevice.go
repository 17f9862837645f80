// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// CUDAName is what results call the gather kernel on a card.
const CUDAName = "cuda"

// fewEntries is the short Move that parts the fixed cost of a launch from the slope: what a
// layer of a decode step misses.
const fewEntries = 200

// GatherOnDevice measures the gather kernel between pinned memory of the host and memory of a
// card, beside one large copy of as many bytes by the copy engine and, where Plan takes bulk
// copies, the kernel through registers. Shape.Threads must be 1: Moves of a Device go one
// after the other. Extra has the fixed cost and the slope that 200 entries and a whole
// batch make.
func GatherOnDevice(ctx context.Context, d *cuda.Device, b cuda.Budget, s Shape, o Options) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	if !s.Pages || s.Threads != 1 {
		return Result{}, fmt.Errorf("gather on a device by one thread, entries that lie apart: %w", ErrShape)
	}
	o = o.withDefaults()
	o.lists = s.lists()
	g := &deviceGathering{dev: d, budget: b, shape: s, plan: s.plans()[0]}
	defer g.close()
	ways, err := g.ways()
	if err != nil {
		return Result{}, err
	}
	if err := race(ctx, ways, NewContest(nil), o, s.BatchBytes()); err != nil {
		return Result{}, fmt.Errorf("gather %d x %d bytes on %s: %w", s.Batch, s.Size, d.Name(), err)
	}
	return g.sum(ways)
}

// deviceGathering holds what one run opened.
type deviceGathering struct {
	dev            *cuda.Device
	budget         cuda.Budget
	shape          Shape
	plan           plan
	pool           *hostmem.Buffer
	pinned, onCard *cuda.Memory
	lists          *cuda.Memory // all of them, one behind the other
	launch         cuda.Launch
}

func (g *deviceGathering) close() {
	for _, m := range []*cuda.Memory{g.pinned, g.onCard, g.lists} {
		if m != nil {
			m.Close()
		}
	}
	if g.pool != nil {
		g.pool.Close()
	}
}

// open allocates the pool and what the card needs.
func (g *deviceGathering) open() (err error) {
	s := &g.shape
	g.pool, err = hostmem.Alloc(s.ScatteredBytes(), hostmem.Options{Purpose: "bench-pool", Populate: true})
	if err != nil {
		return fmt.Errorf("allocate the pool: %w", err)
	}
	if g.pinned, err = g.dev.Pin(g.pool.Bytes()); err != nil {
		return err
	}
	if g.onCard, err = g.dev.Alloc(s.CompactBytes()); err != nil {
		return err
	}
	var all []byte
	for _, places := range g.plan.places {
		for _, place := range places {
			all = binary.LittleEndian.AppendUint32(all, place)
		}
	}
	if g.lists, err = g.dev.Alloc(uint64(len(all))); err != nil {
		return err
	}
	return g.lists.WriteAt(all, 0)
}

// move is the Move of one list of places, or of its first entries.
func (g *deviceGathering) move(list, count int) *cuda.DeviceMove {
	s := &g.shape
	pool := cuda.Span{Memory: g.pinned, N: s.ScatteredBytes()}
	compact := cuda.Span{Memory: g.onCard, N: s.CompactBytes()}
	index := cuda.DeviceIndex{List: cuda.Span{Memory: g.lists, Off: uint64(list*s.Batch) * 4, N: uint64(count) * 4}}
	if s.Op == backends.Write {
		return &cuda.DeviceMove{Count: count, Dst: index, Parts: []cuda.DevicePart{{Dst: pool, Src: compact, Entry: s.Size}}}
	}
	return &cuda.DeviceMove{Count: count, Src: index, Parts: []cuda.DevicePart{{Dst: compact, Src: pool, Entry: s.Size}}}
}

// ways makes the kernel and then what stands beside it.
func (g *deviceGathering) ways() ([]*way, error) {
	if err := g.open(); err != nil {
		return nil, err
	}
	kernels := []struct{ name, prefer string }{{CUDAName, ""}}
	var err error
	if _, g.launch, err = g.dev.Run(g.move(0, g.shape.Batch), g.budget, ""); err != nil {
		return nil, err
	}
	if g.launch.Kernel == cuda.KernelBulk {
		kernels = append(kernels, struct{ name, prefer string }{cuda.VariantRows, cuda.VariantRows})
	}
	var list []*way
	for _, k := range kernels {
		w, err := newWay(k.name, &g.shape, func(int) (copier, error) { return g.launched(k.prefer), nil })
		if err != nil {
			return nil, err
		}
		list = append(list, w)
	}
	engine, err := newWay("copy-engine", &g.shape, func(int) (copier, error) { return &copyEngine{g}, nil })
	return append(list[:1], append([]*way{engine}, list[1:]...)...), err
}

// launched is the kernel: a Move for each list of places, in turn.
type launched struct {
	g      *deviceGathering
	prefer string
	moves  []*cuda.DeviceMove
}

func (g *deviceGathering) launched(prefer string) *launched {
	c := &launched{g: g, prefer: prefer}
	for i := range g.plan.places {
		c.moves = append(c.moves, g.move(i, g.shape.Batch))
	}
	return c
}

func (c *launched) do(i int) error {
	_, _, err := c.g.dev.Run(c.moves[i%len(c.moves)], c.g.budget, c.prefer)
	return err
}

// copyEngine copies as many bytes at once.
type copyEngine struct{ g *deviceGathering }

func (c *copyEngine) do(i int) error {
	n := c.g.shape.BatchBytes()
	places := uint64(len(c.g.pool.Bytes())) / n
	from := c.g.pool.Bytes()[uint64(i)%places*n:][:n]
	if c.g.shape.Op == backends.Write {
		return c.g.onCard.ReadAt(from, 0)
	}
	return c.g.onCard.WriteAt(from, 0)
}

func (g *deviceGathering) sum(ways []*way) (Result, error) {
	s, own := &g.shape, ways[0]
	res := s.result(CUDAName, own)
	res.Memory, res.Route = CUDAName, g.launch.Kernel
	var list []Baseline
	for _, w := range ways[1:] {
		list = append(list, w.baseline())
	}
	res.SetBaselines(list)
	res.Notes = []string{fmt.Sprintf("%s on %s: %d blocks of %d threads, %d bytes under way at most: %s",
		g.launch.Kernel, g.dev.Name(), g.launch.Blocks, g.launch.Threads, g.launch.InFlight, g.launch.Why)}
	if s.Batch < 2*fewEntries {
		return res, nil
	}
	few, err := g.few()
	if err != nil {
		return Result{}, err
	}
	res.Extra = map[string]float64{"us-for-200": few}
	if each := (res.P50us - few) / float64(s.Batch-fewEntries); each > 0 {
		res.Extra["t0-us"] = few - fewEntries*each
		res.Extra["slope-GB/s"] = float64(s.Size) / each / 1e3
	}
	return res, nil
}

// few is the median time of a short Move, in microseconds.
func (g *deviceGathering) few() (float64, error) {
	lats := NewSamples(fewEntries)
	for i := range fewEntries {
		m := g.move(i%len(g.plan.places), fewEntries)
		begin := time.Now()
		if _, _, err := g.dev.Run(m, g.budget, ""); err != nil {
			return 0, err
		}
		lats.Add(time.Since(begin))
	}
	return Micros(lats.Percentile(50)), nil
}
