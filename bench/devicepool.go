// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// devicePool is the memory that Moves of a shape go between: a pinned pool of the host, a run on
// the card, and the lists at either place.
type devicePool struct {
	dev       *cuda.Device
	budget    cuda.Budget
	neighbour *cuda.Neighbour
	shape     Shape
	plan      plan

	pool, listBuffer *hostmem.Buffer
	pinned, onCard   *cuda.Memory
	lists, hostLists *cuda.Memory // all lists, one behind the other
}

func openDevicePool(card Card, s Shape) (*devicePool, error) {
	g := &devicePool{dev: card.Device, budget: card.Budget, neighbour: card.Neighbour, shape: s,
		plan: s.plans()[0]}
	if err := g.alloc(); err != nil {
		g.close()
		return nil, err
	}
	return g, nil
}

func (g *devicePool) alloc() (err error) {
	s := &g.shape
	g.pool, err = hostmem.Alloc(s.ScatteredBytes(), hostmem.Options{Purpose: "bench-pool",
		Populate: true})
	if err != nil {
		return fmt.Errorf("allocate the pool: %w", err)
	}
	if g.pinned, err = g.dev.Pin(g.pool.Bytes()); err != nil {
		return err
	}
	if g.onCard, err = g.dev.Alloc(s.CompactBytes()); err != nil {
		return err
	}
	bytes := uint64(len(g.plan.places)) * uint64(s.Batch) * 4
	g.listBuffer, err = hostmem.Alloc(bytes, hostmem.Options{Purpose: "bench-pool", Populate: true})
	if err != nil {
		return fmt.Errorf("allocate the lists: %w", err)
	}
	all := g.listBuffer.Bytes()[:0]
	for _, places := range g.plan.places {
		for _, place := range places {
			all = binary.LittleEndian.AppendUint32(all, place)
		}
	}
	if g.hostLists, err = g.dev.Pin(g.listBuffer.Bytes()); err != nil {
		return err
	}
	if g.lists, err = g.dev.Alloc(bytes); err != nil {
		return err
	}
	return g.lists.WriteAt(all, 0)
}

func (g *devicePool) close() {
	for _, m := range []*cuda.Memory{g.pinned, g.onCard, g.lists, g.hostLists} {
		if m != nil {
			m.Close()
		}
	}
	for _, b := range []*hostmem.Buffer{g.pool, g.listBuffer} {
		if b != nil {
			b.Close()
		}
	}
}

// move is the Move of the first entries of a list of places. The list lies where its reader is:
// in the card's memory for kernels and for the Device's own choice among them.
func (g *devicePool) move(list, count int, variant string) *cuda.DeviceMove {
	s := &g.shape
	pool := cuda.Span{Memory: g.pinned, N: s.ScatteredBytes()}
	compact := cuda.Span{Memory: g.onCard, N: s.CompactBytes()}
	lists := g.lists
	switch variant {
	case cuda.VariantLoop, cuda.VariantStaged:
		lists = g.hostLists
	}
	index := cuda.DeviceIndex{List: cuda.Span{Memory: lists, Off: uint64(list*s.Batch) * 4,
		N: uint64(count) * 4}}
	if s.Op == driver.Write {
		return &cuda.DeviceMove{Count: count, Dst: index,
			Parts: []cuda.DevicePart{{Dst: pool, Src: compact, Entry: s.Size}}}
	}
	return &cuda.DeviceMove{Count: count, Src: index,
		Parts: []cuda.DevicePart{{Dst: compact, Src: pool, Entry: s.Size}}}
}

// performed is a variant: a Move for each list of places, in turn.
type performed struct {
	g     *devicePool
	only  string
	moves []*cuda.DeviceMove
}

func (g *devicePool) moves(only string, batch int) *performed {
	c := &performed{g: g, only: only}
	for i := range g.plan.places {
		c.moves = append(c.moves, g.move(i, batch, only))
	}
	return c
}

func (c *performed) do(i int) error {
	_, _, err := c.g.dev.Run(c.moves[i%len(c.moves)], c.g.budget, c.only)
	return err
}

// replaysMax is how many graphs are replayed in turn: their entries do not stay in a cache.
const replaysMax = 64

// replayed is a launch that was captured, for each of some lists of places.
type replayed []*cuda.Prepared

func (g *devicePool) replays(batch int) (list replayed, err error) {
	for i := range min(len(g.plan.places), replaysMax) {
		p, err := g.dev.Prepare(g.move(i, batch, ""), g.budget, "")
		if err != nil {
			list.close()
			return nil, err
		}
		list = append(list, p)
	}
	return list, nil
}

func (c replayed) close() {
	for _, p := range c {
		p.Close()
	}
}

func (c replayed) do(i int) error {
	_, err := c[i%len(c)].Run()
	return err
}

// copyEngine copies as many bytes at once.
type copyEngine struct {
	g      *devicePool
	n      uint64
	toHost bool
}

func (c *copyEngine) do(i int) error {
	mem := c.g.pool.Bytes()[uint64(i)%(uint64(len(c.g.pool.Bytes()))/c.n)*c.n:][:c.n]
	if c.toHost {
		return c.g.onCard.ReadAt(mem, 0)
	}
	return c.g.onCard.WriteAt(mem, 0)
}
