// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// batch is a copy of the arguments of one Submit. Batches are reused. prepare sets the first block;
// peer.mu guards the rest.
type batch struct {
	op       driver.Op
	tag      uint64
	descs    []driver.Desc
	pattern  driver.Pattern
	loops    [driver.LoopsMax]driver.Loop // of pattern
	slots    []uint32                     // the index lists of pattern
	entryLen uint64                       // bytes of an entry of pattern; 0: the batch has descs
	count    int                          // of pieces: descs, or entries of pattern
	pairs    []pair
	bytes    uint64
	msg      []byte // the notification
	number   uint64 // of the notification, from 1 on

	tail driver.Tail // NotifyTail: a notification is to be sent

	// Where the next part begins: at pieceOff in a piece, whose memories are pairs[pairAt]. All
	// parts are cut when piece is count.
	piece    int
	pieceOff uint64
	pairAt   int

	queue        *queue // in which it waits for parts to be cut; nil: none
	prev, next   *batch // in the queue
	partsSent    uint32 // parts that were cut
	partsUnread  int    // parts of a Write whose payloadSent has not been called
	partsUnacked int    // parts, and notifications, that are not over
	err          error  // the outcome
	cancelled    atomic.Bool
}

// pair is the two memories of a piece. Consecutive pieces mostly name the same two, so prepare
// looks them up only when the keys change.
type pair struct {
	localKey, remoteKey uint32
	local               *memory
	remote              *remote
}

func (v *pair) matches(d *driver.Desc) bool {
	return v.localKey == d.LocalKey && v.remoteKey == d.RemoteKey
}

// remote is an imported memory, as the owner has described it in its answer.
type remote struct {
	key      uint32
	ticket   uint64
	size     uint64
	readOnly bool
}

// How long the slices are that a free batch keeps, at most 16 KiB of each. There may be
// Config.BatchesMax free batches.
const (
	descsKept   = 512
	slotsKept   = 4 << 10
	pairsKept   = 512
	messageKept = 16 << 10 // of a message
)

// reset empties a batch for its next use. It keeps small slices.
func (x *batch) reset() {
	clear(x.pairs)
	*x = batch{descs: emptied(x.descs, descsKept), slots: emptied(x.slots, slotsKept),
		pairs: emptied(x.pairs, pairsKept), msg: emptied(x.msg, messageKept)}
}

// emptied returns a slice without its elements, or nil if it has room for more than most.
func emptied[T any](s []T, most int) []T {
	if cap(s) > most {
		return nil
	}
	return s[:0]
}

// queue has the batches from which parts are to be cut, in the order of Submit.
type queue struct{ first, last *batch }

func (q *queue) push(x *batch) {
	x.queue, x.prev = q, q.last
	if q.last == nil {
		q.first = x
	} else {
		q.last.next = x
	}
	q.last = x
}

func (q *queue) remove(x *batch) {
	if x.prev == nil {
		q.first = x.next
	} else {
		x.prev.next = x.next
	}
	if x.next == nil {
		q.last = x.prev
	} else {
		x.next.prev = x.prev
	}
	x.queue, x.prev, x.next = nil, nil, nil
}

// prepare copies what Submit was given and checks all of it, so that an invalid batch starts
// nothing.
func (x *batch) prepare(p *peer, tag uint64, b *driver.Batch) error {
	x.tag, x.op, x.tail = tag, b.Op, b.Tail
	if b.Tail == driver.NotifyTail {
		x.msg = append(x.msg, b.Notify...)
	}
	if b.Pattern == nil {
		for i := range b.Descs {
			d := &b.Descs[i]
			if n := len(x.pairs); n == 0 || !x.pairs[n-1].matches(d) {
				if err := x.addPair(p, d.LocalKey, d.RemoteKey); err != nil {
					return &driver.PieceError{Piece: i, Err: err}
				}
			}
			v := &x.pairs[len(x.pairs)-1]
			if err := d.Check(v.local.seg.Len, v.remote.size); err != nil {
				return &driver.PieceError{Piece: i, Err: err}
			}
			x.bytes += d.Len
		}
		x.descs, x.count = append(x.descs, b.Descs...), len(b.Descs)
		return nil
	}
	if err := x.addPair(p, b.Pattern.LocalKey, b.Pattern.RemoteKey); err != nil {
		return err
	}
	x.pattern = *b.Pattern
	g := &x.pattern
	g.Loops = append(x.loops[:0], g.Loops...) // Check refuses more than there is room for
	near := len(g.Local.List)
	x.slots = append(append(x.slots, g.Local.List...), g.Remote.List...)
	if g.Local.List != nil {
		g.Local.List = x.slots[:near]
	}
	if g.Remote.List != nil {
		g.Remote.List = x.slots[near:]
	}
	x.entryLen, x.count, x.bytes = g.EntryLen(), g.Count, g.Bytes()
	return g.Check(x.pairs[0].local.seg.Len, x.pairs[0].remote.size)
}

// addPair looks the two memories of a piece up.
func (x *batch) addPair(p *peer, localKey, remoteKey uint32) error {
	local := p.b.memories.At(localKey)
	if local == nil {
		return fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	}
	p.importMu.RLock()
	r := p.imports.At(remoteKey)
	p.importMu.RUnlock()
	if r == nil {
		return fmt.Errorf("remote key %d: %w", remoteKey, driver.ErrBounds)
	}
	if x.op == driver.Write && r.readOnly {
		return driver.ErrReadOnly
	}
	x.pairs = append(x.pairs, pair{localKey, remoteKey, local, r})
	return nil
}
