// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// batch is what one Submit handed over. p.mu guards what changes. Batches are reused.
type batch struct {
	op      driver.Op
	tag     uint64
	id      uint64 // of this connection, never used again
	descs   []driver.Desc
	pattern driver.Pattern               // of which the index lists are the caller's
	loops   [driver.LoopsMax]driver.Loop // of pattern
	entry   uint64                       // bytes of an entry; 0: descs
	room    uint64                       // slots of its local side
	count   int                          // of descs, or of entries
	views   []view
	bytes   uint64

	tail   driver.Tail
	msg    []byte
	number uint64 // of the message

	// What is to be cut off next: piece i from off on, which is of view v.
	i   int
	off uint64
	v   int

	queue      *queue // where it waits; nil: all of it is on its way
	prev, next *batch // in the queue
	sent       uint32 // parts
	unread     int    // parts of a Write whose bytes no connection has read to their end
	flying     int    // parts and notifications that are not acknowledged
	err        error
	dropped    atomic.Bool // what still arrives for it is not wanted
}

// view is a pair of memories. Neighbouring pieces mostly name the same, so it is looked up
// only when the keys change.
type view struct {
	localKey, remoteKey uint32
	local               *memory
	remote              *remote
}

func (v *view) shows(d *driver.Desc) bool {
	return v.localKey == d.LocalKey && v.remoteKey == d.RemoteKey
}

// remote is a token that was accepted.
type remote struct {
	key      uint32
	ticket   uint64
	size     uint64
	readOnly bool
}

// whole reports whether all pieces are cut off.
func (x *batch) whole() bool { return x.i == x.count }

// reset forgets what the last use left; the slices are kept.
func (x *batch) reset() {
	clear(x.views)
	descs, views, msg := x.descs[:0], x.views[:0], x.msg[:0]
	dropped := x.dropped.Load()
	if dropped {
		x.dropped.Store(false)
	}
	x.pattern = driver.Pattern{}
	x.descs, x.views, x.msg = descs, views, msg
	x.bytes, x.entry, x.count = 0, 0, 0
	x.tail, x.number = driver.NoTail, 0
	x.i, x.off, x.v = 0, 0, 0
	x.queue, x.prev, x.next = nil, nil, nil
	x.sent, x.unread, x.flying, x.err = 0, 0, 0, nil
}

// queue is batches that wait, in order.
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

// take fills in and checks a whole batch, so that what cannot work starts nothing.
func (x *batch) take(p *peer, b *driver.Batch) error {
	x.op, x.tail = b.Op, b.Tail
	if b.Tail == driver.NotifyTail {
		x.msg = append(x.msg, b.Notify...)
	}
	if b.Pattern != nil {
		return x.takePattern(p, b.Pattern)
	}
	for i := range b.Descs {
		d := &b.Descs[i]
		if n := len(x.views); n == 0 || !x.views[n-1].shows(d) {
			if err := x.look(p, d.LocalKey, d.RemoteKey); err != nil {
				return &driver.PieceError{Piece: i, Err: err}
			}
		}
		v := &x.views[len(x.views)-1]
		if err := d.Check(v.local.seg.Len, v.remote.size); err != nil {
			return &driver.PieceError{Piece: i, Err: err}
		}
		x.bytes += d.Len
	}
	x.descs, x.count = append(x.descs, b.Descs...), len(b.Descs)
	return nil
}

func (x *batch) takePattern(p *peer, t *driver.Pattern) error {
	if err := x.look(p, t.LocalKey, t.RemoteKey); err != nil {
		return err
	}
	if err := t.Check(x.views[0].local.seg.Len, x.views[0].remote.size); err != nil {
		return err
	}
	x.pattern, x.entry, x.count, x.bytes = *t, t.EntryLen(), t.Count, t.Bytes()
	x.room = roomOf(t, x.views[0].local.seg.Len)
	x.pattern.Loops = x.loops[:copy(x.loops[:], t.Loops)]
	return nil
}

// look appends the view of a pair of keys.
func (x *batch) look(p *peer, localKey, remoteKey uint32) error {
	local := p.b.memories.At(localKey)
	if local == nil {
		return fmt.Errorf("local key %d: %w", localKey, driver.ErrBounds)
	}
	r := p.imported(remoteKey)
	if r == nil {
		return fmt.Errorf("remote key %d: %w", remoteKey, driver.ErrBounds)
	}
	if x.op == driver.Write && r.readOnly {
		return driver.ErrReadOnly
	}
	x.views = append(x.views, view{localKey, remoteKey, local, r})
	return nil
}
