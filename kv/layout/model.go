// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"fmt"
)

// ErrGeometry is what models, geometries, specs and sides that are not well formed are
// refused with.
var ErrGeometry = errors.New("bad KV geometry")

// The bounds of what Check accepts. They keep every product in this package
// below 1 << 63 without further care.
const (
	LayersMax     = 1 << 12 // the deepest public model has 126
	PartsMax      = 8       // of a layer
	TokenBytesMax = 1 << 20 // of a part
	TokensMax     = 1 << 16 // of a block
	BlocksMax     = 1 << 31 // of a pool; block numbers are uint32
	poolBytesMax  = 1 << 62 // offsets and lengths add up without overflow
)

// Part is one tensor of a layer.
type Part struct {
	Name       string // "k", "v", "latent", "indexer"
	TokenBytes uint64 // of one token in one layer, before it is split
	// KV heads that tensor parallelism splits it by; 0: every rank holds all of it
	Heads int
}

// Model is the shape of a KV cache.
type Model struct {
	Name   string
	Layers int
	Parts  []Part // of every layer, in the order in which they lie in a block
}

// Check reports whether the shape is well formed.
func (m *Model) Check() error {
	if m.Layers < 1 || m.Layers > LayersMax {
		return fmt.Errorf("model %q: %d layers, want 1 to %d: %w", m.Name, m.Layers, LayersMax,
			ErrGeometry)
	}
	if len(m.Parts) < 1 || len(m.Parts) > PartsMax {
		return fmt.Errorf("model %q: %d parts a layer, want 1 to %d: %w", m.Name, len(m.Parts),
			PartsMax, ErrGeometry)
	}
	for _, p := range m.Parts {
		if err := p.check(); err != nil {
			return fmt.Errorf("model %q: %w", m.Name, err)
		}
	}
	return nil
}

func (p *Part) check() error {
	switch {
	case p.TokenBytes < 1 || p.TokenBytes > TokenBytesMax:
		return fmt.Errorf("part %q: %d bytes a token, want 1 to %d: %w", p.Name, p.TokenBytes,
			TokenBytesMax, ErrGeometry)
	case p.Heads < 0:
		return fmt.Errorf("part %q: %d heads: %w", p.Name, p.Heads, ErrGeometry)
	case p.Heads > 0 && p.TokenBytes%uint64(p.Heads) != 0:
		return fmt.Errorf("part %q: %d bytes a token do not divide by %d heads: %w", p.Name,
			p.TokenBytes, p.Heads, ErrGeometry)
	}
	return nil
}

// TokenLayerBytes returns what one token weighs in one layer, before it is split.
func (m *Model) TokenLayerBytes() uint64 {
	var n uint64
	for _, p := range m.Parts {
		n += p.TokenBytes
	}
	return n
}

// TokenBytes returns what one token weighs in all layers, before it is split.
func (m *Model) TokenBytes() uint64 { return uint64(m.Layers) * m.TokenLayerBytes() }

// split returns what one of tp ranks holds of the part. Where there are fewer
// heads than ranks, each head is held by several.
func (p Part) split(tp int) (Part, error) {
	switch {
	case p.Heads == 0:
	case p.Heads%tp == 0:
		p.TokenBytes /= uint64(tp)
		p.Heads /= tp
	case tp%p.Heads == 0:
		p.TokenBytes /= uint64(p.Heads)
		p.Heads = 1
	default:
		return Part{}, fmt.Errorf("part %q: %d heads do not split over %d ranks: %w", p.Name,
			p.Heads, tp, ErrGeometry)
	}
	return p, nil
}

// Stage returns what the fullest of pp pipeline stages holds of the model: its layers, divided as
// evenly as they can be, rounded up.
func (m Model) Stage(pp int) (Model, error) {
	if pp < 1 || pp > m.Layers {
		return Model{}, fmt.Errorf("model %q: %d pipeline stages, want 1 to its %d layers: %w",
			m.Name, pp, m.Layers, ErrGeometry)
	}
	m.Layers = (m.Layers + pp - 1) / pp
	return m, nil
}
