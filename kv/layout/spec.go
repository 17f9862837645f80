// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"strings"
)

// Order is how the cells of a tensor lie: its axes, outermost first. They are L for layers,
// P for parts, B for blocks, T for tokens (or positions of a state) and H for heads (or
// units of a state). Each axis stands there once.
type Order string

// The orders that serving engines use. K and V are parts, so that [2, ...] is P.
const (
	VLLMNHD        Order = "LPBTH" // [2, blocks, tokens, heads]; K and V apart
	VLLMHND        Order = "LPBHT" // the same, heads outside tokens
	VLLMFusedNHD   Order = "LBPTH" // [blocks, 2, tokens, heads]; K and V fused in a block
	VLLMFusedHND   Order = "LBPHT"
	VLLMCellsNHD   Order = "LBTHP" // [blocks, tokens, heads, 2 x head size]
	VLLMCellsHND   Order = "LBHTP"
	VLLMCrossNHD   Order = "BLPTH" // cross-layer: a block holds all layers
	VLLMCrossHND   Order = "BHLPT"
	SGLangLayer    Order = "PLBTH" // layer_first
	SGLangPage     Order = "PBTLH" // page_first: all layers of a token
	SGLangDirect   Order = "PBLTH" // page_first_direct
	SGLangPageHead Order = "PBHTL" // page_head
	StateDS        Order = "LBPHT" // convolution states: channels outside positions
	StateSD        Order = "LBTPH" // positions outside channels
)

// Cells is one part of the tensors of a Spec.
type Cells struct {
	Name  string
	DType string
	Units int    // heads or state units of the model; 1: every rank holds it all
	Bytes uint64 // of one token, or position of a state, in one unit
}

// Tensors are the layers of a model that keep the same parts, in memory of one order.
type Tensors struct {
	Layers    []int // global numbers, ascending
	Parts     []Cells
	Window    int   // tokens; 0: all
	Positions int   // of a state; 0: these are not states but tokens
	Order     Order // in place of that of the Placement, if not empty
}

// Spec is the shape of the cache of a model, whose layers need not be alike: LookupSpec has those
// of public models, NewSide cuts one into blocks for a rank.
type Spec struct {
	Name    string
	Tensors []Tensors
}

// Placement says what one rank holds of a Spec, and how its engine lays it out.
type Placement struct {
	Rank, TP    int    // tensor-parallel rank and their number
	Layers      [2]int // pipeline stage: global layers from, to (excluded); zero: all
	DP          int    // data-parallel group
	BlockTokens int    // default BlockTokens
	Blocks      uint32 // of a pool; default 1
	StateBlocks uint32 // of a pool of states; default Blocks
	Order       Order  // of what is kept by token; default VLLMNHD
	StateOrder  Order  // of states; default StateDS

	Shards, Interleave int  // of tokens, over the ranks of a tensor-parallel group: rank % Shards
	Ring               bool // the tables of windows wrap
}

// NewSide lays out one rank of a model. Each Tensors of the spec has a region, "kv0", "kv1"
// and so on by its number, as large as its blocks need; tensors with the same window share a
// block table, and states have one of their own. Errors are ErrGeometry. Unit u of a part
// is on the rank r with r*Units/TP == u where there are more ranks than units.
func NewSide(spec Spec, p Placement) (*Side, error) {
	p.ensureDefaults()
	s := &Side{Version: SideVersion, Model: spec.Name, Rank: p.Rank, DP: p.DP}
	if p.Rank < 0 || p.TP < 1 || p.Rank >= p.TP || p.TP > RanksMax ||
		p.BlockTokens < 1 || p.BlockTokens > TokensMax {
		return nil, fmt.Errorf("model %q: rank %d of %d, %d tokens a block: %w", spec.Name, p.Rank,
			p.TP, p.BlockTokens, ErrGeometry)
	}
	if p.Shards > 1 && p.TP%p.Shards != 0 {
		return nil, fmt.Errorf("model %q: %d shards of tokens over %d ranks: dcp must divide tp: "+
			"%w", spec.Name, p.Shards, p.TP, ErrGeometry)
	}
	groups := map[[2]int]int{} // window, 1 for a state
	for i := range spec.Tensors {
		t := &spec.Tensors[i]
		id := [2]int{t.Window, min(1, t.Positions)}
		group, ok := groups[id]
		if !ok {
			group = len(s.Groups)
			groups[id] = group
			s.Groups = append(s.Groups, p.group(t))
		}
		if err := s.place(t, &p, i, group); err != nil {
			return nil, fmt.Errorf("model %q: %w", spec.Name, err)
		}
	}
	if err := s.Check(); err != nil {
		return nil, fmt.Errorf("model %q: %w", spec.Name, err)
	}
	return s, nil
}

func (p *Placement) ensureDefaults() {
	if p.BlockTokens == 0 {
		p.BlockTokens = BlockTokens
	}
	if p.TP == 0 {
		p.TP = 1
	}
	if p.Blocks == 0 {
		p.Blocks = 1
	}
	if p.StateBlocks == 0 {
		p.StateBlocks = p.Blocks
	}
	if p.Order == "" {
		p.Order = VLLMNHD
	}
	if p.StateOrder == "" {
		p.StateOrder = StateDS
	}
	if p.Layers == [2]int{} {
		p.Layers = [2]int{0, LayersMax}
	}
}

func (p *Placement) group(t *Tensors) Group {
	g := Group{Blocks: p.Blocks, State: t.Positions > 0, Window: t.Window}
	if g.State {
		g.Blocks = p.StateBlocks
		return g
	}
	if p.Shards > 1 {
		g.Shards, g.Shard, g.Interleave = p.Shards, p.Rank%p.Shards, p.Interleave
	}
	if p.Ring && t.Window > 0 {
		g.Ring = (t.Window+p.BlockTokens-1)/p.BlockTokens + 1
	}
	return g
}

// place appends the views of one tensor and the region that they lie in.
func (s *Side) place(t *Tensors, p *Placement, number, group int) error {
	var layers []int
	for _, l := range t.Layers {
		if l >= p.Layers[0] && l < p.Layers[1] {
			layers = append(layers, l)
		}
	}
	n := &nest{order: t.Order, layers: uint64(len(layers)), blocks: uint64(p.Blocks),
		tokens: uint64(p.BlockTokens)}
	if t.Positions > 0 {
		n.tokens, n.blocks = uint64(t.Positions), uint64(p.StateBlocks)
	}
	if n.order == "" && t.Positions > 0 {
		n.order = p.StateOrder
	} else if n.order == "" {
		n.order = p.Order
	}
	first := make([]int, len(t.Parts))
	for i, c := range t.Parts {
		if c.Units < 1 || c.Units > UnitsMax || c.Units%p.TP != 0 && p.TP%c.Units != 0 {
			return fmt.Errorf("part %q: %d heads do not split over %d ranks: tp must divide %d, "+
				"or be a multiple of it: %w", c.Name, c.Units, p.TP, c.Units, ErrGeometry)
		}
		if c.Bytes < 1 || c.Bytes > TokenBytesMax {
			return fmt.Errorf("part %q: cells of %d bytes: %w", c.Name, c.Bytes, ErrGeometry)
		}
		first[i] = p.Rank * c.Units / p.TP
		n.parts = append(n.parts, cells{max(1, uint64(c.Units/p.TP)), c.Bytes})
	}
	if err := n.check(); err != nil {
		return err
	}
	s.Regions = append(s.Regions, Area{fmt.Sprintf("kv%d", number), n.size(0, -1)})
	for i, l := range layers {
		for j, c := range t.Parts {
			s.Views = append(s.Views, View{Layer: l, Part: c.Name, DType: c.DType, Cell: c.Bytes,
				Units: c.Units, First: first[j], Count: int(n.parts[j].units),
				Tokens: int(n.tokens), Region: len(s.Regions) - 1, Group: group,
				Base:  uint64(i)*n.stride('L', j) + n.partBase(j),
				Block: n.stride('B', j), Unit: n.stride('H', j), Token: n.stride('T', j)})
		}
	}
	return nil
}

// nest computes the strides of an Order.
type nest struct {
	order                  Order
	layers, blocks, tokens uint64
	parts                  []cells
}

type cells struct{ units, bytes uint64 }

func (n *nest) check() error {
	if len(n.order) != 5 || strings.Trim(string(n.order), "LPBTH") != "" {
		return fmt.Errorf("order %q, want L, P, B, T and H once each: %w", n.order, ErrGeometry)
	}
	for _, a := range "LPBTH" {
		if strings.Count(string(n.order), string(a)) != 1 {
			return fmt.Errorf("order %q has not one %c: %w", n.order, a, ErrGeometry)
		}
	}
	if len(n.parts) < 1 || len(n.parts) > PartsMax || n.layers > LayersMax {
		return fmt.Errorf("%d parts, %d layers: %w", len(n.parts), n.layers, ErrGeometry)
	}
	var bytes float64
	for _, c := range n.parts {
		if c.units != n.parts[0].units &&
			strings.IndexByte(string(n.order), 'H') < strings.IndexByte(string(n.order), 'P') {
			return fmt.Errorf("order %q puts parts of %d and %d units within a unit: %w", n.order,
				n.parts[0].units, c.units, ErrGeometry)
		}
		bytes += float64(c.units) * float64(c.bytes)
	}
	if bytes*float64(n.layers)*float64(n.blocks)*float64(n.tokens) > poolBytesMax {
		return fmt.Errorf("%d blocks of %d tokens in %d layers are too large: %w", n.blocks,
			n.tokens, n.layers, ErrGeometry)
	}
	return nil
}

// size returns the bytes that the axes from number at on span: of one part, or, where P is
// among them or part is -1, of all of them.
func (n *nest) size(at, part int) uint64 {
	if part < 0 || strings.IndexByte(string(n.order[at:]), 'P') >= 0 {
		var sum uint64
		for i := range n.parts {
			sum += n.bytes(at, i)
		}
		return sum
	}
	return n.bytes(at, part)
}

// bytes returns what one part takes of the axes from number at on.
func (n *nest) bytes(at, part int) uint64 {
	product := n.parts[part].bytes
	for _, a := range n.order[at:] {
		switch a {
		case 'L':
			product *= n.layers
		case 'B':
			product *= n.blocks
		case 'T':
			product *= n.tokens
		case 'H':
			product *= n.parts[part].units
		}
	}
	return product
}

func (n *nest) stride(axis byte, part int) uint64 {
	return n.size(strings.IndexByte(string(n.order), axis)+1, part)
}

// partBase returns where the part begins within the first of the outer axes.
func (n *nest) partBase(part int) uint64 {
	var sum uint64
	for i := range part {
		sum += n.bytes(strings.IndexByte(string(n.order), 'P')+1, i)
	}
	return sum
}
