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
// caller holds the shard's lock.
type queues interface {
	insert(i uint32)
	touch(i uint32)
	remove(i uint32)
	len() int
	// victim removes the block to let go next, of those that keep does not hold; none: all are
	// held.
	victim(keep func(i uint32) bool) uint32
	// oldest visits the eighth that is about to go.
	oldest(visit func(i uint32))
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
		return &lru{l, emptyList}
	case ARC:
		return &arc{twoLists: twoLists{l, [2]list{emptyList, emptyList}}}
	}
	return &s3fifo{twoLists: twoLists{l, [2]list{emptyList, emptyList}}}
}

// links are the places in the entries by which the blocks of one tier hang together.
type links struct {
	index *index
	tier  Tier
}

func (l links) at(i uint32) *link { return &l.index.entry(i).links[l.tier] }

// mark is what a policy notes at a block: in which list it is, and how often it was used.
func (l links) mark(i uint32) *uint8 { return &l.index.entry(i).marks[l.tier] }

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

// victim removes the oldest block that keep does not hold. Those that it holds count as new ones.
func (q *list) victim(l links, keep func(i uint32) bool) uint32 {
	for range q.n {
		i := q.tail
		q.remove(l, i)
		if !keep(i) {
			return i
		}
		q.push(l, i)
	}
	return none
}

// oldest visits an eighth of a list from its oldest on.
func (q *list) oldest(l links, visit func(i uint32)) {
	i := q.tail
	for range (q.n + 7) / 8 {
		visit(i)
		i = l.at(i).prev
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
		o.insert(i)
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
func (o *laneOrder) firstVictim(keep func(uint32) bool) uint32 {
	i := o.useless.victim(o.links, keep)
	if i != none {
		*o.mark(i) = 0
		o.count.Add(-1)
	}
	return i
}

func (o *laneOrder) victim(keep func(uint32) bool) uint32 {
	if i := o.firstVictim(keep); i != none {
		return i
	}
	return o.queues.victim(keep)
}

func (o *laneOrder) oldest(visit func(uint32)) {
	o.useless.oldest(o.links, visit)
	o.queues.oldest(visit)
}

// lru is one list by last use. The mark of a block is 1 once it was used again.
type lru struct {
	links
	all list
}

func (p *lru) len() int                             { return p.all.n }
func (p *lru) insert(i uint32)                      { p.all.push(p.links, i) }
func (p *lru) remove(i uint32)                      { p.all.remove(p.links, i) }
func (p *lru) victim(keep func(uint32) bool) uint32 { return p.all.victim(p.links, keep) }
func (p *lru) oldest(visit func(uint32))            { p.all.oldest(p.links, visit) }
func (p *lru) touch(i uint32) {
	p.remove(i)
	p.insert(i)
	*p.mark(i) = 1
}

// twoLists are newcomers, and blocks that have proved of use, whose mark is inMain or more.
type twoLists struct {
	links
	lists [2]list
}

const (
	newcomers = iota
	proved
	inMain = 1 << 7
)

func (p *twoLists) len() int { return p.lists[newcomers].n + p.lists[proved].n }

// put gives a block that is in no list its place.
func (p *twoLists) put(i uint32, in int) {
	p.lists[in].push(p.links, i)
	*p.mark(i) = uint8(in * inMain)
}

func (p *twoLists) remove(i uint32) { p.lists[*p.mark(i)/inMain].remove(p.links, i) }

func (p *twoLists) oldest(visit func(uint32)) {
	p.lists[newcomers].oldest(p.links, visit)
	p.lists[proved].oldest(p.links, visit)
}

// s3fifo is S3-FIFO with half the room for newcomers (Yang et al., SOSP 2023, who give them a
// tenth). The mark of a block is inMain, and below it how often it was used since it came in.
type s3fifo struct {
	twoLists
	ghost ghost
}

const usesMax = 3

func (p *s3fifo) insert(i uint32) {
	in := newcomers
	if len(p.ghost.sets) > 0 && p.ghost.has(p.index.print(i), p.len()*2) {
		in = proved
	}
	p.put(i, in)
}

func (p *s3fifo) touch(i uint32) {
	if m := p.mark(i); *m&^inMain < usesMax {
		*m++
	}
}

// victim ends: a turn takes a use from a block, or moves one on that does not come back, or passes
// one that is held, of which there are no more in a row than blocks. Where all of the list whose
// turn it is are held, it is the other one's.
func (p *s3fifo) victim(keep func(uint32) bool) uint32 {
	var held [2]int // in a row
	for {
		from := newcomers
		if p.lists[newcomers].n < p.lists[proved].n {
			from = proved
		}
		if held[from] >= p.lists[from].n {
			from = 1 - from
		}
		q := &p.lists[from]
		if held[from] >= q.n {
			return none
		}
		i := q.tail
		q.remove(p.links, i)
		if keep(i) {
			q.push(p.links, i)
			held[from]++
			continue
		}
		held[from] = 0
		uses := *p.mark(i) &^ inMain
		if uses == 0 {
			if from == newcomers {
				p.ghost.add(p.index.print(i), p.len()*2+1)
			}
			return i
		}
		p.put(i, proved)
		if from == proved {
			*p.mark(i) += uses - 1
		}
	}
}

// arc is the adaptive replacement cache (Megiddo and Modha, FAST 2003). Its ghosts are as many
// as there are blocks, each way.
type arc struct {
	twoLists
	gone   [2]ghost // from each list
	target int      // blocks that may be newcomers
}

func (p *arc) insert(i uint32) {
	n, print, in := p.len(), p.index.print(i), proved
	once, often := &p.gone[newcomers], &p.gone[proved]
	switch {
	case once.has(print, n):
		p.target = min(p.target+max(1, often.n/max(1, once.n)), n)
	case often.has(print, n):
		p.target = max(p.target-max(1, once.n/max(1, often.n)), 0)
	default:
		in = newcomers
	}
	p.put(i, in)
}

func (p *arc) touch(i uint32) {
	p.remove(i)
	p.put(i, proved)
}

func (p *arc) victim(keep func(uint32) bool) uint32 {
	from := proved
	if n := p.lists[newcomers].n; n > 0 && (n > p.target || p.lists[proved].n == 0) {
		from = newcomers
	}
	for _, from := range [2]int{from, 1 - from} {
		if i := p.lists[from].victim(p.links, keep); i != none {
			p.gone[from].add(p.index.print(i), p.len()+1)
			return i
		}
	}
	return none
}

// ghost remembers the last fingerprints that left. It is a table of sets of four, in each of which
// the oldest goes first, so that some of those in range are forgotten.
type ghost struct {
	sets  []ghostSet
	count uint32 // of all that were added; also the time
	n     int    // of those that are known, at most
}

type gone struct{ print, at uint32 }

type ghostSet [4]gone

func (g *ghost) set(print uint32) *ghostSet {
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
	if 2*len(g.sets) < last { // twice as many places, at least
		old, n := g.sets, 4
		for 2*n < last {
			n *= 2
		}
		g.sets = make([]ghostSet, n)
		for k := range old {
			for _, e := range old[k] {
				g.put(e)
			}
		}
	}
	g.count = max(g.count+1, 1) // 0 is an empty place
	g.n = min(g.n+1, last)
	g.put(gone{print, g.count})
}

// put replaces the oldest of a set, an empty one, or that of the same block.
func (g *ghost) put(e gone) {
	s := g.set(e.print)
	to := 0
	for k := range s {
		if s[k].at == 0 || s[k].print == e.print {
			to = k
			break
		}
		if g.count-s[k].at > g.count-s[to].at {
			to = k
		}
	}
	s[to] = e
}
