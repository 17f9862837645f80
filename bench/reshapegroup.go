// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"

	"github.com/sluicehq/sluice/engine"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// rankGroup is one group of ranks in this process, with the memory of each and the block tables
// of one request. One engine serves them all.
type rankGroup struct {
	sides   []*kvlayout.Side
	tables  []kvlayout.Tables // by side
	memory  *engine.Memory
	held    [][][]byte         // by side and region
	regions [][]*engine.Region // the same; nil: no bytes
	remotes [][]*engine.Remote // as the engine of the other group sees them
}

// regionAlign begins each region of a rank on a page.
const regionAlign = 4096

// groupBytes is the memory that a group needs.
func groupBytes(sides []*kvlayout.Side) (sum uint64) {
	for _, s := range sides {
		for _, a := range s.Regions {
			sum += alignUp(a.Bytes)
		}
	}
	return sum
}

func alignUp(n uint64) uint64 { return (n + regionAlign - 1) &^ (regionAlign - 1) }

// newRankGroup registers the memory of all ranks, in one allocation, and deals blocks out. The
// allocation may take seconds: it does not begin after the end of ctx.
func newRankGroup(ctx context.Context, e *engine.Engine, name string, sides []*kvlayout.Side,
	tokens uint64, use Memory) (*rankGroup, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	g := &rankGroup{sides: sides}
	alloc := e.Alloc
	if use == HostMemory {
		alloc = engine.Alloc
	}
	var err error
	if g.memory, err = alloc(groupBytes(sides), engine.AllocOptions{Purpose: "bench",
		Populate: true}); err != nil {
		return nil, err
	}
	if err := g.register(e, name); err != nil {
		return nil, errors.Join(err, g.close())
	}
	for i, s := range sides {
		g.tables = append(g.tables, dealBlocks(s, tokens, rand.New(rand.NewPCG(uint64(i), 1))))
	}
	return g, nil
}

// close gives the memory back. The engine is closed, or has no regions.
func (g *rankGroup) close() error { return g.memory.Close() }

func regionName(name string, side, region int) string {
	return fmt.Sprintf("%s %d %d", name, side, region)
}

func (g *rankGroup) register(e *engine.Engine, name string) error {
	whole, at := g.memory.Segment(), uint64(0)
	for i, s := range g.sides {
		g.held = append(g.held, make([][]byte, len(s.Regions)))
		g.regions = append(g.regions, make([]*engine.Region, len(s.Regions)))
		for j, a := range s.Regions {
			if a.Bytes == 0 {
				continue // tensors of which this stage has no layer
			}
			part, err := whole.Slice(at, a.Bytes, [16]byte{})
			if err != nil {
				return err
			}
			at += alignUp(a.Bytes)
			g.held[i][j] = part.Mem
			if g.regions[i][j], err = e.Register(regionName(name, i, j), part); err != nil {
				return err
			}
		}
	}
	return nil
}

// seenBy looks the regions up as a peer does.
func (g *rankGroup) seenBy(p *engine.Peer, name string) error {
	for i, s := range g.sides {
		g.remotes = append(g.remotes, make([]*engine.Remote, len(s.Regions)))
		for j := range s.Regions {
			if g.regions[i][j] == nil {
				continue
			}
			var err error
			if g.remotes[i][j], err = p.Remote(regionName(name, i, j)); err != nil {
				return err
			}
		}
	}
	return nil
}

// slots returns how many slots a request has in each block table of a rank.
func slots(s *kvlayout.Side, tokens uint64) []int {
	list := make([]int, len(s.Groups))
	for i := range s.Views {
		v := &s.Views[i]
		switch g := &s.Groups[v.Group]; {
		case g.State:
			list[v.Group] = 1
		case g.Ring > 0:
			list[v.Group] = g.Ring
		default:
			list[v.Group] = int((tokens + uint64(v.Tokens) - 1) / uint64(v.Tokens))
		}
	}
	return list
}

// dealBlocks takes blocks of the pools in random order, as those of an engine that has run for a
// while are.
func dealBlocks(s *kvlayout.Side, tokens uint64, r *rand.Rand) kvlayout.Tables {
	var tables kvlayout.Tables
	for i, n := range slots(s, tokens) {
		var table []uint32
		for _, b := range r.Perm(int(s.Groups[i].Blocks))[:n] {
			table = append(table, uint32(b))
		}
		tables = append(tables, table)
	}
	return tables
}

// fill gives each cell of a request bytes that depend on what it is: the same in all replicas, and
// others than in other cells. It ends early by the cause of ctx.
func (g *rankGroup) fill(ctx context.Context, tokens, seed uint64) error {
	for i, s := range g.sides {
		for j := range s.Views {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			v := &s.Views[j]
			at := newSpot(g, i, v)
			part := fnv.New64a()
			part.Write([]byte(v.Part))
			mix, end := part.Sum64()^seed, tokens
			if at.group.State {
				end = uint64(v.Tokens)
			}
			for t := range end {
				if !at.holds(t) {
					continue
				}
				off := at.of(t)
				for u := range uint64(v.Count) {
					coordinate := uint64(v.Layer)<<52 | (uint64(v.First)+u)<<32 | t
					scramble(at.mem[off+u*v.Unit:][:v.Cell], mix^coordinate)
				}
			}
		}
	}
	return nil
}

// scramble fills memory with pseudorandom words.
func scramble(b []byte, seed uint64) {
	x := seed*0x9E3779B97F4A7C15 | 1
	for len(b) > 0 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		if len(b) >= 8 {
			binary.LittleEndian.PutUint64(b, x)
			b = b[8:]
			continue
		}
		for k := range b {
			b[k] = byte(x >> (8 * k))
		}
		return
	}
}

// wipe clears all memory. It ends early by the cause of ctx.
func (g *rankGroup) wipe(ctx context.Context) error {
	for i := range g.held {
		for _, mem := range g.held[i] {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			clear(mem)
		}
	}
	return nil
}
