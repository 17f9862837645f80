// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"math/rand/v2"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// shape is count pieces of n bytes. Scattered pieces lie at random places of a
// pool that no cache holds, at others in each batch.
type shape struct {
	name      string
	op        driver.Op
	count     int
	n         uint64
	scattered bool
	pattern   bool
	block     int // batches that are timed together
}

var shapes = []shape{
	{name: "write/1B", op: driver.Write, count: 1, n: 1, block: 256},
	{name: "read/1B", op: driver.Read, count: 1, n: 1, block: 256},
	{name: "write/64x656B", op: driver.Write, count: 64, n: entryLen, scattered: true, block: 16},
	{name: "read/64x656B", op: driver.Read, count: 64, n: entryLen, scattered: true, block: 16},
	{name: "write/1MiB", op: driver.Write, count: 1, n: 1 << 20, block: 1},
	{name: "read/1MiB", op: driver.Read, count: 1, n: 1 << 20, block: 1},
	{name: "write/16x1MiB", op: driver.Write, count: 16, n: 1 << 20, block: 1},
	{name: "read/16x1MiB", op: driver.Read, count: 16, n: 1 << 20, block: 1},
	{name: "write/pattern/2048x656B", op: driver.Write, count: 2048, n: entryLen, scattered: true,
		pattern: true, block: 1},
	{name: "read/pattern/2048x656B", op: driver.Read, count: 2048, n: entryLen, scattered: true,
		pattern: true, block: 1},
}

// poolBytes is the far side's memory: several times the largest caches, which
// hold 300 MiB and more. localBytes is the near side's.
const poolBytes, localBytes = 1 << 30, 16 << 20

// bench is a stage for all shapes, with memory for memcpy beside it that is of
// the same sizes, as populated and as cold.
type bench struct {
	*stage
	l, r        *memory
	here, there []byte
}

func benchShapes(b *testing.B, h Harness, w Wiring) {
	x := &bench{stage: newStage(b, h, w)}
	x.l, x.r = x.home.local(localBytes), x.far.share(poolBytes)
	x.imports(x.r)
	for _, m := range []*memory{x.l, x.r} { // without the model: nothing is compared
		m.on.must(request{Do: "paint", Region: m.id, Len: m.size, Seed: 1})
	}
	for _, side := range []struct {
		mem *[]byte
		n   uint64
	}{{&x.here, x.l.size}, {&x.there, x.r.size}} {
		space, err := PopulatedMemory(side.n)
		if err != nil {
			b.Fatalf("allocate: %v", err)
		}
		b.Cleanup(func() { _ = space.free() })
		*side.mem = space.Segment.Mem
		paint(*side.mem, 1)
	}
	for _, g := range shapes {
		b.Run(g.name, func(b *testing.B) { x.run(b, g) })
	}
}

// run measures one shape. What is to be moved is drawn before each block.
func (x *bench) run(b *testing.B, g shape) {
	next := g.places(int(x.r.size / g.n))
	batches := make([]batch, g.block)
	// The engine waits so, too: a poller that spins takes a core from the copy.
	idle := func() error { return x.near.park(x.h.Limit) }
	var timing alternation
	tag := uint64(1)
	for done := 0; done < b.N; done += g.block {
		for i := range batches {
			batches[i].draw(b, x, g, next())
		}
		timing.round(func() {
			for i := range batches {
				tag++
				submit := func(tag uint64) error {
					defer x.peer.Help(tag, nil)
					return batches[i].submit(tag)
				}
				if err := x.roundTrip(tag, submit, idle); err != nil {
					b.Fatalf("%v: %v", g.op, err)
				}
			}
		}, func() {
			for i := range batches {
				g.memcpy(x.here, x.there, batches[i].places)
			}
		})
	}
	timing.report(b, g.block, g.n*uint64(g.count))
}

// places returns what draws the places of one batch after the other: all places
// in random order, which come again only when each of them was used.
func (g shape) places(room int) func() []uint32 {
	if !g.scattered {
		list := indices(g.count, func(i int) int { return i })
		return func() []uint32 { return list }
	}
	perm := indices(room, func(i int) int { return i })
	rand.New(rand.NewPCG(6, 56)).Shuffle(room, func(i, j int) {
		perm[i], perm[j] = perm[j], perm[i]
	})
	at := 0
	return func() []uint32 {
		if at+g.count > room {
			at = 0
		}
		at += g.count
		return perm[at-g.count : at : at]
	}
}

// batch is one batch of a shape, made anew before each block.
type batch struct {
	places []uint32
	descs  []driver.Desc
	submit func(tag uint64) error
}

func (c *batch) draw(b *testing.B, x *bench, g shape, places []uint32) {
	c.places = places
	if g.pattern && x.can(driver.CanPattern) {
		p := geometry{count: g.count, localStride: g.n, remoteStride: g.n}.pattern(x.l, x.r, g.n)
		p.Remote.List = places
		c.submit = x.scattering(g.op, p)
		return
	}
	c.descs = c.descs[:0]
	for i, place := range places {
		c.descs = append(c.descs, x.pieces(desc(x.l, uint64(i)*g.n, x.r, uint64(place)*g.n,
			g.n))...)
	}
	if len(c.descs) > x.caps.DescsMax {
		b.Fatalf("%d descriptors do not fit in one batch of %d", len(c.descs), x.caps.DescsMax)
	}
	c.submit = x.submitting(g.op, c.descs...)
}

// memcpy is the shape, copied by hand.
func (g shape) memcpy(here, there []byte, places []uint32) {
	for i, place := range places {
		a := here[uint64(i)*g.n:][:g.n]
		b := there[uint64(place)*g.n:][:g.n]
		if g.op == driver.Write {
			copy(b, a)
		} else {
			copy(a, b)
		}
	}
}
