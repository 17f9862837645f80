// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"hash/fnv"
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
	tp     int
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
	g := &Geometry{tp: o.TP, tokens: uint64(o.BlockTokens), blocks: o.Blocks, order: o.Arrangement}
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
