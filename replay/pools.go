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
)

// The bytes of free blocks. They differ by side: a decode that has read blocks which the prefill
// has freed then finds the prefill's poison, and not what it expects in its own.
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

	free       [][]uint32 // the free blocks, by group; reserve takes from the end
	failedLast [][]bool   // by group and block: the last request that used it has failed
	watched    uint64     // blocks that watchFailed has poisoned
	reused     uint64     // blocks that a later request got after a failed one

	// The prefix cache of a decode to which a trace is streamed: blocks by hash. The first hash in
	// evictionOrder is evicted next.
	prefixCache   map[uint64]uint32
	evictionOrder []uint64

	checked uint64   // bytes that were compared
	landed  uint64   // compared bytes that a request has brought to this rank
	wrong   uint64   // cells that differed
	first   []string // descriptions of the first mismatches, at most firstMax
}

// firstMax is how many mismatches a rank and the report describe.
const firstMax = 8

func newPools(eng *engine.Engine, side *layout.Side, poison byte, seed uint64) (*pools, error) {
	m := &pools{side: side, poison: poison, prefixCache: map[uint64]uint32{}}
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
		m.failedLast = append(m.failedLast, make([]bool, g.Blocks))
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

// reserve takes free blocks for a request and checks that they still hold poison. If a trace is
// streamed to this rank, the table begins with the blocks that the prefix cache has of the
// request's hashes, and reserve sets the request's From to their number of tokens.
func (m *pools) reserve(q *request) (layout.Tables, error) {
	if m.rings != nil {
		table := make([]uint32, len(q.Hashes))
		for i := range table {
			table[i] = uint32(i)
		}
		return layout.Tables{table}, nil
	}
	var cached []uint32
	inUse := 0 // distinct blocks in cached, which must not be evicted
	for _, h := range q.Hashes {
		b, ok := m.prefixCache[h]
		if !ok || q.Abort != nil && len(cached) == len(q.Hashes)-1 {
			break // a request to abort has to send something, so its last block is not reused
		}
		if !slices.Contains(cached, b) {
			inUse++
		}
		cached = append(cached, b)
		m.evictionOrder = slices.DeleteFunc(m.evictionOrder, func(o uint64) bool { return o == h })
		m.evictionOrder = append(m.evictionOrder, h)
	}
	if m.receives() && q.Hashes != nil {
		q.From = uint64(len(cached)) * trace.BlockTokens
	}
	tables, taken := make(layout.Tables, len(m.free)), make(layout.Tables, len(m.free))
	for g := range m.free {
		n := int(slots(m.side, g, q.Tokens)) - len(cached)
		for len(m.free[g]) < n && len(m.evictionOrder) > inUse {
			evicted := layout.Tables{{m.prefixCache[m.evictionOrder[0]]}}
			delete(m.prefixCache, m.evictionOrder[0])
			m.evictionOrder = m.evictionOrder[1:]
			m.poisonBlocks(evicted)
			m.release(evicted, false)
		}
		left := len(m.free[g]) - n
		if left < 0 {
			return nil, fmt.Errorf("request %d: %d blocks of group %d are free, it needs %d",
				q.Number, len(m.free[g]), g, n)
		}
		taken[g], m.free[g] = m.free[g][left:len(m.free[g]):len(m.free[g])], m.free[g][:left:left]
		for _, b := range taken[g] {
			if m.failedLast[g][b] {
				m.failedLast[g][b] = false
				m.reused++
			}
		}
		tables[g] = append(slices.Clone(cached), taken[g]...)
	}
	m.checkPoison(taken, fmt.Sprintf("before request %d", q.Number))
	return tables, nil
}

// withoutCached returns the blocks of a request that reserve did not find in the prefix cache.
func (m *pools) withoutCached(t layout.Tables, q *request) layout.Tables {
	if m.receives() && q.Hashes != nil {
		return layout.Tables{t[0][q.From/trace.BlockTokens:]}
	}
	return t
}

// addToPrefixCache adds the blocks of a finished request to the prefix cache. It returns those that
// the cache does not need: a block of the same hash is there already. A prefill has no cache and
// gets all of them back.
func (m *pools) addToPrefixCache(own layout.Tables, q *request) layout.Tables {
	if !m.receives() {
		return own
	}
	var rest []uint32
	for i, b := range own[0] {
		h := q.Hashes[int(q.From/trace.BlockTokens)+i]
		if _, ok := m.prefixCache[h]; ok {
			rest = append(rest, b)
			continue
		}
		m.prefixCache[h] = b
		m.evictionOrder = append(m.evictionOrder, h)
	}
	return layout.Tables{rest}
}

// release frees blocks, of a request that has failed or not. Precondition: they are poisoned.
func (m *pools) release(t layout.Tables, failed bool) {
	for g := range t {
		m.free[g] = append(m.free[g], t[g]...)
		for _, b := range t[g] {
			m.failedLast[g][b] = failed
		}
	}
}

// leaked checks the content of all free blocks and of the prefix cache, and returns the number of
// blocks that are neither.
func (m *pools) leaked() (n int) {
	m.checkPoison(m.free, "at the end")
	for h, b := range m.prefixCache {
		m.check(layout.Tables{{b}}, &request{Tokens: trace.BlockTokens, From: trace.BlockTokens,
			Hashes: []uint64{h}})
		n--
	}
	for g := range m.free {
		n += int(m.side.Groups[g].Blocks) - len(m.free[g])
	}
	return n
}

// The values of tokensAt for a position without a token.
const (
	tokenPoison = -1 // nobody has written there
	tokenZeros  = -2 // behind the last token of the last block: zeros on the receiving side
)

// tokensAt lists, for each position in a request's blocks of a group, the token that lies there.
// The position of a slot of the block table begins at slot*block.
func (m *pools) tokensAt(group, block int, slots int, tokens uint64) []int64 {
	g := &m.side.Groups[group]
	list := make([]int64, slots*block)
	for i := range list {
		list[i] = tokenPoison
	}
	if g.State {
		for i := range list {
			list[i] = int64(i)
		}
		return list
	}
	at := func(n int) int {
		if g.Ring > 0 {
			n %= g.Ring * block
		}
		return n
	}
	mine := 0 // tokens of this rank's shard so far
	for t := range int(tokens) {
		if g.Shards > 1 && t/g.Interleave%g.Shards != g.Shard {
			continue
		}
		if g.Window == 0 || t >= int(tokens)-g.Window {
			list[at(mine)] = int64(t)
		}
		mine++
	}
	for ; mine%block != 0; mine++ {
		if list[at(mine)] == tokenPoison {
			list[at(mine)] = tokenZeros
		}
	}
	return list
}

// allLayers stands for all layers where a function takes the number of one.
const allLayers = -1

// eachCell calls f for every cell of the blocks of a request in a layer. token is the token that
// lies in the cell, or a value such as tokenPoison.
func (m *pools) eachCell(t layout.Tables, tokens uint64, layer int,
	f func(c *cellID, v *layout.View, token int64, cell []byte)) {
	known := map[[2]int][]int64{}
	for i := range m.side.Views {
		v := &m.side.Views[i]
		if layer != allLayers && v.Layer != layer {
			continue
		}
		id := [2]int{v.Group, v.Tokens}
		if known[id] == nil {
			known[id] = m.tokensAt(v.Group, v.Tokens, len(t[v.Group]), tokens)
		}
		if m.progress != nil {
			m.progress()
		}
		memory := m.bytes(v.Region)
		c := cellID{Part: partNumber(v.Part), Layer: v.Layer}
		for at, token := range known[id] {
			slot, position := at/v.Tokens, at%v.Tokens
			base := v.Base + uint64(t[v.Group][slot])*v.Block + uint64(position)*v.Token
			for u := range v.Count {
				c.Unit = v.First + u
				begin := base + uint64(u)*v.Unit
				f(&c, v, token, memory[begin:begin+v.Cell])
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

// presentBefore reports whether a token is on the receiving side before the request comes, so that
// the request must not write it. If no trace is streamed, fill gives it other content than the
// sender has: a write to it then shows.
func (m *pools) presentBefore(q *request, v *layout.View, token int64) bool {
	return m.receives() && uint64(token) < q.From && !m.side.Groups[v.Group].State
}

func (m *pools) receives() bool { return m.poison == decodePoison }

// identify sets the request and the token of a cell, from which its content is computed. before
// says that the token was present before the request.
func (q *request) identify(c *cellID, token int64, before bool) {
	c.Request, c.Token = q.Number, uint64(token)
	switch {
	case q.Hashes != nil: // known by its block, whatever the request
		c.Request, c.Token = q.Hashes[token/trace.BlockTokens], c.Token%trace.BlockTokens
	case before:
		c.Request = ^q.Number
	}
}

// fill writes the content of a request in a layer. With onlyPresent it writes only the tokens that
// are present on the receiving side before the request comes.
func (m *pools) fill(t layout.Tables, q *request, layer int, onlyPresent bool) {
	m.eachCell(t, q.Tokens, layer, func(c *cellID, v *layout.View, token int64, cell []byte) {
		before := token >= 0 && m.presentBefore(q, v, token)
		if !before && (token < 0 || onlyPresent) || m.rings != nil && uint64(token) < q.From {
			return
		}
		q.identify(c, token, before)
		c.fill(cell)
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

// check compares every byte of the blocks of a finished request: on the receiving side with what
// the sender has filled in, on the sending side too, where nothing may have changed.
func (m *pools) check(t layout.Tables, q *request) {
	m.eachCell(t, q.Tokens, allLayers, func(c *cellID, v *layout.View, token int64,
		cell []byte) {
		m.compare(q, c, v, token, cell)
		if m.receives() && token >= 0 && !m.presentBefore(q, v, token) {
			m.landed += uint64(len(cell))
		}
	})
}

// checkFailed compares the bytes that a failed request must not have written. On the receiving side
// that leaves out the tokens which may have arrived, and the zeros behind the last one.
func (m *pools) checkFailed(t layout.Tables, q *request) {
	m.eachCell(t, q.Tokens, allLayers, func(c *cellID, v *layout.View, token int64,
		cell []byte) {
		if !m.receives() || token == tokenPoison || token >= 0 && m.presentBefore(q, v, token) {
			m.compare(q, c, v, token, cell)
		}
	})
}

// compare compares a cell with the content that it has to have.
func (m *pools) compare(q *request, c *cellID, v *layout.View, token int64,
	cell []byte) {
	var n uint64
	switch {
	case token == tokenPoison, token == tokenZeros && !m.receives():
		n = countWrong(cell, m.poison)
	case token == tokenZeros:
		n = countWrong(cell, 0)
	default:
		q.identify(c, token, m.presentBefore(q, v, token))
		n = c.wrong(cell)
	}
	m.checked += uint64(len(cell))
	if n > 0 {
		m.mismatch("request %d, layer %d, part %s, unit %d, token %d: %d of %d bytes differ",
			q.Number, v.Layer, v.Part, c.Unit, token, n, len(cell))
	}
}

// watchFailed poisons the blocks of a failed request, so that checkPoison finds later writes.
func (m *pools) watchFailed(t layout.Tables) {
	m.poisonBlocks(t)
	for g := range t {
		m.watched += uint64(len(t[g]))
	}
}

// poisonBlocks fills the blocks of a table with poison.
func (m *pools) poisonBlocks(t layout.Tables) {
	m.eachCell(t, 0, allLayers, func(_ *cellID, _ *layout.View, _ int64, cell []byte) {
		fill(cell, m.poison)
	})
}

// checkPoison reports free blocks that are not all poison as mismatches. when is for their texts.
func (m *pools) checkPoison(t layout.Tables, when string) {
	m.eachCell(t, 0, allLayers, func(c *cellID, v *layout.View, _ int64, cell []byte) {
		m.checked += uint64(len(cell))
		if n := countWrong(cell, m.poison); n > 0 {
			m.mismatch("%s: %d of %d bytes of a free block were written: layer %d, part %s, "+
				"unit %d", when, n, len(cell), v.Layer, v.Part, c.Unit)
		}
	})
}

// close frees the memory. Precondition: it is registered with no engine.
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
