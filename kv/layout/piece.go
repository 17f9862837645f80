// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

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

// TP returns the number of tensor-parallel ranks.
func (g *Geometry) TP() int { return g.tp }

// Blocks returns the blocks of the pool.
func (g *Geometry) Blocks() uint64 { return g.blocks }

// Arrangement returns how the pieces of the pool lie.
func (g *Geometry) Arrangement() Arrangement { return g.order }

// TokenLayerBytes returns what a token weighs in one layer on one rank.
func (g *Geometry) TokenLayerBytes() uint64 { return g.model.TokenLayerBytes() }

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
