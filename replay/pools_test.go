// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestHolds: which token lies where, from the documentation of layout.Group.
func TestHolds(t *testing.T) {
	const p, z = tokenPoison, tokenZeros
	for what, c := range map[string]struct {
		group         layout.Group
		block, tokens int
		slots         int
		want          []int64
	}{
		"all":          {layout.Group{}, 4, 6, 2, []int64{0, 1, 2, 3, 4, 5, z, z}},
		"whole blocks": {layout.Group{}, 2, 4, 2, []int64{0, 1, 2, 3}},
		"none":         {layout.Group{}, 4, 0, 1, []int64{p, p, p, p}},
		"a state":      {layout.Group{State: true}, 3, 9, 1, []int64{0, 1, 2}},
		"a window":     {layout.Group{Window: 3}, 4, 6, 2, []int64{p, p, p, 3, 4, 5, z, z}},
		// 8 and 9 lie where 0 and 1 were, and 3 stays where the tail would have 11
		"a ring": {layout.Group{Window: 7, Ring: 2}, 4, 10, 2,
			[]int64{8, 9, z, 3, 4, 5, 6, 7}},
		"a longer ring": {layout.Group{Window: 2, Ring: 2}, 4, 10, 2,
			[]int64{8, 9, z, z, p, p, p, p}},
		"a shard": {layout.Group{Shards: 2, Shard: 1, Interleave: 2}, 4, 9, 2,
			[]int64{2, 3, 6, 7, p, p, p, p}},
	} {
		m := &pools{side: &layout.Side{Groups: []layout.Group{c.group}}}
		require.Equal(t, c.want, m.tokensAt(0, c.block, c.slots, uint64(c.tokens)), what)
	}
}

// poolsOf is the memory of the first rank of a group, for one request at a time.
func poolsOf(t *testing.T, poison byte, group, model string, layers int,
	tokens uint64) *pools {
	t.Helper()
	spec, err := layout.LookupSpec(model)
	require.NoError(t, err)
	g := parsed(t, group)
	sides, err := layOut(&g, cutLayers(spec, layers), tokens)
	require.NoError(t, err)
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	eng, err := engine.Open(engine.Config{Backends: []driver.Backend{b}})
	require.NoError(t, err)
	m, err := newPools(eng, sides[0], poison, 1)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, eng.Close())
		require.NoError(t, m.close())
	})
	return m
}

// TestGroupMemoryFindsEveryWrongByte: of a request, in its tail, outside its window, and in blocks
// that are free.
func TestGroupMemoryFindsEveryWrongByte(t *testing.T) {
	m := poolsOf(t, decodePoison, "tp=8,layout=hnd,block=64,window=table", "gpt-oss-120b", 2, 200)
	q := &request{Number: 4, Tokens: 150, From: 90}
	tables, err := m.reserve(q)
	require.NoError(t, err)
	m.fill(tables, q, allLayers, true)
	m.check(tables, q)
	wrong := m.wrong
	require.NotZero(t, wrong, "nothing has come")
	m.fill(tables, q, allLayers, false)
	m.wrong, m.landed = 0, 0
	m.check(tables, q)
	require.Less(t, m.wrong, wrong)
	require.EqualValues(t, 60*2*2*128, m.landed, "60 tokens in two layers, K and V")
	require.NotZero(t, m.wrong, "its tail is not zeros")
	for i, v := range m.side.Views { // 150 tokens fill two blocks and 22 positions
		for position := 22; position < 64; position++ {
			at := v.Base + uint64(tables[v.Group][2])*v.Block + uint64(position)*v.Token
			clear(m.regions[m.side.Views[i].Region].Bytes()[at : at+v.Cell])
		}
	}
	m.wrong, m.first = 0, nil
	m.check(tables, q)
	require.Zero(t, m.wrong, m.first)

	windowed := m.side.Views[0]
	require.Equal(t, 128, m.side.Groups[windowed.Group].Window)
	for what, token := range map[string]uint64{"before the window": 3, "within it": 100,
		"behind the request": 150, "there before": 89} {
		at := windowed.Base + uint64(tables[windowed.Group][token/64])*windowed.Block +
			token%64*windowed.Token
		b := m.regions[windowed.Region].Bytes()[at : at+windowed.Cell]
		b[windowed.Cell-1] ^= 0x10
		m.check(tables, q)
		require.EqualValues(t, 1, m.wrong, what)
		require.Contains(t, m.first[0], "request 4, layer 0, part k, unit 0")
		b[windowed.Cell-1] ^= 0x10
		m.wrong, m.first = 0, nil
	}

	m.poisonBlocks(tables)
	m.release(tables, true)
	require.Zero(t, m.leaked())
	require.Zero(t, m.wrong)
	late := m.regions[windowed.Region].Bytes()
	late[len(late)-1] ^= 1
	require.Zero(t, m.leaked())
	require.EqualValues(t, 1, m.wrong)
	_, err = m.reserve(q)
	require.NoError(t, err)
	require.EqualValues(t, 6, m.reused, "three blocks of either kind")
	require.Positive(t, m.leaked())
}

// endedOn is a rank with a request of 150 tokens that has ended: the decode side has had the first
// 90, and none of the others has come.
func endedOn(t *testing.T, side Side, outcome outcome) (*rank, *flight) {
	poison := prefillPoison
	if side == DecodeSide {
		poison = decodePoison
	}
	m := poolsOf(t, poison, "tp=8,layout=hnd,block=64,window=table", "gpt-oss-120b", 2, 200)
	q := &request{Number: 4, Tokens: 150, From: 90}
	tables, err := m.reserve(q)
	require.NoError(t, err)
	m.fill(tables, q, allLayers, side == DecodeSide)
	f := &flight{request: q, tables: tables, outcome: outcome}
	r := &rank{pools: m, flights: []*flight{f}}
	r.given.Side, r.plan = side, &r.given.Plan
	return r, f
}

// byteOf is the first byte of a token in the first view.
func (m *pools) byteOf(t layout.Tables, token uint64) *byte {
	v := &m.side.Views[0]
	block := uint64(t[v.Group][token/uint64(v.Tokens)])
	return &m.regions[v.Region].Bytes()[v.Base+block*v.Block+token%uint64(v.Tokens)*v.Token]
}

// TestGroupRankLooksBeforeItPoisons: what a request has written where nothing may go is found. If
// it fails, that is to tokens that were there before, and outside its window: its own bytes may
// have come. On the sending side it is all blocks, whatever became of it.
func TestGroupRankLooksBeforeItPoisons(t *testing.T) {
	lost := outcome{Error: "peer lost"}
	receiver := map[uint64]uint64{3: 1, 25: 1, 89: 1, 90: 0, 149: 0, 150: 0}
	sender := map[uint64]uint64{3: 1, 25: 1, 89: 1, 90: 1, 149: 1, 150: 1}
	for _, c := range []struct {
		side    Side
		outcome outcome
		wrong   map[uint64]uint64 // bytes, by token that was changed
	}{{DecodeSide, lost, receiver}, {PrefillSide, lost, sender},
		{PrefillSide, outcome{}, sender}} {
		for token, wrong := range c.wrong {
			r, f := endedOn(t, c.side, c.outcome)
			*r.pools.byteOf(f.tables, token) ^= 0x10
			r.poison()
			require.Zero(t, r.check(), "nothing has come")
			require.Equal(t, wrong, r.pools.wrong, "%s, token %d: %v", c.side, token,
				r.pools.first)
			require.Zero(t, r.pools.leaked())
			require.Equal(t, wrong, r.pools.wrong, "the blocks are poisoned")
		}
	}
}

// TestGroupRankLeavesWhatIsUnproven: bytes may land in the blocks still.
func TestGroupRankLeavesWhatIsUnproven(t *testing.T) {
	r, f := endedOn(t, DecodeSide, outcome{Error: "not proved to be over", Unproven: true})
	before := *r.pools.byteOf(f.tables, 3)
	r.poison()
	require.Zero(t, r.check())
	require.Equal(t, before, *r.pools.byteOf(f.tables, 3))
	require.Positive(t, r.pools.leaked())
}

// TestRing: layers that share a slot share bytes, neighbours do not; its pieces are all of a layer.
func TestRing(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	eng, err := engine.Open(engine.Config{Backends: []driver.Backend{b}})
	require.NoError(t, err)
	o := streamed(t, "deepseek-v3.2", []uint64{1, 2, 3})
	p, q := &plan{}, &request{Hashes: o.Requests[0].HashIDs, Tokens: 3 * 512, From: 512}
	require.NoError(t, p.choosePool(&o, q, 0))
	m, err := newRing(eng, p.prefill[0])
	require.NoError(t, err)
	tables, err := m.reserve(q)
	require.NoError(t, err)
	m.fill(tables, q, 0, false)
	for layer, same := range map[int]bool{1: false, 2: true, 3: false, 4: true} {
		first, pieces := m.pieces(tables, q, 0), m.pieces(tables, q, layer)
		n := 0
		for i := range pieces {
			require.Equal(t, same, bytes.Equal(first[i], pieces[i]), "layer %d", layer)
			n += len(pieces[i])
		}
		require.Equal(t, 2*512*(656+132), n)
	}
	require.NoError(t, eng.Close())
	require.NoError(t, m.close())
}

// TestKeptBlocksAreChecked: what is written to a block that was kept is found at the end.
func TestKeptBlocksAreChecked(t *testing.T) {
	m := poolsOf(t, decodePoison, "tp=1,block=512", indexer, 2, 2048)
	q := &request{Number: 1, Tokens: 1024, Hashes: []uint64{5, 6}}
	tables, err := m.reserve(q)
	require.NoError(t, err)
	m.fill(tables, q, allLayers, false)
	m.check(tables, q)
	require.Empty(t, m.addToPrefixCache(m.withoutCached(tables, q), q)[0])
	require.Zero(t, m.leaked())
	require.Zero(t, m.wrong, m.first)
	*m.byteOf(tables, 600) ^= 1
	require.Zero(t, m.leaked())
	require.EqualValues(t, 1, m.wrong)
}
