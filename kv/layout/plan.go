// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// Plan says which cells of one group of ranks go to which ranks of another. It is made once
// for a pair of groups, never changes, and any goroutine may use it.
type Plan struct {
	from, to []*Side
	edges    [][]Edge    // by receiver
	layers   [][][]*View // of the receivers: by receiver and layer
	kinds    []kind      // of cells
}

// Edge is what one rank sends to one other. It holds no request: any number of goroutines
// may call its methods, each with tables of its own.
type Edge struct {
	From, To int // indices of the sides that NewPlan was given

	// Op says which of the two moves the bytes: with driver.Write the sender, with
	// driver.Read the receiver. NewPlan chooses Write, which lets layers go while the next
	// are computed, unless the cells are in more than twice as many contiguous runs on the
	// receiver as on the sender: a NIC needs the remote side of each work request to be one
	// run. A program may set the other one.
	Op driver.Op

	Layers []int // global numbers that the edge carries, ascending; not to be changed

	plan  *Plan
	parts []int  // indices in Plan.kinds, of each move in turn
	moves []move // by layer
	first []int  // of the moves of layer Layers[i]; one more than Layers
	at    []int  // index in Layers plus one, by global layer; 0: none
}

// NewPlan compares all sides of two groups and shares out the cells. A group is all ranks
// that serve one request: with data-parallel attention, those of one data-parallel group.
// Sides must not change while the plan is in use. A cell that several senders hold is sent
// by one of them, and such cells are shared out evenly. Errors are an *UnlikeError,
// ErrSideVersion or ErrGeometry.
func NewPlan(from, to []*Side) (*Plan, error) {
	if err := checkGroup("sender", from); err != nil {
		return nil, err
	}
	if err := checkGroup("receiver", to); err != nil {
		return nil, err
	}
	if from[0].Model != to[0].Model {
		return nil, &UnlikeError{-1, "", "model", from[0].Model, to[0].Model,
			"load the same model on both sides"}
	}
	p := &Plan{from: from, to: to}
	b := builder{plan: p, from: index(from), to: index(to), turns: map[series]int{},
		kinds: map[kind]int{}, moves: map[pair][]layerMove{}}
	for _, k := range b.from.keys {
		if b.to.views[k] == nil {
			return nil, &UnlikeError{k.layer, k.part, "ranks that hold it", ranks(from), "none",
				"start the receiving stages that have this layer, with the same parts"}
		}
	}
	for _, k := range b.to.keys {
		if err := b.planPart(k); err != nil {
			return nil, err
		}
	}
	b.finish()
	return p, nil
}

// checkGroup checks each side, and that all are of one group.
func checkGroup(name string, sides []*Side) error {
	if len(sides) < 1 || len(sides) > RanksMax {
		return fmt.Errorf("plan: %d sides of the %s: %w", len(sides), name, ErrGeometry)
	}
	for _, s := range sides {
		if err := s.Check(); err != nil {
			return fmt.Errorf("plan: %s: %w", name, err)
		}
		if s.Model != sides[0].Model || s.DP != sides[0].DP {
			return fmt.Errorf("plan: %s: ranks %d and %d are of models %q and %q, data-parallel "+
				"groups %d and %d: name the ranks of one group: %w", name, sides[0].Rank, s.Rank,
				sides[0].Model, s.Model, sides[0].DP, s.DP, ErrGeometry)
		}
	}
	return nil
}

// ranks names the ranks of a group.
func ranks(sides []*Side) string {
	list := make([]int, len(sides))
	for i, s := range sides {
		list[i] = s.Rank
	}
	return fmt.Sprintf("ranks %v", list)
}

// holder is one view and the number of its side.
type holder struct {
	side  int
	view  *View
	group *Group
}

// held indexes the views of a group of sides.
type held struct {
	views map[key][]holder
	keys  []key // by layer, then in the order of the views
}

func index(sides []*Side) held {
	h := held{views: make(map[key][]holder)}
	for i, s := range sides {
		for j := range s.Views {
			v := &s.Views[j]
			if h.views[v.key()] == nil {
				h.keys = append(h.keys, v.key())
			}
			h.views[v.key()] = append(h.views[v.key()], holder{i, v, &s.Groups[v.Group]})
		}
	}
	slices.SortStableFunc(h.keys, func(a, b key) int { return cmp.Compare(a.layer, b.layer) })
	return h
}

// kind is common to all cells that have one digest key.
type kind struct {
	part, dtype string
	cell        uint64
}

type layerMove struct {
	layer, kind int
	move
}

// pair is the numbers of a sending and a receiving side.
type pair struct{ from, to int }

// series is the layers that take turns among replicas: those of one part and block table, which
// weigh the same.
type series struct {
	part  string
	group int
}

type builder struct {
	plan     *Plan
	from, to held
	turns    map[series]int       // layers that have been shared out
	kinds    map[kind]int         // indices in Plan.kinds
	moves    map[pair][]layerMove // of many ranks, each has to do with few
}

// planPart shares out one part of one layer.
func (b *builder) planPart(k key) error {
	senders, readers := b.from.views[k], b.to.views[k]
	if senders == nil {
		return &UnlikeError{k.layer, k.part, "ranks that hold it", "none", ranks(b.plan.to),
			"start the sending stages that have this layer, with the same parts"}
	}
	first := &senders[0] // one with a window, if there is one: readers must have the same
	for i := range senders {
		if err := unlike(k, &senders[i], &readers[0]); err != nil {
			return err
		}
		if senders[i].group.Window != 0 {
			first = &senders[i]
		}
	}
	for i := range readers {
		if err := unlike(k, first, &readers[i]); err != nil {
			return err
		}
	}
	if err := allShards(k, senders, readers); err != nil {
		return err
	}
	layers := series{k.part, senders[0].view.Group}
	turn := b.turns[layers]
	b.turns[layers]++
	for i := range readers {
		if err := b.assignSenders(k, turn, &readers[i], senders, readers); err != nil {
			return err
		}
	}
	return nil
}

// assignSenders finds the senders of all that one reader holds: for each shard of tokens, the units
// in turn, and joins neighbouring units that come from the same sender.
func (b *builder) assignSenders(k key, turn int, to *holder, senders, readers []holder) error {
	for shard := range senders[0].group.shards() {
		begin := to.view.First
		var last *holder
		for u := begin; u < to.view.First+to.view.Count; {
			chosen, next := choose(turn, u, shard, to, senders, readers)
			if chosen == nil {
				return &UnlikeError{k.layer, k.part, fmt.Sprintf("head or unit %d", u),
					"it on none of " + ranks(b.plan.from),
					fmt.Sprintf("it on rank %d", b.plan.to[to.side].Rank),
					"pass the sides of all ranks of the sending group"}
			}
			if last != nil && last != chosen {
				if err := b.add(k, last, to, begin, u); err != nil {
					return err
				}
				begin = u
			}
			last, u = chosen, next
		}
		if err := b.add(k, last, to, begin, to.view.First+to.view.Count); err != nil {
			return err
		}
	}
	return nil
}

// choose picks the sender of a unit for one reader, and returns the unit at which the choice must
// be made anew. Among R senders and n readers of the same cells, reader j takes sender j mod R if R
// divides n; otherwise layers take turns, by their number in the series and not in the model: every
// fourth layer of a model is a series, too.
func choose(turn, unit, shard int, to *holder, senders, readers []holder) (*holder, int) {
	next := to.view.First + to.view.Count
	var copies [64]*holder // of more replicas than that, the others stay idle
	n, j, same := 0, 0, 0
	for i := range senders {
		s := &senders[i]
		if s.view.First > unit {
			next = min(next, s.view.First)
		}
		if !s.holds(unit) || s.group.Shard != shard {
			continue
		}
		next = min(next, s.view.First+s.view.Count)
		if n < len(copies) {
			copies[n] = s
			n++
		}
	}
	if n == 0 {
		return nil, next
	}
	for i := range readers {
		r := &readers[i]
		if r.view.First > unit {
			next = min(next, r.view.First)
		}
		if !r.holds(unit) || r.group.Shard != to.group.Shard {
			continue
		}
		next = min(next, r.view.First+r.view.Count)
		if r.side < to.side {
			j++
		}
		same++
	}
	switch {
	case same%n == 0:
		return copies[j%n], next
	case n%same == 0:
		return copies[j+same*(turn%(n/same))], next
	}
	return copies[(j+turn)%n], next
}

func (h *holder) holds(unit int) bool {
	return unit >= h.view.First && unit < h.view.First+h.view.Count
}

// add puts the move of some units on its edge, unless the shards have no token in common.
func (b *builder) add(k key, from, to *holder, begin, end int) error {
	m, ok, err := newMove(k, from, to, begin, end)
	if err != nil || !ok {
		return err
	}
	cells := kind{k.part, to.view.DType, m.cell}
	number, ok := b.kinds[cells]
	if !ok {
		number = len(b.plan.kinds)
		b.kinds[cells] = number
		b.plan.kinds = append(b.plan.kinds, cells)
	}
	at := pair{from.side, to.side}
	b.moves[at] = append(b.moves[at], layerMove{k.layer, number, m})
	return nil
}

// finish sorts the moves into edges.
func (b *builder) finish() {
	b.plan.edges = make([][]Edge, len(b.plan.to))
	for _, s := range b.plan.to {
		b.plan.layers = append(b.plan.layers, byLayer(s))
	}
	for _, at := range slices.SortedFunc(maps.Keys(b.moves), func(a, b pair) int {
		return cmp.Compare(a.from, b.from)
	}) {
		b.plan.edges[at.to] = append(b.plan.edges[at.to], b.edge(at, b.moves[at]))
	}
}

func (b *builder) edge(at pair, list []layerMove) Edge {
	e := Edge{From: at.from, To: at.to, plan: b.plan, Op: driver.Write,
		at: make([]int, list[len(list)-1].layer+1), moves: make([]move, 0, len(list))}
	for i := range list {
		if i == 0 || list[i].layer != list[i-1].layer {
			e.Layers = append(e.Layers, list[i].layer)
			e.first = append(e.first, len(e.moves))
			e.at[list[i].layer] = len(e.Layers)
		}
		e.parts = append(e.parts, list[i].kind)
		if since := e.moves[e.first[len(e.first)-1]:]; len(since) > 0 &&
			since[len(since)-1].join(&list[i].move) {
			continue
		}
		e.moves = append(e.moves, list[i].move)
		e.moves[len(e.moves)-1].part = i
	}
	e.first = append(e.first, len(e.moves))
	if info := e.info(); 2*info.SenderRuns < info.ReceiverRuns {
		e.Op = driver.Read
	}
	return e
}

// Edges returns what the receiver of that index in NewPlan's list gets, by sender. The
// slice is the caller's; the edges share what they hold.
func (p *Plan) Edges(to int) []Edge {
	if to < 0 || to >= len(p.edges) {
		return nil
	}
	return slices.Clone(p.edges[to])
}

// Carries reports whether a layer is one of Layers.
func (e *Edge) Carries(layer int) bool {
	return layer >= 0 && layer < len(e.at) && e.at[layer] > 0
}

// Senders returns the sides of the sending group, as NewPlan was given them. Neither the slice
// nor the sides may be changed.
func (p *Plan) Senders() []*Side { return p.from }

// Receivers returns the sides of the receiving group.
func (p *Plan) Receivers() []*Side { return p.to }

// Fingerprint is a hash of all sides in their order: two programs whose plans have the same one
// have the same plan. The error is that of Side.Marshal.
func (p *Plan) Fingerprint() (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	for _, group := range [][]*Side{p.from, p.to} {
		_ = binary.Write(h, binary.LittleEndian, uint64(len(group)))
		for _, s := range group {
			b, err := s.Marshal()
			if err != nil {
				return sum, err
			}
			_ = binary.Write(h, binary.LittleEndian, uint64(len(b)))
			h.Write(b)
		}
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}
