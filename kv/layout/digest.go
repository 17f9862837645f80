// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"fmt"
	"sort"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
)

// Digest is the sum of a set of cells: two sums, and the number of cells. It does not depend
// on how the cells lie, so that both ends of an edge have the same digest if they hold the same
// bytes; digests of edges and layers add up (Add) to those of ranks and requests. What a digest
// can miss is in the comment of package csrc/digest.
type Digest = digest.Digest

// Seed chooses the keys of digests. Both ends need the same one; draw it at random for each
// hand-over.
type Seed = digest.Seed

// Digester digests the cells that a plan moves, under one seed. It never changes: any number of
// goroutines may use it.
type Digester struct {
	plan *Plan
	keys []*digest.Key // by Plan.kinds
}

// NewDigester derives the keys for all parts of a plan: for each part twice the bytes of a cell.
// The error is that of a part without a key, which no plan has.
func (p *Plan) NewDigester(seed Seed) (*Digester, error) {
	d := &Digester{plan: p, keys: make([]*digest.Key, len(p.kinds))}
	for i, k := range p.kinds {
		var err error
		if d.keys[i], err = digest.NewKey(seed, k.part, k.dtype, k.cell); err != nil {
			return nil, fmt.Errorf("part %q: %w", k.part, err)
		}
	}
	return d, nil
}

// DeviceMemory is a region in memory of a device, by its address.
type DeviceMemory = digest.DeviceMemory

// Summer sums cells that lie in memory of devices, as this package does in DRAM: a Backend of
// backends/cuda is one.
type Summer interface {
	// SumCells adds up the digests of all cells of the list. A cell outside its memory is
	// driver.ErrBounds, and nothing outside is read. Parallel calls are allowed.
	SumCells(list []digest.DeviceCells) (Digest, error)
}

// Held is where one end of an edge keeps a request.
type Held struct {
	Receiver bool     // the end: that of the receiver, or of the sender
	Memory   [][]byte // by the number of the region in Side.Regions; read during calls only
	Tables   Tables
	Span     Span

	// For regions that Memory has as nil, by their number. No Summer: there are none.
	Device []DeviceMemory
	Summer Summer
}

// Scope narrows a digest down. The zero value takes everything in.
type Scope struct {
	Part   string // "": all
	Units  [2]int // heads or units, from and to (excluded), by their number in the model; zero: all
	Tokens Span   // or positions of a state; zero: all
}

// coordinate is what a cell is known by beside its part, which is in the key: 12 bits of layer,
// 20 of unit and 32 of token, as the bounds of this package have them.
func coordinate(layer int, unit, token uint64) uint64 {
	return uint64(layer)<<52 | unit<<32 | token
}

// Layer digests the cells of one layer that an edge of the plan moves, in the memory of one end:
// what Edge.Layer names for the same span, and neither tails nor other blocks. An edge that does
// not carry the layer has the zero Digest. It reads each cell once and allocates nothing but a list
// for the Summer, which it calls once; cells of a few bytes, as convolution states have, take a few
// nanoseconds each in DRAM.
//
// Errors are ErrRequest, and driver.ErrBounds for a table that names a block outside the memory,
// of which nothing outside was read. What writes to the cells meanwhile changes the digest.
func (d *Digester) Layer(e *Edge, layer int, h *Held, in Scope) (Digest, error) {
	s := h.Span
	if e.plan != d.plan || s.From > s.To || s.To > BlocksMax {
		return Digest{}, fmt.Errorf("digest: tokens %d to %d, want at most %d, of an edge of the "+
			"digester's plan: %w", s.From, s.To, uint64(BlocksMax), ErrRequest)
	}
	if !e.Carries(layer) {
		return Digest{}, nil
	}
	r := digesting{d: d, h: h, in: in, layer: layer}
	i := e.at[layer] - 1
	for j := e.first[i]; j < e.first[i+1]; j++ {
		m := &e.moves[j]
		for n := range m.parts.n {
			if err := r.part(m, e.parts[m.part+int(n)], n); err != nil {
				return Digest{}, err
			}
		}
	}
	if len(r.far) > 0 {
		sum, err := h.Summer.SumCells(r.far)
		if err != nil {
			return Digest{}, fmt.Errorf("layer %d in memory of a device: %w", layer, err)
		}
		r.sum.Add(sum)
	}
	return r.sum, nil
}

// digesting is one call of Digester.Layer.
type digesting struct {
	d     *Digester
	h     *Held
	in    Scope
	layer int
	sum   Digest
	far   []digest.DeviceCells // for the Summer
}

// part adds part n of a move.
func (r *digesting) part(m *move, kind int, n uint64) error {
	if r.in.Part != "" && r.in.Part != r.d.plan.kinds[kind].part {
		return nil
	}
	first, last := m.first, m.first+m.units.n
	if r.in.Units != [2]int{} {
		first = max(first, uint64(max(0, r.in.Units[0])))
		last = min(last, uint64(max(0, r.in.Units[1])))
	}
	begin, stop := m.clip(r.h.Span)
	if r.in.Tokens != (Span{}) {
		begin, stop = max(begin, r.in.Tokens.From), min(stop, r.in.Tokens.To)
	}
	if first >= last || begin >= stop {
		return nil
	}
	e, unit, part := &m.from, m.units.from, m.parts.from
	if r.h.Receiver {
		e, unit, part = &m.to, m.units.to, m.parts.to
	}
	c := digest.Cells{Turn: m.period * m.unit, Outer: digest.Axis{N: last - first, By: unit,
		On: coordinate(0, 1, 0)}}
	for _, t := range m.stretches(begin, stop) {
		for t.count > 0 {
			count := min(t.count, e.toWrap(t.entry))
			c.At, c.Count = e.side(r.h.Tables, t.entry, count), int(count)
			c.At.Base += n*part + (first-m.first)*unit + t.a*e.token
			c.Axis = digest.Axis{N: t.n, By: e.token, On: 1}
			c.Coord = coordinate(r.layer, first, (m.start+t.entry*m.period)*m.unit+t.a)
			if err := r.cells(e, c, kind); err != nil {
				return err
			}
			t.entry += count
			t.count -= count
		}
	}
	return nil
}

// cells adds cells of one end.
func (r *digesting) cells(e *end, c digest.Cells, kind int) error {
	if c.At.List == nil || e.region >= len(r.h.Memory) {
		return fmt.Errorf("layer %d: no region %d among %d, or a block table of group %d with "+
			"fewer slots than %d tokens need: %w", r.layer, e.region, len(r.h.Memory), e.group,
			r.h.Span.To, ErrRequest)
	}
	if c.Axis.By > c.Outer.By && c.Outer.N > 1 { // in the order of the addresses
		c.Axis, c.Outer = c.Outer, c.Axis
	}
	if r.h.Memory[e.region] == nil {
		if r.h.Summer == nil || e.region >= len(r.h.Device) {
			return fmt.Errorf("layer %d: region %d is not in DRAM: its digests need a Summer: %w",
				r.layer, e.region, driver.ErrNotSupported)
		}
		r.far = append(r.far, digest.DeviceCells{Memory: r.h.Device[e.region], Cells: c,
			Key: r.d.keys[kind]})
		return nil
	}
	sum, err := digest.Sum(r.h.Memory[e.region], &c, r.d.keys[kind])
	if err != nil {
		return fmt.Errorf("layer %d, part %q: a block of group %d lies outside the %d bytes of "+
			"region %d: %w", r.layer, r.d.plan.kinds[kind].part, e.group,
			len(r.h.Memory[e.region]), e.region, err)
	}
	r.sum.Add(sum)
	return nil
}

// ErrMismatch matches every *MismatchError.
var ErrMismatch = errors.New("KV digests differ")

// MismatchError says which cells of an edge are not the same on both ends: none of the part
// that differ lie outside these heads and tokens. It is ErrMismatch.
type MismatchError struct {
	FromRank, ToRank int
	Layer            int
	Part             string
	Units            [2]int // heads or state units, from and to (excluded)
	Tokens           Span   // or positions of a state
}

// Error names the ranks, layer, part, heads and tokens.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("layer %d, part %q, heads or units [%d, %d), tokens [%d, %d): receiving "+
		"rank %d does not have what sending rank %d has: %v", e.Layer, e.Part, e.Units[0],
		e.Units[1], e.Tokens.From, e.Tokens.To, e.ToRank, e.FromRank, ErrMismatch)
}

// Is makes it ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }

// Locate finds the first part of a layer whose digests differ on the two ends, and its least
// range of heads and of tokens outside which nothing does. It returns nil if no part differs,
// a *MismatchError, or what differ failed with. differ compares the digests of both ends (see
// Digester.Layer) within a scope. Locate calls it once for each part, and some four times for
// each doubling of heads and tokens; memory must not change meanwhile.
func (e *Edge) Locate(layer int, s Span, differ func(Scope) (bool, error)) error {
	if !e.Carries(layer) {
		return nil
	}
	i := e.at[layer] - 1
	asked := make(map[string]bool)
	for j := e.first[i]; j < e.first[i+1]; j++ {
		for n := range int(e.moves[j].parts.n) {
			part := e.plan.kinds[e.parts[e.moves[j].part+n]].part
			if asked[part] {
				continue
			}
			asked[part] = true
			if d, err := differ(Scope{Part: part}); err != nil || !d {
				if err != nil {
					return err
				}
				continue
			}
			return e.narrow(layer, part, s, differ)
		}
	}
	return nil
}

// narrow finds the heads of a part that differ, and then the tokens.
func (e *Edge) narrow(layer int, part string, s Span, differ func(Scope) (bool, error)) error {
	m := &MismatchError{FromRank: e.plan.from[e.From].Rank, ToRank: e.plan.to[e.To].Rank,
		Layer: layer, Part: part}
	units, tokens := e.extent(layer, part, s)
	units, err := least(units, func(r Span) (bool, error) {
		return differ(Scope{Part: part, Units: [2]int{int(r.From), int(r.To)}})
	})
	if err != nil {
		return err
	}
	m.Units = [2]int{int(units.From), int(units.To)}
	m.Tokens, err = least(tokens, func(r Span) (bool, error) {
		return differ(Scope{Part: part, Units: m.Units, Tokens: r})
	})
	if err != nil {
		return err
	}
	return m
}

// extent returns the units and tokens of a part that the edge moves.
func (e *Edge) extent(layer int, part string, s Span) (units, tokens Span) {
	i := e.at[layer] - 1
	for j := e.first[i]; j < e.first[i+1]; j++ {
		m := &e.moves[j]
		for n := range int(m.parts.n) {
			if e.plan.kinds[e.parts[m.part+n]].part != part {
				continue
			}
			if units.To == 0 {
				units.From = m.first
			}
			units = Span{min(units.From, m.first), max(units.To, m.first+m.units.n)}
			tokens.From, tokens.To = m.clip(s)
		}
	}
	return units, tokens
}

// least returns the least range outside which nothing differs, of one that does.
func least(r Span, differ func(Span) (bool, error)) (Span, error) {
	var failed error
	ask := func(s Span) (d bool) {
		if failed == nil {
			d, failed = differ(s)
		}
		return d
	}
	most := int(r.To - 1 - r.From)
	n := sort.Search(most, func(i int) bool { return ask(Span{r.From, r.From + uint64(i) + 1}) })
	r.From += uint64(n)
	n = sort.Search(most-n, func(i int) bool { return !ask(Span{r.From + uint64(i) + 1, r.To}) })
	return Span{r.From, r.From + uint64(n) + 1}, failed
}
