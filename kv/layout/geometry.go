// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"hash/fnv"

	"github.com/sluicehq/sluice/driver"
)

// Arrangement is the order in which the pieces of a pool lie.
type Arrangement uint8

// The arrangements.
const (
	// BlockMajor keeps a block together: all its layers, in each all its parts.
	// A block is one range, which can be leased out as a whole.
	BlockMajor Arrangement = iota
	// LayerMajor keeps a part of a layer together: all its blocks, one behind
	// the other, as inference engines lay their cache tensors out.
	LayerMajor
)

// String returns "block-major" or "layer-major".
func (a Arrangement) String() string {
	if a == LayerMajor {
		return "layer-major"
	}
	return "block-major"
}

// What Options default to.
const (
	BlockTokens = 16
	BlockAlign  = 4096 // a page of memory
)

const alignMax = 1 << 30 // the largest page there is

// Options cut a model into blocks. The zero value of a field means its default.
type Options struct {
	BlockTokens int         // tokens of a block; default BlockTokens
	TP          int         // tensor-parallel ranks; default 1
	Arrangement Arrangement // default BlockMajor
	Blocks      uint64      // of the pool; default 1

	// BlockAlign is the power of two at whose multiples the blocks of a
	// block-major pool begin; default BlockAlign, 1 leaves no gaps. A block that
	// shares a page with another gets no fresh pages when a peer on this host is
	// frozen in the middle of a write, so that its lease has no proof and the pool
	// loses the block. In a pool of reserved huge pages it has to be 2 MiB.
	BlockAlign uint64
}

// Geometry is a pool of blocks of one model on one rank.
type Geometry struct {
	model  Model // parts as one rank holds them
	tokens uint64
	blocks uint64
	order  Arrangement
	within []uint64 // offset of each part within a layer of a block
	layer  uint64   // bytes of a layer of a block
	// from a block to the next in a block-major pool; in a layer-major one the bytes of a block
	stride uint64
}

// New checks the model and the options and makes a geometry.
func New(m Model, o Options) (*Geometry, error) {
	if err := m.Check(); err != nil {
		return nil, err
	}
	o.ensureDefaults()
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("model %q: %w", m.Name, err)
	}
	g := &Geometry{tokens: uint64(o.BlockTokens), blocks: o.Blocks, order: o.Arrangement}
	g.model = Model{Name: m.Name, Layers: m.Layers}
	for _, p := range m.Parts {
		p, err := p.split(o.TP)
		if err != nil {
			return nil, fmt.Errorf("model %q: %w", m.Name, err)
		}
		g.model.Parts = append(g.model.Parts, p)
		g.within = append(g.within, g.layer)
		g.layer += g.tokens * p.TokenBytes
	}
	// At most 2^12 layers of 2^3 parts of 2^16 tokens of 2^20 bytes: 2^51.
	g.stride = g.BlockBytes()
	if g.order == BlockMajor {
		g.stride = (g.stride + o.BlockAlign - 1) &^ (o.BlockAlign - 1)
	}
	if g.blocks > poolBytesMax/g.stride {
		return nil, fmt.Errorf("model %q: %d blocks of %d bytes are too much: %w", m.Name, g.blocks,
			g.BlockBytes(), ErrGeometry)
	}
	return g, nil
}

func (o *Options) ensureDefaults() {
	if o.BlockTokens == 0 {
		o.BlockTokens = BlockTokens
	}
	if o.TP == 0 {
		o.TP = 1
	}
	if o.Blocks == 0 {
		o.Blocks = 1
	}
	if o.BlockAlign == 0 {
		o.BlockAlign = BlockAlign
	}
}

func (o *Options) check() error {
	switch {
	case o.BlockTokens < 1 || o.BlockTokens > TokensMax:
		return fmt.Errorf("%d tokens a block, want 1 to %d: %w", o.BlockTokens, TokensMax,
			ErrGeometry)
	case o.TP < 1:
		return fmt.Errorf("%d tensor-parallel ranks: %w", o.TP, ErrGeometry)
	case o.Blocks > BlocksMax:
		return fmt.Errorf("%d blocks, want at most %d: %w", o.Blocks, uint64(BlocksMax),
			ErrGeometry)
	case o.BlockAlign > alignMax || o.BlockAlign&(o.BlockAlign-1) != 0:
		return fmt.Errorf("blocks aligned to %d bytes, want a power of two up to %d: %w",
			o.BlockAlign, alignMax, ErrGeometry)
	case o.Arrangement > LayerMajor:
		return fmt.Errorf("arrangement %d: %w", o.Arrangement, ErrGeometry)
	}
	return nil
}

// Fingerprint is equal for geometries whose blocks hold the same bytes in the
// same parts, whatever the number of blocks and their arrangement. Two sides of
// a hand-over compare it.
func (g *Geometry) Fingerprint() uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d layers, %d tokens", g.model.Layers, g.tokens)
	for _, p := range g.model.Parts {
		fmt.Fprintf(h, ", %q %d", p.Name, p.TokenBytes)
	}
	return h.Sum64()
}

// Range is a run of bytes in a pool or a region.
type Range = driver.Range

// Model returns the model's name.
func (g *Geometry) Model() string { return g.model.Name }

// Layers returns the number of layers.
func (g *Geometry) Layers() int { return g.model.Layers }

// Parts returns the parts of a layer as one rank holds them. The slice belongs
// to the geometry.
func (g *Geometry) Parts() []Part { return g.model.Parts }

// Tokens returns the tokens of a block.
func (g *Geometry) Tokens() int { return int(g.tokens) }

// Blocks returns the blocks of the pool.
func (g *Geometry) Blocks() uint64 { return g.blocks }

// Arrangement returns how the pieces of the pool lie.
func (g *Geometry) Arrangement() Arrangement { return g.order }

// TokenBytes returns what a token weighs in all layers on one rank.
func (g *Geometry) TokenBytes() uint64 { return g.model.TokenBytes() }

// PartBytes returns what a part of one layer of one block weighs, or 0 where
// there is no such part.
func (g *Geometry) PartBytes(part int) uint64 {
	if part < 0 || part >= len(g.model.Parts) {
		return 0
	}
	return g.tokens * g.model.Parts[part].TokenBytes
}

// LayerBytes returns what one layer of one block weighs.
func (g *Geometry) LayerBytes() uint64 { return g.layer }

// BlockBytes returns what one block weighs.
func (g *Geometry) BlockBytes() uint64 { return uint64(g.model.Layers) * g.layer }

// Stride returns the bytes from one block to the next in a block-major pool, the
// gap between them included.
func (g *Geometry) Stride() uint64 { return g.stride }

// PoolBytes returns the size of the pool: the least one of a region for it.
func (g *Geometry) PoolBytes() uint64 { return g.blocks * g.stride }

// BlocksFor returns how many blocks a prompt of that many tokens takes.
func (g *Geometry) BlocksFor(tokens uint64) uint64 {
	return tokens/g.tokens + min(1, tokens%g.tokens)
}

// BlocksIn returns how many blocks fit in a pool of that many bytes.
func (g *Geometry) BlocksIn(bytes uint64) uint64 { return bytes / g.stride }

// Piece returns where a part of a layer of a block lies in the pool.
func (g *Geometry) Piece(block uint64, layer, part int) (Range, error) {
	if err := g.check(block, layer, part); err != nil {
		return Range{}, err
	}
	n := g.PartBytes(part)
	if g.order == LayerMajor {
		return Range{Off: g.blocks*(uint64(layer)*g.layer+g.within[part]) + block*n, Len: n}, nil
	}
	return Range{Off: block*g.stride + uint64(layer)*g.layer + g.within[part], Len: n}, nil
}

// Block returns the range of a whole block, which exists where blocks are kept
// together.
func (g *Geometry) Block(block uint64) (Range, error) {
	if g.order != BlockMajor {
		return Range{}, fmt.Errorf("a block is not one range in a %v pool: %w", g.order,
			ErrGeometry)
	}
	if err := g.check(block, 0, 0); err != nil {
		return Range{}, err
	}
	return Range{Off: block * g.stride, Len: g.BlockBytes()}, nil
}

func (g *Geometry) check(block uint64, layer, part int) error {
	switch {
	case block >= g.blocks:
		return fmt.Errorf("block %d of %d: %w", block, g.blocks, ErrGeometry)
	case layer < 0 || layer >= g.model.Layers:
		return fmt.Errorf("layer %d of %d: %w", layer, g.model.Layers, ErrGeometry)
	case part < 0 || part >= len(g.model.Parts):
		return fmt.Errorf("part %d of %d: %w", part, len(g.model.Parts), ErrGeometry)
	}
	return nil
}
