// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// landing is where a payload goes.
type landing struct {
	ranges
	mem    []byte        // nil: nowhere
	shared driver.Shared // of mem; nil: foreign memory
	owner  *inbound
	m      *memory // of the owner, whose gate is held by each piece
	ticket uint64
	stamp  int64
	status session.Status
	cancel *atomic.Bool // of a Read of ours
}

// enter asks whether the next piece may land. more: it may, and leave must follow.
func (l *landing) enter() verdict {
	if l.mem == nil || l.cancel != nil && l.cancel.Load() {
		return finished
	}
	if l.m != nil {
		testpoint.At("tcp: received") // nothing is checked for these bytes
		l.m.gate.RLock()
		if !l.m.opens(l.ticket) {
			l.m.leave()
			l.mem, l.status = nil, session.StatusRevoked
			return finished
		}
		testpoint.At("tcp: ticket") // the gate is held, the age not checked
	}
	if l.shared != nil {
		l.shared.Enter()
	}
	if l.m != nil {
		if !l.owner.fresh(l.stamp) { // last: the others may have to wait
			l.leave()
			return paused
		}
		testpoint.At("tcp: checked") // the piece is about to land
	}
	return more
}

func (l *landing) leave() {
	if l.m != nil {
		testpoint.At("tcp: landed") // the gate is still held
	}
	if l.shared != nil {
		l.shared.Leave()
	}
	if l.m != nil {
		l.m.leave()
	}
}

// handMax is how many bytes are copied behind one look: a process that is stopped right after
// it copies them when it goes on.
const handMax = 16 << 10

// fill copies bytes into place, at most handMax. It returns how many were used.
func (l *landing) fill(b []byte) (int, verdict) {
	b = b[:min(uint64(len(b)), l.left, handMax)]
	if len(b) == 0 {
		return 0, more
	}
	switch l.enter() {
	case paused:
		return 0, paused
	case finished:
		l.left -= uint64(len(b))
		return len(b), more
	}
	defer l.leave()
	left := l.left - uint64(len(b))
	if err := l.place(b); err != nil {
		l.mem, l.left, l.status = nil, left, session.StatusOf(err)
	}
	return len(b), more
}

// place copies bytes to where they go.
// Preconditions: enter has said more.
func (l *landing) place(rest []byte) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	ahead := prefetcher{l.ranges, l.mem}
	ahead.look(prefetchAhead)
	for len(rest) > 0 {
		ahead.look(1)
		off, n, ok := l.next()
		if !ok {
			return driver.ErrBounds
		}
		n = min(n, uint64(len(rest)))
		copy(l.mem[off:off+n], rest)
		rest = rest[n:]
		l.advance(n)
	}
	return nil
}
