// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/trace"
	"github.com/sluicehq/sluice/replay/internal/content"
)

// What lies in blocks that no request has: the sides differ, so that a read of blocks that a
// sender has back shows up, too.
const (
	prefillPoison byte = 0xb7
	decodePoison  byte = 0x6d
)

// pools is the memory of one rank, with its block tables. All that it knows of a layout is what
// layout.Group and layout.View say, so that it shares no fault with plans and patterns.
type pools struct {
	side    *layout.Side
	regions []*engine.Region
	memory  []*engine.Memory
	rings   [][]byte // of a prefill that streams, in place of memory
	poison  byte
	// progress is called now and then by what takes long; nil: nothing is.
	progress func()

	free    [][]uint32 // by group; the last is used next
	ended   [][]bool   // by group and block: a request that failed had it last
	watched uint64     // blocks that were poisoned behind one
	reused  uint64     // of those, taken again

	// Of a decode that a trace is streamed to: blocks by their hashes, the first in order is
	// evicted next.
	kept  map[uint64]uint32
	order []uint64

	checked uint64 // bytes that were compared
	landed  uint64 // of them, those of requests that have come
	wrong   uint64 // cells
	first   []string
}

// firstMax is how many mismatches a rank and the report describe.
const firstMax = 8

func newPools(eng *engine.Engine, side *layout.Side, poison byte, seed uint64) (*pools, error) {
	m := &pools{side: side, poison: poison, kept: map[uint64]uint32{}}
	for _, area := range side.Regions {
		if area.Bytes == 0 {
			m.regions = append(m.regions, nil)
			continue
		}
		b, err := eng.Alloc(area.Bytes, engine.AllocOptions{Purpose: "kv", Populate: true})
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

// reserve takes blocks for a request, which are as the last one has left them. Where a trace is
// streamed, the first ones are those that were kept for its hashes, which From says.
func (m *pools) reserve(q *request) (layout.Tables, error) {
	if m.rings != nil {
		table := make([]uint32, len(q.Hashes))
		for i := range table {
			table[i] = uint32(i)
		}
		return layout.Tables{table}, nil
	}
	var had []uint32
	inUse := 0 // distinct ones
	for _, h := range q.Hashes {
		b, ok := m.kept[h]
		if !ok || q.Abort != nil && len(had) == len(q.Hashes)-1 {
			break // what is to be ended has to send something
		}
		if !slices.Contains(had, b) {
			inUse++
		}
		had = append(had, b)
		m.order = append(slices.DeleteFunc(m.order, func(o uint64) bool { return o == h }), h)
	}
	if m.receives() && q.Hashes != nil {
		q.From = uint64(len(had)) * trace.BlockTokens
	}
	tables, taken := make(layout.Tables, len(m.free)), make(layout.Tables, len(m.free))
	for g := range m.free {
		n := int(slots(m.side, g, q.Tokens)) - len(had)
		for len(m.free[g]) < n && len(m.order) > inUse {
			evicted := layout.Tables{{m.kept[m.order[0]]}}
			delete(m.kept, m.order[0])
			m.order = m.order[1:]
			m.wipe(evicted)
			m.release(evicted, false)
		}
		left := len(m.free[g]) - n
		if left < 0 {
			return nil, fmt.Errorf("request %d: %d blocks of group %d are free, it needs %d",
				q.Number, len(m.free[g]), g, n)
		}
		taken[g], m.free[g] = m.free[g][left:len(m.free[g]):len(m.free[g])], m.free[g][:left:left]
		for _, b := range taken[g] {
			if m.ended[g][b] {
				m.ended[g][b] = false
				m.reused++
			}
		}
		tables[g] = append(slices.Clone(had), taken[g]...)
	}
	m.untouched(taken, fmt.Sprintf("before request %d", q.Number))
	return tables, nil
}

// own returns the blocks that only this request has: all but those that were kept for its hashes.
func (m *pools) own(t layout.Tables, q *request) layout.Tables {
	if m.receives() && q.Hashes != nil {
		return layout.Tables{t[0][q.From/trace.BlockTokens:]}
	}
	return t
}

// keep keeps the blocks of a request that has come for later ones, and returns the others: those of
// hashes that are there already.
func (m *pools) keep(own layout.Tables, q *request) layout.Tables {
	if !m.receives() {
		return own
	}
	var rest []uint32
	for i, b := range own[0] {
		h := q.Hashes[int(q.From/trace.BlockTokens)+i]
		if _, ok := m.kept[h]; ok {
			rest = append(rest, b)
			continue
		}
		m.kept[h] = b
		m.order = append(m.order, h)
	}
	return layout.Tables{rest}
}

// release gives blocks back. Precondition: they are poisoned.
func (m *pools) release(t layout.Tables, failed bool) {
	for g := range t {
		m.free[g] = append(m.free[g], t[g]...)
		for _, b := range t[g] {
			m.ended[g][b] = failed
		}
	}
}

// leaked looks at all blocks that are free or kept, and counts the others.
func (m *pools) leaked() (n int) {
	m.untouched(m.free, "at the end")
	for h, b := range m.kept {
		m.check(layout.Tables{{b}}, &request{Tokens: trace.BlockTokens, From: trace.BlockTokens,
			Hashes: []uint64{h}})
		n--
	}
	for g := range m.free {
		n += int(m.side.Groups[g].Blocks) - len(m.free[g])
	}
	return n
}

// What lies in one position of a table where it is no token.
const (
	holdsPoison = -1 // nothing was written
	holdsZeros  = -2 // the tail of the last block, on the receiving side
)

// holds lists by slot and position which token of a request lies there.
func (m *pools) holds(group, block int, slots int, tokens uint64) []int64 {
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

// allLayers is in place of one layer.
const allLayers = -1

// each calls f for every cell of the blocks of a request in a layer: holds says what lies there.
func (m *pools) each(t layout.Tables, tokens uint64, layer int,
	f func(c *content.Cell, v *layout.View, holds int64, cell []byte)) {
	known := map[[2]int][]int64{}
	for i := range m.side.Views {
		v := &m.side.Views[i]
		if layer != allLayers && v.Layer != layer {
			continue
		}
		id := [2]int{v.Group, v.Tokens}
		if known[id] == nil {
			known[id] = m.holds(v.Group, v.Tokens, len(t[v.Group]), tokens)
		}
		if m.progress != nil {
			m.progress()
		}
		memory := m.bytes(v.Region)
		c := content.Cell{Part: content.PartOf(v.Part), Layer: v.Layer}
		for at, holds := range known[id] {
			slot, position := at/v.Tokens, at%v.Tokens
			base := v.Base + uint64(t[v.Group][slot])*v.Block + uint64(position)*v.Token
			for u := range v.Count {
				c.Unit = v.First + u
				begin := base + uint64(u)*v.Unit
				f(&c, v, holds, memory[begin:begin+v.Cell])
			}
		}
	}
}

// bytes is the memory of a region.
func (m *pools) bytes(region int) []byte {
	if m.rings != nil {
		return m.rings[region]
	}
	return m.regions[region].Bytes()
}

// had reports whether the token is on the receiving side before the request comes. Where no trace
// is streamed it has other content there than the request has, so that it shows where it is
// written nevertheless.
func (m *pools) had(q *request, v *layout.View, token int64) bool {
	return m.receives() && uint64(token) < q.From && !m.side.Groups[v.Group].State
}

func (m *pools) receives() bool { return m.poison == decodePoison }

// name says in a cell which token of a request it is.
func (q *request) name(c *content.Cell, token int64, had bool) {
	c.Request, c.Token = q.Number, uint64(token)
	switch {
	case q.Hashes != nil: // known by its block, whatever the request
		c.Request, c.Token = q.Hashes[token/trace.BlockTokens], c.Token%trace.BlockTokens
	case had:
		c.Request = ^q.Number
	}
}

// fill makes the content of a request in a layer, or only of what a receiver has before it comes.
func (m *pools) fill(t layout.Tables, q *request, layer int, before bool) {
	m.each(t, q.Tokens, layer, func(c *content.Cell, v *layout.View, holds int64, cell []byte) {
		had := holds >= 0 && m.had(q, v, holds)
		if !had && (holds < 0 || before) || m.rings != nil && uint64(holds) < q.From {
			return
		}
		q.name(c, holds, had)
		c.Fill(cell)
	})
}

// pieces returns the bytes of a layer that a prefill which streams hands over.
func (m *pools) pieces(t layout.Tables, q *request, layer int) (list [][]byte) {
	for i := range m.side.Views {
		if v := &m.side.Views[i]; v.Layer == layer {
			for _, b := range t[0][q.From/trace.BlockTokens:] {
				at := v.Base + uint64(b)*v.Block
				list = append(list, m.rings[v.Region][at:at+uint64(v.Tokens)*v.Token])
			}
		}
	}
	return list
}

// check compares every byte of the blocks of a request that has come. Those of a sender are as it
// has filled them.
func (m *pools) check(t layout.Tables, q *request) {
	m.each(t, q.Tokens, allLayers, func(c *content.Cell, v *layout.View, holds int64, cell []byte) {
		m.compare(q, c, v, holds, cell)
		if m.receives() && holds >= 0 && !m.had(q, v, holds) {
			m.landed += uint64(len(cell))
		}
	})
}

// checkFailed compares those bytes of the blocks of a request that has failed which nothing may
// write to: on the receiving side not what may have come, nor the tail.
func (m *pools) checkFailed(t layout.Tables, q *request) {
	m.each(t, q.Tokens, allLayers, func(c *content.Cell, v *layout.View, holds int64, cell []byte) {
		if !m.receives() || holds == holdsPoison || holds >= 0 && m.had(q, v, holds) {
			m.compare(q, c, v, holds, cell)
		}
	})
}

// compare compares a cell with what it holds.
func (m *pools) compare(q *request, c *content.Cell, v *layout.View, holds int64,
	cell []byte) {
	var n uint64
	switch {
	case holds == holdsPoison, holds == holdsZeros && !m.receives():
		n = content.CountWrong(cell, m.poison)
	case holds == holdsZeros:
		n = content.CountWrong(cell, 0)
	default:
		q.name(c, holds, m.had(q, v, holds))
		n = c.Wrong(cell)
	}
	m.checked += uint64(len(cell))
	if n > 0 {
		m.mismatch("request %d, layer %d, part %s, unit %d, token %d: %d of %d bytes differ",
			q.Number, v.Layer, v.Part, c.Unit, holds, n, len(cell))
	}
}

// watch poisons the blocks of a request that has failed: what is written there later is found.
func (m *pools) watch(t layout.Tables) {
	m.wipe(t)
	for g := range t {
		m.watched += uint64(len(t[g]))
	}
}

// wipe poisons the blocks of a request.
func (m *pools) wipe(t layout.Tables) {
	m.each(t, 0, allLayers, func(_ *content.Cell, _ *layout.View, _ int64, cell []byte) {
		fill(cell, m.poison)
	})
}

// untouched finds what was written to blocks that no request had.
func (m *pools) untouched(t layout.Tables, when string) {
	m.each(t, 0, allLayers, func(c *content.Cell, v *layout.View, _ int64, cell []byte) {
		m.checked += uint64(len(cell))
		if n := content.CountWrong(cell, m.poison); n > 0 {
			m.mismatch("%s: %d of %d bytes of a free block were written: layer %d, part %s, "+
				"unit %d", when, n, len(cell), v.Layer, v.Part, c.Unit)
		}
	})
}

// close gives the memory back. Precondition: no engine has it.
func (m *pools) close() error {
	var errs []error
	for _, b := range m.memory {
		errs = append(errs, b.Close())
	}
	for _, b := range m.rings {
		errs = append(errs, unmapRing(b))
	}
	return errors.Join(errs...)
}

func (m *pools) mismatch(format string, args ...any) {
	if m.wrong++; len(m.first) < firstMax {
		m.first = append(m.first, fmt.Sprintf("rank %d: "+format,
			append([]any{m.side.Rank}, args...)...))
	}
}
