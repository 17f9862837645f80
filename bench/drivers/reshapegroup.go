// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"

	"github.com/sluicehq/sluice/engine"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// rankGroup is one group of ranks in this process, with the memory of each and the block tables
// of one request. One engine serves them all; its peer is that of the other group.
type rankGroup struct {
	route
	name    string
	sides   []*kvlayout.Side
	tables  []kvlayout.Tables // by side
	memory  *engine.Memory
	held    [][][]byte         // by side and region
	regions [][]*engine.Region // the same; nil: no bytes
	remotes [][]*engine.Remote // as the engine of the other group sees them
}

// groupBytes is the memory that a group needs: each region of a rank begins on a page.
func groupBytes(sides []*kvlayout.Side) (sum uint64) {
	for _, s := range sides {
		for _, a := range s.Regions {
			sum += alignUp(a.Bytes)
		}
	}
	return sum
}

func alignUp(n uint64) uint64 { return (n + wholeBlock - 1) &^ (wholeBlock - 1) }

// open registers the memory of all ranks, in one allocation, and deals blocks out.
func (g *rankGroup) open(name, backend string, tokens uint64) (err error) {
	g.name = name
	if err := g.route.open(name, []string{backend}); err != nil {
		return err
	}
	if g.memory, err = g.eng.Alloc(groupBytes(g.sides), engine.AllocOptions{Purpose: "bench",
		Populate: true}); err != nil {
		return err
	}
	whole, at := g.memory.Segment(), uint64(0)
	for i, s := range g.sides {
		g.tables = append(g.tables, dealBlocks(s, tokens, rand.New(rand.NewPCG(uint64(i), 1))))
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
			if g.regions[i][j], err = g.eng.Register(g.rankRegion(i, j), part); err != nil {
				return err
			}
		}
	}
	return nil
}

func (g *rankGroup) rankRegion(side, region int) string {
	return fmt.Sprintf("%s %d %d", g.name, side, region)
}

// meet connects the group's engine to that of another, of which it looks the regions up.
func (g *rankGroup) meet(other *rankGroup) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	description, err := other.eng.Describe()
	if err != nil {
		return err
	}
	if g.peer, err = g.eng.Connect(ctx, description); err != nil {
		return err
	}
	for i, regions := range other.regions {
		other.remotes = append(other.remotes, make([]*engine.Remote, len(regions)))
		for j, region := range regions {
			if region == nil {
				continue
			}
			if other.remotes[i][j], err = g.peer.Remote(other.rankRegion(i, j)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (g *rankGroup) close() {
	if g.eng != nil {
		g.eng.Close()
	}
	if g.memory != nil {
		g.memory.Close()
	}
}

// dealBlocks takes blocks of the pools for one request in random order, as those of an engine that
// has run for a while are.
func dealBlocks(s *kvlayout.Side, tokens uint64, r *rand.Rand) kvlayout.Tables {
	tables := make(kvlayout.Tables, len(s.Groups))
	for i := range s.Views {
		v := &s.Views[i]
		g := &s.Groups[v.Group]
		if tables[v.Group] != nil {
			continue
		}
		slots := int((tokens + uint64(v.Tokens) - 1) / uint64(v.Tokens))
		switch {
		case g.State:
			slots = 1
		case g.Ring > 0:
			slots = g.Ring
		}
		for _, b := range r.Perm(int(g.Blocks))[:slots] {
			tables[v.Group] = append(tables[v.Group], uint32(b))
		}
	}
	return tables
}

// fill gives each cell of a request bytes that depend on what it is: the same in all replicas, and
// others than in other cells.
func (g *rankGroup) fill(tokens, seed uint64) {
	for i, s := range g.sides {
		for j := range s.Views {
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

// wipe clears all memory.
func (g *rankGroup) wipe() {
	for i := range g.held {
		for _, mem := range g.held[i] {
			clear(mem)
		}
	}
}
