// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"container/heap"
	"time"
)

// sequence is a request that is decoded.
type sequence struct {
	first   time.Duration // when its first token came
	inTime  bool          // that was within the limit
	output  int           // tokens, the first one among them
	context int64         // tokens when it joins the batch
	last    int64         // number of the step of the instance that gives the last token
}

// decodeInstance is one. A batch takes steps; who comes during one joins with the next.
type decodeInstance struct {
	// of all that were placed here and have not ended
	sequences       int
	context, tokens int64 // context: when they join; tokens: when they end

	batch batch
	held  int64         // tokens of the batch's contexts
	steps int64         // that have been taken
	at    time.Duration // when the last of them ended, or that in which somebody joined will
	turn  int           // of the events that say when the next sequence ends, the one that holds
}

// batch is a heap of sequences by their end.
type batch []*sequence

func (b batch) Len() int           { return len(b) }
func (b batch) Less(i, j int) bool { return b[i].last < b[j].last }
func (b batch) Swap(i, j int)      { b[i], b[j] = b[j], b[i] }
func (b *batch) Push(x any)        { *b = append(*b, x.(*sequence)) }
func (b *batch) Pop() any {
	last := len(*b) - 1
	x := (*b)[last]
	*b = (*b)[:last]
	return x
}

// advance simulates steps of the batch.
func (d *decodeInstance) advance(r *run, n int64) {
	d.at = later(d.at, r.Curves.steps(n, len(d.batch), d.held))
	d.steps += n
	d.held += n * int64(len(d.batch))
}

// join adds a sequence to the batch as soon as a step ends.
func (d *decodeInstance) join(r *run, e event) {
	if len(d.batch) == 0 {
		d.at = e.at
	} else {
		d.advance(r, r.Curves.stepsWithin(e.at-d.at, len(d.batch), d.held))
	}
	e.joins.last = d.steps + int64(e.joins.output) - 1
	heap.Push(&d.batch, e.joins)
	d.held += e.joins.context
	d.awaitEnd(r, e.decode)
}

// awaitEnd makes an event of the end of the next sequence that ends, in place of the one before.
func (d *decodeInstance) awaitEnd(r *run, decode int) {
	d.turn++
	if len(d.batch) > 0 {
		n := d.batch[0].last - d.steps
		r.events.add(event{at: later(d.at, r.Curves.steps(n, len(d.batch), d.held)), decode: decode,
			turn: d.turn})
	}
}

// complete takes the steps up to the end of the next sequences that end, and ends them.
func (d *decodeInstance) complete(r *run, decode int) {
	d.advance(r, d.batch[0].last-d.steps)
	for len(d.batch) > 0 && d.batch[0].last == d.steps {
		s := heap.Pop(&d.batch).(*sequence)
		grown := s.context + int64(s.output) - 1
		d.held -= grown
		d.sequences--
		d.context -= s.context
		d.tokens -= grown
		tbt := (d.at - s.first) / time.Duration(s.output-1)
		r.result.TBT = append(r.result.TBT, tbt)
		r.result.count(s.inTime && (r.TBT == 0 || tbt <= r.TBT))
	}
	d.awaitEnd(r, decode)
}

// event is what happens at a time: a sequence joins a decode instance, or the next one ends there.
type event struct {
	at     time.Duration
	number uint64 // so that of two at one time the older comes first
	decode int
	joins  *sequence // nil: one ends
	turn   int
}

// events is a heap of them.
type events struct {
	list  []event
	count uint64
}

func (e *events) Len() int { return len(e.list) }
func (e *events) Less(i, j int) bool {
	a, b := &e.list[i], &e.list[j]
	return a.at < b.at || a.at == b.at && a.number < b.number
}
func (e *events) Swap(i, j int) { e.list[i], e.list[j] = e.list[j], e.list[i] }
func (e *events) Push(x any)    { e.list = append(e.list, x.(event)) }
func (e *events) Pop() any {
	last := len(e.list) - 1
	x := e.list[last]
	e.list = e.list[:last]
	return x
}

func (e *events) add(one event) {
	e.count++
	one.number = e.count
	heap.Push(e, one)
}
