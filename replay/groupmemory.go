// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/replay/internal/content"
)

// What lies in blocks that no request has: the sides differ, so that a read of blocks that a
// sender has back shows up, too.
const (
	prefillPoison byte = 0xb7
	decodePoison  byte = 0x6d
)

// groupMemory is the pools of one rank, with its block tables. All that it knows of a layout is
// what layout.Group and layout.View say, so that it shares no fault with plans and patterns.
type groupMemory struct {
	side    *layout.Side
	regions []*engine.Region
	memory  []*engine.Memory
	poison  byte

	free   [][]uint32 // by group; the last is used next
	ended  [][]bool   // by group and block: a request that failed had it last
	reused uint64     // of those, taken again

	checked uint64 // bytes that were compared
	landed  uint64 // of them, those of requests that have come
	wrong   uint64 // cells
	first   []string
}

func newGroupMemory(eng *engine.Engine, side *layout.Side, poison byte, seed uint64) (
	*groupMemory, error) {
	m := &groupMemory{side: side, poison: poison}
	for _, area := range side.Regions {
		if area.Bytes == 0 {
			m.regions = append(m.regions, nil)
			continue
		}
		b, err := eng.Alloc(area.Bytes, engine.AllocOptions{Purpose: "kv"})
		if err != nil {
			return m, fmt.Errorf("allocate region %s: %w", area.Name, err)
		}
		m.memory = append(m.memory, b)
		r, err := eng.Register(area.Name, b.Segment())
		if err != nil {
			return m, err
		}
		m.regions = append(m.regions, r)
		fill(r.Bytes(), poison)
	}
	r := rand.New(rand.NewPCG(seed, uint64(side.Rank)<<8|uint64(poison)))
	for _, g := range side.Groups {
		blocks := make([]uint32, g.Blocks)
		for i, b := range r.Perm(len(blocks)) {
			blocks[i] = uint32(b)
		}
		m.free = append(m.free, blocks)
		m.ended = append(m.ended, make([]bool, g.Blocks))
	}
	return m, nil
}

func fill(b []byte, with byte) {
	if len(b) > 0 {
		b[0] = with
	}
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// take takes blocks for a request, which are as the last one has left them.
func (m *groupMemory) take(q *groupRequest) (layout.Tables, error) {
	tables := make(layout.Tables, len(m.free))
	for g := range m.free {
		n := int(slots(m.side, g, q.Tokens))
		left := len(m.free[g]) - n
		if left < 0 {
			return nil, fmt.Errorf("request %d: %d blocks of group %d are free, it needs %d",
				q.Number, len(m.free[g]), g, n)
		}
		tables[g], m.free[g] = m.free[g][left:len(m.free[g]):len(m.free[g])], m.free[g][:left:left]
		for _, b := range tables[g] {
			if m.ended[g][b] {
				m.ended[g][b] = false
				m.reused++
			}
		}
	}
	m.untouched(tables, fmt.Sprintf("before request %d", q.Number))
	return tables, nil
}

// give gives blocks back. Precondition: they are poisoned.
func (m *groupMemory) give(t layout.Tables, failed bool) {
	for g := range t {
		m.free[g] = append(m.free[g], t[g]...)
		for _, b := range t[g] {
			m.ended[g][b] = failed
		}
	}
}

// rest looks at all blocks that are free, and counts the others.
func (m *groupMemory) rest() (leaked int) {
	m.untouched(m.free, "at the end")
	for g := range m.free {
		leaked += int(m.side.Groups[g].Blocks) - len(m.free[g])
	}
	return leaked
}

// What lies in one position of a table where it is no token.
const (
	holdsPoison = -1 // nothing was written
	holdsZeros  = -2 // the tail of the last block, on the receiving side
)

// holds lists by slot and position which token of a request lies there.
func (m *groupMemory) holds(group, block int, slots int, tokens uint64) []int64 {
	g := &m.side.Groups[group]
	list := make([]int64, slots*block)
	for i := range list {
		list[i] = holdsPoison
	}
	if g.State {
		for i := range list {
			list[i] = int64(i)
		}
		return list
	}
	at := func(kept int) int {
		if g.Ring > 0 {
			kept %= g.Ring * block
		}
		return kept
	}
	kept := 0
	for t := range int(tokens) {
		if g.Shards > 1 && t/g.Interleave%g.Shards != g.Shard {
			continue
		}
		if g.Window == 0 || t >= int(tokens)-g.Window {
			list[at(kept)] = int64(t)
		}
		kept++
	}
	for ; kept%block != 0; kept++ {
		if list[at(kept)] == holdsPoison {
			list[at(kept)] = holdsZeros
		}
	}
	return list
}

// each calls f for every cell of the blocks of a request: holds says what lies there.
func (m *groupMemory) each(t layout.Tables, tokens uint64,
	f func(c *content.Cell, v *layout.View, holds int64, cell []byte)) {
	known := map[[2]int][]int64{}
	for i := range m.side.Views {
		v := &m.side.Views[i]
		id := [2]int{v.Group, v.Tokens}
		if known[id] == nil {
			known[id] = m.holds(v.Group, v.Tokens, len(t[v.Group]), tokens)
		}
		memory := m.regions[v.Region].Bytes()
		c := content.Cell{Part: content.PartOf(v.Part), Layer: v.Layer}
		for at, holds := range known[id] {
			slot, position := at/v.Tokens, at%v.Tokens
			base := v.Base + uint64(t[v.Group][slot])*v.Block + uint64(position)*v.Token
			c.Token = uint64(max(holds, 0))
			for u := range v.Count {
				c.Unit = v.First + u
				begin := base + uint64(u)*v.Unit
				f(&c, v, holds, memory[begin:begin+v.Cell])
			}
		}
	}
}

// had reports whether the token is on the receiving side before the request comes. There it has
// other content than the request has, so that it shows where it is written nevertheless.
func (m *groupMemory) had(q *groupRequest, v *layout.View, token int64) bool {
	return m.receives() && uint64(token) < q.From && !m.side.Groups[v.Group].State
}

func (m *groupMemory) receives() bool { return m.poison == decodePoison }

func (q *groupRequest) content(had bool) uint64 {
	if had {
		return ^q.Number
	}
	return q.Number
}

// fill makes the content of a request, or only of what a receiver has before it comes.
func (m *groupMemory) fill(t layout.Tables, q *groupRequest, before bool) {
	m.each(t, q.Tokens, func(c *content.Cell, v *layout.View, holds int64, cell []byte) {
		if had := holds >= 0 && m.had(q, v, holds); had || holds >= 0 && !before {
			c.Request = q.content(had)
			c.Fill(cell)
		}
	})
}

// check compares every byte of the blocks of a request that has come. Those of a sender are as it
// has filled them.
func (m *groupMemory) check(t layout.Tables, q *groupRequest) {
	m.each(t, q.Tokens, func(c *content.Cell, v *layout.View, holds int64, cell []byte) {
		m.compare(q, c, v, holds, cell)
		if m.receives() && holds >= 0 && !m.had(q, v, holds) {
			m.landed += uint64(len(cell))
		}
	})
}

// checkFailed compares those bytes of the blocks of a request that has failed which nothing may
// write to: on the receiving side not what may have come, nor the tail.
func (m *groupMemory) checkFailed(t layout.Tables, q *groupRequest) {
	m.each(t, q.Tokens, func(c *content.Cell, v *layout.View, holds int64, cell []byte) {
		if !m.receives() || holds == holdsPoison || holds >= 0 && m.had(q, v, holds) {
			m.compare(q, c, v, holds, cell)
		}
	})
}

// compare compares a cell with what it holds.
func (m *groupMemory) compare(q *groupRequest, c *content.Cell, v *layout.View, holds int64,
	cell []byte) {
	var n uint64
	switch {
	case holds == holdsPoison, holds == holdsZeros && !m.receives():
		n = content.CountWrong(cell, m.poison)
	case holds == holdsZeros:
		n = content.CountWrong(cell, 0)
	default:
		c.Request = q.content(m.had(q, v, holds))
		n = c.Wrong(cell)
	}
	m.checked += uint64(len(cell))
	if n > 0 {
		m.mismatch("request %d, layer %d, part %s, unit %d, token %d: %d of %d bytes",
			q.Number, v.Layer, v.Part, c.Unit, holds, n, len(cell))
	}
}

// wipe poisons the blocks of a request.
func (m *groupMemory) wipe(t layout.Tables) {
	m.each(t, 0, func(_ *content.Cell, _ *layout.View, _ int64, cell []byte) {
		fill(cell, m.poison)
	})
}

// untouched finds what was written to blocks that no request had.
func (m *groupMemory) untouched(t layout.Tables, when string) {
	m.each(t, 0, func(c *content.Cell, v *layout.View, _ int64, cell []byte) {
		m.checked += uint64(len(cell))
		if n := content.CountWrong(cell, m.poison); n > 0 {
			m.mismatch("%s: %d of %d bytes of a free block were written: layer %d, part %s, "+
				"unit %d", when, n, len(cell), v.Layer, v.Part, c.Unit)
		}
	})
}

// close gives the memory back. Precondition: no engine has it.
func (m *groupMemory) close() error {
	var errs []error
	for _, b := range m.memory {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}

func (m *groupMemory) mismatch(format string, args ...any) {
	if m.wrong++; len(m.first) < firstMax {
		m.first = append(m.first, fmt.Sprintf("rank %d: "+format,
			append([]any{m.side.Rank}, args...)...))
	}
}
