// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPiecesTile checks, for every preset and arrangement, that the pieces of a
// pool cover it without gap or overlap.
func TestPiecesTile(t *testing.T) {
	for _, name := range Names() {
		m, _ := Lookup(name)
		for _, order := range []Arrangement{BlockMajor, LayerMajor} {
			g := geometry(t, m, Options{BlockTokens: 48, TP: 4, Arrangement: order, Blocks: 5,
				BlockAlign: 1})
			var all []Range
			for block := range g.Blocks() {
				for layer := range g.Layers() {
					for part := range g.Parts() {
						r, err := g.Piece(block, layer, part)
						require.NoError(t, err)
						all = append(all, r)
					}
				}
			}
			slices.SortFunc(all, func(a, b Range) int { return int(int64(a.Off) - int64(b.Off)) })
			var end uint64
			for _, r := range all {
				if r.Off != end || r.Len == 0 {
					t.Fatalf("%s %v: a piece at %d, want %d", name, order, r.Off, end)
				}
				end += r.Len
			}
			if end != g.PoolBytes() {
				t.Errorf("%s %v: pieces end at %d of %d", name, order, end, g.PoolBytes())
			}
		}
	}
}

func TestBlockHoldsItsPieces(t *testing.T) {
	m, _ := Lookup("deepseek-v3.2")
	g := geometry(t, m, Options{Blocks: 3})
	whole, err := g.Block(2)
	require.NoError(t, err)
	first, _ := g.Piece(2, 0, 0)
	last, _ := g.Piece(2, 60, 1)
	if first.Off != whole.Off || last.Off+last.Len != whole.Off+whole.Len {
		t.Errorf("block 2 is %v, its pieces run from %v to %v", whole, first, last)
	}
	layers := geometry(t, m, Options{Blocks: 3, Arrangement: LayerMajor})
	if _, err := layers.Block(2); !errors.Is(err, ErrGeometry) {
		t.Errorf("a layer-major block: %v", err)
	}
	a, _ := layers.Piece(1, 7, 1)
	b, _ := layers.Piece(2, 7, 1)
	if a.Off+a.Len != b.Off {
		t.Errorf("neighbours of a layer-major part: %v, %v", a, b)
	}
}

func TestBlocksShareNoPage(t *testing.T) {
	m, _ := Lookup("deepseek-v3.2") // blocks of 769,088 bytes: 187.8 pages
	for _, align := range []uint64{0, 1, 4096, 2 << 20} {
		g := geometry(t, m, Options{Blocks: 3, BlockAlign: align})
		at, want := uint64(0), max(align, 1)
		if align == 0 {
			want = 4096
		}
		for block := range g.Blocks() {
			r, err := g.Block(block)
			if err != nil || r.Off%want != 0 || r.Off < at || r.Off-at >= want || r.Len != 769088 {
				t.Errorf("align %d: block %d at %+v behind %d: %v", align, block, r, at, err)
			}
			at = r.Off + r.Len
		}
		if g.PoolBytes() < at || g.PoolBytes()-at >= want || g.BlocksIn(g.PoolBytes()) != 3 ||
			g.BlocksIn(g.PoolBytes()-1) != 2 {
			t.Errorf("align %d: the blocks end at %d of %d", align, at, g.PoolBytes())
		}
	}
}

func TestRefusesBadInput(t *testing.T) {
	good, _ := Lookup("llama3.1-8b")
	part := good.Parts[0]
	with := func(change func(*Model)) Model {
		m := good
		m.Parts = []Part{part}
		change(&m)
		return m
	}
	for _, c := range []struct {
		what string
		m    Model
		o    Options
	}{
		{"no layers", with(func(m *Model) { m.Layers = 0 }), Options{}},
		{"too many layers", with(func(m *Model) { m.Layers = LayersMax + 1 }), Options{}},
		{"no parts", with(func(m *Model) { m.Parts = nil }), Options{}},
		{"too many parts", with(func(m *Model) {
			m.Parts = slices.Repeat(m.Parts, PartsMax+1)
		}), Options{}},
		{"a part of nothing", with(func(m *Model) { m.Parts[0].TokenBytes = 0 }), Options{}},
		{"a part too large", with(func(m *Model) {
			m.Parts[0].TokenBytes = math.MaxUint64
		}), Options{}},
		{"heads below 0", with(func(m *Model) { m.Parts[0].Heads = -1 }), Options{}},
		{"heads that do not divide", with(func(m *Model) { m.Parts[0].Heads = 3 }), Options{}},
		{"ranks that do not divide", good, Options{TP: 3}},
		{"ranks below 0", good, Options{TP: -1}},
		{"tokens below 0", good, Options{BlockTokens: -1}},
		{"too many tokens", good, Options{BlockTokens: TokensMax + 1}},
		{"too many blocks", good, Options{Blocks: math.MaxUint64}},
		{"an alignment of no power of two", good, Options{BlockAlign: 4097}},
		{"an alignment too large", good, Options{BlockAlign: 1 << 40}},
		{"no such arrangement", good, Options{Arrangement: 7}},
	} {
		if _, err := New(c.m, c.o); !errors.Is(err, ErrGeometry) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

func TestLargestStaysWithinBounds(t *testing.T) {
	m := Model{Name: "largest", Layers: LayersMax,
		Parts: slices.Repeat([]Part{{Name: "x", TokenBytes: TokenBytesMax}}, PartsMax)}
	if _, err := New(m, Options{BlockTokens: TokensMax, Blocks: BlocksMax}); !errors.Is(err,
		ErrGeometry) {
		t.Errorf("a pool of 2^82 bytes: %v", err)
	}
	g := geometry(t, m, Options{BlockTokens: TokensMax, Blocks: 1 << 11})
	r, err := g.Piece(1<<11-1, LayersMax-1, PartsMax-1)
	if err != nil || r.Off+r.Len != g.PoolBytes() || g.PoolBytes() != 1<<62 {
		t.Errorf("the last piece of %d bytes: %v, %v", g.PoolBytes(), r, err)
	}
}

func TestPieceOutOfBounds(t *testing.T) {
	m, _ := Lookup("llama3.1-8b")
	g := geometry(t, m, Options{Blocks: 2})
	for _, at := range []struct {
		block       uint64
		layer, part int
	}{{2, 0, 0}, {math.MaxUint64, 0, 0}, {0, -1, 0}, {0, 32, 0}, {0, 0, -1}, {0, 0, 2}} {
		if _, err := g.Piece(at.block, at.layer, at.part); !errors.Is(err, ErrGeometry) {
			t.Errorf("%+v: %v", at, err)
		}
	}
	if g.PartBytes(-1) != 0 || g.PartBytes(2) != 0 {
		t.Error("a part that does not exist weighs something")
	}
	if g.BlocksFor(0) != 0 || g.BlocksFor(16) != 1 || g.BlocksFor(17) != 2 ||
		g.BlocksFor(math.MaxUint64) != 1<<60 {
		t.Error("BlocksFor does not round up")
	}
}

func TestFingerprint(t *testing.T) {
	m, _ := Lookup("qwen3-8b")
	other, _ := Lookup("qwen3-32b")
	base := geometry(t, m, Options{}).Fingerprint()
	if geometry(t, m, Options{Blocks: 9, Arrangement: LayerMajor}).Fingerprint() != base {
		t.Error("the arrangement changes the fingerprint")
	}
	for what, g := range map[string]*Geometry{
		"the model": geometry(t, other, Options{}), "the ranks": geometry(t, m, Options{TP: 2}),
		"the block": geometry(t, m, Options{BlockTokens: 32}),
	} {
		if g.Fingerprint() == base {
			t.Errorf("%s does not change the fingerprint", what)
		}
	}
}
