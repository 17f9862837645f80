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
	descs   []driver.Desc
	pattern driver.Pattern
	loops   [driver.LoopsMax]driver.Loop // of pattern
	slots   []uint32                     // its index lists, which the program may change meanwhile
	entry   uint64                       // bytes of an entry; 0: descs
	count   int                          // of descs, or of entries
	views   []view
	bytes   uint64

	tail   driver.Tail
	msg    []byte
	number uint64 // of the message

	// What is to be cut off next: piece i from off on, which is of view v. All is where i is count.
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

// What a batch that waits to be used again keeps of the slices of its last use, by their number: at
// most 16 KiB of each. There may be Config.BatchesMax such batches.
const (
	descsKept = 512
	slotsKept = 4 << 10
	viewsKept = 512
	bytesKept = 16 << 10 // of a message
)

// reset forgets what the last use left, and keeps small slices.
func (x *batch) reset() {
	clear(x.views)
	*x = batch{descs: emptied(x.descs, descsKept), slots: emptied(x.slots, slotsKept),
		views: emptied(x.views, viewsKept), msg: emptied(x.msg, bytesKept)}
}

// emptied returns a slice without its elements, or nil where it has room for more than most.
func emptied[T any](s []T, most int) []T {
	if cap(s) > most {
		return nil
	}
	return s[:0]
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

// prepare copies a batch and checks the whole of it, so that what cannot work starts nothing.
func (x *batch) prepare(p *peer, tag uint64, b *driver.Batch) error {
	x.tag, x.op, x.tail = tag, b.Op, b.Tail
	if b.Tail == driver.NotifyTail {
		x.msg = append(x.msg, b.Notify...)
	}
	if b.Pattern == nil {
		for i := range b.Descs {
			d := &b.Descs[i]
			if n := len(x.views); n == 0 || !x.views[n-1].shows(d) {
				if err := x.addView(p, d.LocalKey, d.RemoteKey); err != nil {
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
	if err := x.addView(p, b.Pattern.LocalKey, b.Pattern.RemoteKey); err != nil {
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
	x.entry, x.count, x.bytes = g.EntryLen(), g.Count, g.Bytes()
	return g.Check(x.views[0].local.seg.Len, x.views[0].remote.size)
}

// addView looks up a pair of keys.
func (x *batch) addView(p *peer, localKey, remoteKey uint32) error {
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
	x.views = append(x.views, view{localKey, remoteKey, local, r})
	return nil
}
