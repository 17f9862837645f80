// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"sync/atomic"
)

// Policy names the order in which a tier lets its blocks go.
type Policy string

// The policies. Over three traces of production and twelve sizes S3FIFO had 0.988 of the hits of
// the best one in the mean, ARC 0.963, LRU 0.930; see bench/NOTES.md.
const (
	// S3FIFO keeps newcomers in a queue of half the room, from which only what was used again
	// moves on; what it lets go and sees again soon begins in the other half. The default.
	S3FIFO Policy = "s3fifo"
	// LRU lets go what was used longest ago.
	LRU Policy = "lru"
	// ARC shifts the border between what was used once and more often by what it regrets.
	ARC Policy = "arc"
)

// queues is what a policy is to a shard: the order of the blocks of one lane in one tier. The
// caller holds the shard's lock. print is the key's fingerprint, by which a policy knows a block
// again that has left.
type queues interface {
	insert(i, print uint32)
	touch(i uint32)
	remove(i uint32)
	// victim removes the block to let go next, of those that keep does not hold; none: all are
	// held.
	victim(keep func(i uint32) bool, print func(i uint32) uint32) uint32
	len() int
	// oldest visits blocks from the one on that is about to go, until visit says false.
	oldest(visit func(i uint32) bool)
}

func (p Policy) check() error {
	switch p {
	case S3FIFO, LRU, ARC:
		return nil
	}
	return fmt.Errorf("policy %q: there are s3fifo, lru and arc", p)
}

func (p Policy) make(l links) queues {
	switch p {
	case LRU:
		return &lru{links: l, all: emptyList}
	case ARC:
		return &arc{links: l, once: emptyList, often: emptyList}
	}
	return &s3fifo{links: l, small: emptyList, main: emptyList}
}

// links are the places in the entries by which the blocks of one tier hang together.
type links struct {
	entries []entry
	tier    Tier
}

func (l links) at(i uint32) *link { return &l.entries[i].links[l.tier] }

// mark is what a policy notes at a block: in which list it is, and how often it was used.
func (l links) mark(i uint32) *uint8 { return &l.entries[i].marks[l.tier] }

// list is a doubly linked list through the entries; the oldest is at its tail.
type list struct {
	head, tail uint32
	n          int
}

var emptyList = list{head: none, tail: none}

func (q *list) push(l links, i uint32) {
	*l.at(i) = link{prev: none, next: q.head}
	if q.head == none {
		q.tail = i
	} else {
		l.at(q.head).prev = i
	}
	q.head = i
	q.n++
}

func (q *list) remove(l links, i uint32) {
	at := *l.at(i)
	if at.prev == none {
		q.head = at.next
	} else {
		l.at(at.prev).next = at.next
	}
	if at.next == none {
		q.tail = at.prev
	} else {
		l.at(at.next).prev = at.prev
	}
	*l.at(i) = link{none, none}
	q.n--
}

// each visits a list from its oldest on. It reports whether visit always said true.
func (q *list) each(l links, visit func(i uint32) bool) bool {
	for i := q.tail; i != none; {
		next := l.at(i).prev
		if !visit(i) {
			return false
		}
		i = next
	}
	return true
}

// eachOfBoth visits two lists by turns, each from its oldest on.
func eachOfBoth(l links, a, b *list, visit func(i uint32) bool) {
	for i, j := a.tail, b.tail; i != none || j != none; i, j = j, i {
		if i == none {
			continue
		}
		next := l.at(i).prev
		if !visit(i) {
			return
		}
		i = next
	}
}

// laneOrder is the order of a lane's blocks in a shard and a tier: those that were called of no use
// any more go first, the oldest before the others, and the policy says the order of the rest.
type laneOrder struct {
	queues
	links
	useless list
	count   *atomic.Int64 // of those of all lanes and shards in the tier
}

// useless marks a block in that list. No policy has this bit.
const useless = 1 << 6

func (o *laneOrder) len() int { return o.useless.n + o.queues.len() }

// letGoFirst moves a block to those of no more use.
func (o *laneOrder) letGoFirst(i uint32) {
	if *o.mark(i)&useless == 0 {
		o.queues.remove(i)
		o.useless.push(o.links, i)
		*o.mark(i) = useless
		o.count.Add(1)
	}
}

func (o *laneOrder) touch(i uint32) {
	if *o.mark(i)&useless != 0 {
		o.remove(i)
		o.insert(i, none)
	}
	o.queues.touch(i)
}

func (o *laneOrder) remove(i uint32) {
	if *o.mark(i)&useless == 0 {
		o.queues.remove(i)
		return
	}
	o.useless.remove(o.links, i)
	*o.mark(i) = 0
	o.count.Add(-1)
}

// firstVictim is victim of the blocks of no more use alone.
func (o *laneOrder) firstVictim(keep func(uint32) bool) (victim uint32) {
	victim = none
	o.useless.each(o.links, func(i uint32) bool {
		if keep(i) {
			return true
		}
		o.remove(i)
		victim = i
		return false
	})
	return victim
}

func (o *laneOrder) victim(keep func(uint32) bool, print func(uint32) uint32) uint32 {
	if i := o.firstVictim(keep); i != none {
		return i
	}
	return o.queues.victim(keep, print)
}

func (o *laneOrder) oldest(visit func(uint32) bool) {
	if o.useless.each(o.links, visit) {
		o.queues.oldest(visit)
	}
}

// lru is one list by last use.
type lru struct {
	links
	all list
}

func (p *lru) len() int                       { return p.all.n }
func (p *lru) insert(i, _ uint32)             { p.all.push(p.links, i) }
func (p *lru) remove(i uint32)                { p.all.remove(p.links, i) }
func (p *lru) oldest(visit func(uint32) bool) { p.all.each(p.links, visit) }
func (p *lru) touch(i uint32) {
	p.remove(i)
	p.all.push(p.links, i)
	*p.mark(i) = 1
}
func (p *lru) victim(keep func(uint32) bool, _ func(uint32) uint32) uint32 {
	for range p.all.n {
		i := p.all.tail
		p.all.remove(p.links, i)
		if !keep(i) {
			return i
		}
		p.all.push(p.links, i)
	}
	return none
}

// s3fifo is S3-FIFO with half the room for newcomers (Yang et al., SOSP 2023, who give them a
// tenth). The mark of a block is inMain, and below it how often it was used since it came in.
type s3fifo struct {
	links
	small, main list
	ghost       ghost
}

const (
	inMain  = 1 << 7
	usesMax = 3
)

func (p *s3fifo) len() int { return p.small.n + p.main.n }

func (p *s3fifo) oldest(visit func(uint32) bool) {
	eachOfBoth(p.links, &p.small, &p.main, visit)
}

func (p *s3fifo) insert(i, print uint32) {
	if p.ghost.has(print, p.len()*2) {
		p.main.push(p.links, i)
		*p.mark(i) = inMain
		return
	}
	p.small.push(p.links, i)
	*p.mark(i) = 0
}

func (p *s3fifo) touch(i uint32) {
	if m := p.mark(i); *m&^inMain < usesMax {
		*m++
	}
}

func (p *s3fifo) remove(i uint32) {
	if *p.mark(i)&inMain != 0 {
		p.main.remove(p.links, i)
	} else {
		p.small.remove(p.links, i)
	}
}

// victim ends: a turn takes a use from a block, or moves one on that does not come back, or passes
// one that is held, of which there are no more in a row than blocks. Where all of the list whose
// turn it is are held, it is the other one's.
func (p *s3fifo) victim(keep func(uint32) bool, print func(uint32) uint32) uint32 {
	heldSmall, heldMain := 0, 0 // in a row
	for {
		from, held := &p.main, &heldMain
		if p.main.n == 0 || p.small.n >= p.main.n {
			from, held = &p.small, &heldSmall
		}
		if *held >= from.n {
			if from == &p.small {
				from, held = &p.main, &heldMain
			} else {
				from, held = &p.small, &heldSmall
			}
			if *held >= from.n {
				return none
			}
		}
		i := from.tail
		m := p.mark(i)
		from.remove(p.links, i)
		if keep(i) {
			from.push(p.links, i)
			*held++
			continue
		}
		*held = 0
		switch {
		case *m&^inMain == 0:
			if from == &p.small {
				p.ghost.add(print(i), (p.len()*2)+1)
			}
			return i
		case from == &p.small:
			p.main.push(p.links, i)
			*m = inMain
		default:
			p.main.push(p.links, i)
			*m--
		}
	}
}

// arc is the adaptive replacement cache (Megiddo and Modha, FAST 2003). Its ghosts are as many
// as there are blocks, each way.
type arc struct {
	links
	once, often         list
	goneOnce, goneOften ghost
	target              int // blocks that may be in once
}

func (p *arc) len() int { return p.once.n + p.often.n }

func (p *arc) oldest(visit func(uint32) bool) {
	eachOfBoth(p.links, &p.once, &p.often, visit)
}

func (p *arc) insert(i, print uint32) {
	n := p.len()
	switch {
	case p.goneOnce.has(print, n):
		p.target = min(p.target+max(1, p.goneOften.n/max(1, p.goneOnce.n)), n)
	case p.goneOften.has(print, n):
		p.target = max(p.target-max(1, p.goneOnce.n/max(1, p.goneOften.n)), 0)
	default:
		p.once.push(p.links, i)
		*p.mark(i) = 0
		return
	}
	p.often.push(p.links, i)
	*p.mark(i) = inMain
}

func (p *arc) touch(i uint32) {
	p.remove(i)
	p.often.push(p.links, i)
	*p.mark(i) = inMain
}

func (p *arc) remove(i uint32) {
	if *p.mark(i)&inMain != 0 {
		p.often.remove(p.links, i)
	} else {
		p.once.remove(p.links, i)
	}
}

func (p *arc) victim(keep func(uint32) bool, print func(uint32) uint32) uint32 {
	first := p.once.n > 0 && (p.once.n > p.target || p.often.n == 0)
	for _, once := range []bool{first, !first} {
		from, gone := &p.often, &p.goneOften
		if once {
			from, gone = &p.once, &p.goneOnce
		}
		for range from.n {
			i := from.tail
			from.remove(p.links, i)
			if keep(i) {
				from.push(p.links, i)
				continue
			}
			gone.add(print(i), p.len()+1)
			return i
		}
	}
	return none
}

// ghost remembers the last fingerprints that left. It is a table of sets of four, in each of which
// the oldest goes first, so that some of those in range are forgotten.
type ghost struct {
	sets  [][4]struct{ print, at uint32 }
	count uint32 // of all that were added; also the time
	n     int    // of those that are known, at most
}

func (g *ghost) set(print uint32) *[4]struct{ print, at uint32 } {
	h := print * 0x9e3779b1
	return &g.sets[(h^h>>15)&uint32(len(g.sets)-1)]
}

// has reports whether the fingerprint is among the last so many.
func (g *ghost) has(print uint32, last int) bool {
	if len(g.sets) == 0 {
		return false
	}
	for _, e := range g.set(print) {
		if e.print == print && e.at != 0 && g.count-e.at < uint32(last) {
			return true
		}
	}
	return false
}

// add remembers one more; last is how many there should be.
func (g *ghost) add(print uint32, last int) {
	if 2*len(g.sets) < last {
		g.grow(last)
	}
	g.count++
	if g.count == 0 {
		g.count = 1 // 0 is an empty place
	}
	g.n = min(g.n+1, last)
	s := g.set(print)
	oldest := 0
	for k := range s {
		if s[k].at == 0 || s[k].print == print {
			oldest = k
			break
		}
		if g.count-s[k].at > g.count-s[oldest].at {
			oldest = k
		}
	}
	s[oldest].print, s[oldest].at = print, g.count
}

func (g *ghost) grow(last int) {
	old := g.sets
	n := 4
	for 2*n < last {
		n *= 2
	}
	g.sets = make([][4]struct{ print, at uint32 }, n)
	for k := range old {
		for _, e := range old[k] {
			if e.at == 0 {
				continue
			}
			s := g.set(e.print)
			for j := range s {
				if s[j].at == 0 || j == 3 {
					s[j] = e
					break
				}
			}
		}
	}
}
