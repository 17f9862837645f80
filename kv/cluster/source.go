// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
)

const (
	// splitBytes is how much one node is asked for before further ones are asked that have the
	// blocks, too. Below it a call asks as few nodes as it can.
	splitBytes = 16 << 20
	// Of two nodes that have the blocks the second one is asked where the first would take more
	// than equalTo times as long; but of one call in tryWorse, so that it is seen when that is no
	// longer so.
	equalTo  = 1.25
	tryWorse = 16

	// A node is late that has taken twice as long as one of the longest of its last Loads, and
	// hedgeMin: less is not worth a second request.
	hedgeMin = 10 * time.Millisecond
	// hedgeShare of the requests may be asked of a second node since the first is late, and
	// hedgeBurst more.
	hedgeShare = 0.05
	hedgeBurst = 4
)

// way is which nodes a call asks for its blocks, in which order.
type way struct {
	lay  *layout
	keys []cache.Key
	runs []stretch
	// moves says what a request moves, for how long it may take; nil: as long as the call.
	moves func(keys []cache.Key) [2]uint64

	bytes [][2]uint64 // by place in the layout: what a node is asked for first
	asked []int       // nodes
	found []int       // nodes that have the blocks of the runs
	// Room for choose and listHolders.
	others []int
	ids    []uint64
}

// stretch is some keys of a call that are of one segment.
type stretch struct {
	head     cache.Key // of the segment
	first    int       // place in the chain of the first of its keys
	from, to int       // keys
	bytes    [2]uint64 // by tier, of all
	found    [2]int    // the nodes that have it: its part of way.found
	copies   int       // nodes of these that own it, the first ones
	told     int       // and that have told of its last block, the last ones
	source   int       // is asked first; -1: there is no node
	chosen   bool      // it is reached
	tries    int       // nodes that are asked for its blocks at most; see nth
}

// nth returns the node that is asked after n others for blocks of a run: the source, then the
// owners, then who has told of them. -1: there are no more.
func (w *way) nth(r *stretch, n int) int {
	if n == 0 {
		return r.source
	}
	found := w.found[r.found[0]:r.found[1]]
	for k, o := range found {
		if o == r.source || k >= r.copies && k < len(found)-r.told {
			continue
		}
		if n--; n == 0 {
			return o
		}
	}
	return -1
}

// waysMax bounds the runs of a way that is used again.
const waysMax = 4 << 10

var ways = sync.Pool{New: func() any { return new(way) }}

func (w *way) free() {
	for _, o := range w.asked {
		w.bytes[o] = [2]uint64{}
	}
	w.lay, w.keys, w.moves = nil, nil, nil
	if w.runs, w.asked, w.found = w.runs[:0], w.asked[:0], w.found[:0]; cap(w.runs) <= waysMax {
		ways.Put(w)
	}
}

// segment returns the first key of the segment that a key is of, the key's place in the chain, and
// the key of the call that is behind the segment.
func (s *Space) segment(keys []cache.Key, k int) (head cache.Key, at, end int) {
	if s.unchained {
		return keys[k], 0, k + 1
	}
	segment, first := placement.SegmentOf(s.before + k)
	if head = s.head; first >= s.before {
		head = keys[first-s.before]
	}
	return head, s.before + k, min(placement.FirstOf(segment+1)-s.before, len(keys))
}

// copies returns how many nodes own a block.
func (s *Space) copies(l *layout) int {
	return max(1, min(l.Namespaces[s.name.name].Copies, directory.CopiesMax))
}

// way chooses the nodes that a call asks first. Free it afterwards.
func (s *Space) way(lay *layout, keys []cache.Key) *way {
	w := ways.Get().(*way)
	w.lay, w.keys = lay, keys
	if len(w.bytes) < len(lay.nodes) {
		w.bytes = make([][2]uint64, len(lay.nodes))
	}
	copies, first := s.copies(lay), -1
	if s.first != "" {
		at, is := slices.BinarySearchFunc(lay.Nodes, s.first,
			func(n directory.Node, name string) int { return cmp.Compare(n.Name, name) })
		if is && lay.nodes[at].usable() != nil {
			first = at
		}
	}
	s.c.digests.mu.RLock()
	for k := 0; k < len(keys); {
		head, at, end := s.segment(keys, k)
		r := stretch{head: head, first: at, from: k, to: end, source: first, chosen: first >= 0,
			bytes: s.known.bytes(keys[k:end], s.known.size.Load())}
		w.listHolders(s, &r, keys[end-1], copies)
		w.runs = append(w.runs, r)
		k = end
	}
	s.c.digests.mu.RUnlock()
	for _, several := range [2]bool{false, true} { // first those that one node has alone
		for k := range w.runs {
			r := &w.runs[k]
			found := w.found[r.found[0]:r.found[1]]
			if len(found) > 1 != several {
				continue
			}
			if first < 0 {
				r.source = w.choose(found, r.bytes)
				if r.chosen = r.source >= 0; !r.chosen && r.copies > 0 {
					r.source = found[0]
				}
			}
			if r.source >= 0 && !slices.Contains(w.asked, r.source) {
				w.asked = append(w.asked, r.source)
			}
			for t, b := range r.bytes {
				if r.source >= 0 {
					w.bytes[r.source][t] += b
				}
			}
			for r.tries = 0; w.nth(r, r.tries) >= 0; {
				r.tries++
			}
		}
	}
	return w
}

// listHolders lists the nodes that have a run: first those that own it, then those that have its
// last block as they have told, or a router. The caller holds the lock of the digests.
func (w *way) listHolders(s *Space, r *stretch, last cache.Key, copies int) {
	from, memo := len(w.found), s.known
	if s.unchained { // there are too many segments
		memo = nil
	}
	w.found = memo.owners(w.found, w.lay, r.head, copies)
	r.copies = len(w.found) - from
	add := func(o int) {
		if !slices.Contains(w.found[from:], o) {
			w.found = append(w.found, o)
		}
	}
	w.ids = s.known.appendHolder(w.ids[:0], last)
	if view := s.c.digests.view; view != nil {
		if hot := view.Owners(r.head); hot >= len(w.lay.bids) {
			for o := range w.lay.bids { // each but once
				if w.lay.bids[o].Weight > 0 && !slices.Contains(w.found[from:][:r.copies], o) {
					w.found = append(w.found, o)
				}
			}
		} else if hot > copies {
			w.found = placement.Owners(w.found[:from], w.lay.bids, r.head, hot)
		}
		w.ids = view.Holders(w.ids, last)
	}
	hot := len(w.found)
	for _, id := range w.ids {
		if o, is := w.lay.at[id]; is {
			add(o)
		}
	}
	r.told = len(w.found) - hot
	r.found = [2]int{from, len(w.found)}
}

// choose returns the node that a run is asked of first, of those that have it: one that the call
// asks anyway, unless that has much to do already, else the better one of two by draw. One that is
// in doubt is the last. -1: none is reached.
func (w *way) choose(found []int, bytes [2]uint64) int {
	asked, doubted, others := -1, -1, w.others[:0]
	for _, o := range found {
		switch {
		case w.lay.nodes[o].usable() == nil:
		case w.lay.nodes[o].doubts.Load() > 0:
			doubted = o
		case !slices.Contains(w.asked, o):
			others = append(others, o)
		case asked < 0 || sum(w.bytes[o]) < sum(w.bytes[asked]):
			asked = o
		}
	}
	w.others = others[:0]
	switch {
	case asked < 0 && len(others) == 0:
		return doubted
	case asked >= 0 && sum(w.bytes[asked]) < splitBytes:
		return asked
	}
	finish := func(o int) time.Duration {
		b := w.bytes[o]
		for t := range b {
			b[t] += bytes[t]
		}
		took, _, _ := w.lay.nodes[o].expect(b)
		return took
	}
	var soonest time.Duration
	if asked >= 0 { // of all that a large read is asked of, the one that would be done first
		soonest = finish(asked)
		for _, o := range found {
			if o == asked || !slices.Contains(w.asked, o) || w.lay.nodes[o].usable() == nil {
				continue
			}
			if took := finish(o); took < soonest && w.lay.nodes[o].doubts.Load() == 0 {
				asked, soonest = o, took
			}
		}
	}
	if len(others) == 0 {
		return asked
	}
	draw := rand.IntN(len(others))
	one := others[draw]
	took := finish(one)
	if len(others) > 1 {
		other := others[(draw+1+rand.IntN(len(others)-1))%len(others)]
		better := finish(other)
		if rand.IntN(tryWorse) > 0 && float64(took) > equalTo*float64(better) {
			one, took = other, better
		}
	}
	if asked >= 0 && soonest <= took {
		return asked
	}
	return one
}

func sum(bytes [2]uint64) uint64 { return bytes[cache.Memory] + bytes[cache.Disk] }

// split makes the parts of some keys, which are in ascending order, by node. The rest has none.
func (w *way) split(which []int, of func(r *stretch) int) (parts []*part, rest []int) {
	at, r := map[int]*part{}, 0
	for _, k := range which {
		for w.runs[r].to <= k {
			r++
		}
		run := &w.runs[r]
		o := of(run)
		if o < 0 {
			rest = append(rest, k)
			continue
		}
		p := at[o]
		if p == nil {
			p = &part{n: w.lay.nodes[o]}
			at[o], parts = p, append(parts, p)
		}
		p.add(k, w.keys[k], run)
	}
	return parts, rest
}

// inTurn asks nodes for some keys, all at once, and for what one lacks, or is late with, the node
// that is next, after try others. It returns what none had. An error of ask ends the call.
func (s *Space) inTurn(l limits, w *way, which []int, try int,
	ask func(l limits, p *part) (lacks []int, err error)) (lacks []int, err error) {
	var mu sync.Mutex
	var errs []error
	var nodes sync.WaitGroup
	before := func(r *stretch) int { return w.nth(r, try) }
	parts, lacks := w.split(which, before)
	for k, p := range parts {
		one := func() {
			within := l.share(p.tries - try)
			stop := w.hedge(&within, p, try)
			left, err := ask(within, p)
			stop()
			late := hedged(within)
			within.free()
			if err == nil && len(left) > 0 && try+1 < p.tries {
				left, err = s.inTurn(l, w, left, try+1, ask)
				if err == nil && len(left) > 0 && late { // it may have them, after all
					again, _ := w.split(left, before) // of this node
					left, err = ask(l, again[0])
				}
			}
			mu.Lock()
			defer mu.Unlock()
			errs, lacks = append(errs, err), append(lacks, left...)
		}
		if k < len(parts)-1 {
			nodes.Go(one)
		} else { // saves a call to one node a wake-up
			one()
		}
	}
	nodes.Wait()
	slices.Sort(lacks)
	return lacks, errors.Join(errs...)
}

// errLate is why a request ends for which another node is asked.
var errLate = fmt.Errorf("later than its Loads before, and another node has the blocks: %w",
	context.DeadlineExceeded)

// hedge ends a request once the node is late with it, if another one may be asked then. Bytes that
// may come still are ended as at the end of any other request, so that never two nodes write to one
// place. stop ends the hedge.
func (w *way) hedge(l *limits, p *part, try int) (stop func()) {
	c := p.n.c
	c.hedges.earn()
	if w.moves == nil || try+1 >= p.tries {
		return func() {}
	}
	r, _ := slices.BinarySearchFunc(w.runs, p.at[0], func(r stretch, k int) int {
		return cmp.Compare(r.to, k+1)
	})
	next := w.nth(&w.runs[r], try+1)
	_, late, measured := p.n.expect(w.moves(p.keys))
	if !measured || next < 0 || w.lay.nodes[next].usable() == nil ||
		w.lay.nodes[next].doubts.Load() > 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancelCause(l.nodes)
	l.nodes = ctx
	timer := time.AfterFunc(max(2*late, hedgeMin), func() {
		if c.hedges.take() {
			p.n.hedged.Add(1)
			cancel(errLate)
		}
	})
	return func() { timer.Stop(); cancel(nil) }
}

// budget is how many requests may still be hedged.
type budget struct {
	mu   sync.Mutex
	used float64 // of hedgeBurst
}

func (b *budget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used = max(0, b.used-hedgeShare)
}

func (b *budget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+1 > hedgeBurst {
		return false
	}
	b.used++
	return true
}
