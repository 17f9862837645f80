// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// batch is what one Submit handed over. p.mu guards what changes. Batches are reused.
type batch struct {
	op    driver.Op
	tag   uint64
	id    uint64 // of this connection, never used again
	descs []driver.Desc
	pages driver.Pages // of which the index lists are the caller's
	count int          // of descs, or of pages
	paged bool
	views []view
	bytes uint64

	note   noteKind
	msg    []byte
	number uint64 // of the message
	target uint32 // counter

	// What is to be cut off next: piece i from off on, which is of view v.
	i   int
	off uint64
	v   int

	line       *line  // where it waits; nil: all of it is on its way
	prev, next *batch // in line
	sent       uint32 // parts
	flying     int    // parts and notes that are not acknowledged
	err        error
	dropped    atomic.Bool // what still arrives for it is not wanted
}

type noteKind uint8

const (
	noNote noteKind = iota
	message
	count
)

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

// at returns piece i.
func (x *batch) at(i int) driver.Desc {
	if x.paged {
		return x.pages.Desc(i)
	}
	return x.descs[i]
}

// local returns where piece i lies in local memory.
func (x *batch) local(i int) (off, n uint64) {
	if x.paged {
		return x.pages.LocalAt(i), x.pages.EntryLen
	}
	d := &x.descs[i]
	return d.Local, d.Len
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
	x.pages = driver.Pages{}
	x.descs, x.views, x.msg = descs, views, msg
	x.bytes, x.paged, x.count = 0, false, 0
	x.note, x.number, x.target = noNote, 0, 0
	x.i, x.off, x.v = 0, 0, 0
	x.line, x.prev, x.next = nil, nil, nil
	x.sent, x.flying, x.err = 0, 0, nil
}

// line is batches that wait, in order.
type line struct{ first, last *batch }

func (l *line) push(x *batch) {
	x.line, x.prev = l, l.last
	if l.last == nil {
		l.first = x
	} else {
		l.last.next = x
	}
	l.last = x
}

func (l *line) remove(x *batch) {
	if x.prev == nil {
		l.first = x.next
	} else {
		x.prev.next = x.next
	}
	if x.next == nil {
		l.last = x.prev
	} else {
		x.next.prev = x.prev
	}
	x.line, x.prev, x.next = nil, nil, nil
}

// take fills in and checks a whole batch, so that what cannot work starts nothing.
func (x *batch) take(p *peer, op driver.Op, descs []driver.Desc, pages *driver.Pages) error {
	if op != driver.Read && op != driver.Write {
		return fmt.Errorf("%v: %w", op, driver.ErrNotSupported)
	}
	x.op = op
	if pages != nil {
		return x.takePages(p, pages)
	}
	for i := range descs {
		d := &descs[i]
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
	x.descs, x.count = append(x.descs, descs...), len(descs)
	return nil
}

func (x *batch) takePages(p *peer, pages *driver.Pages) error {
	if err := x.look(p, pages.LocalKey, pages.RemoteKey); err != nil {
		return err
	}
	if err := pages.Check(x.views[0].local.seg.Len, x.views[0].remote.size); err != nil {
		return err
	}
	x.pages, x.paged, x.count, x.bytes = *pages, true, pages.Count, pages.Bytes()
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
