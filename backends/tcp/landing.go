// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
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

// Why a piece does not land now.
var (
	errStale    = errors.New("the peer has yet to confirm that it still wants these bytes")
	errUnwanted = errors.New("these bytes go nowhere")
)

// handMax is how many bytes are copied behind one look: a process that is stopped right after
// it copies them when it goes on.
const handMax = 16 << 10

// enter begins a piece, which lands before leave, unless there is an error. What it looks at stays
// so meanwhile: the connection is not over (stop waits), the memory has this ticket (Revoke waits),
// and its pages are not replaced. The age comes last, since for the others it may wait.
func (c *conn) enter(l *landing) error {
	c.rmu.Lock()
	if c.over.Load() {
		c.rmu.Unlock()
		return errOver
	}
	if l.mem == nil || l.cancel != nil && l.cancel.Load() {
		c.rmu.Unlock()
		return errUnwanted
	}
	if l.m != nil {
		testpoint.At("tcp: received") // nothing is checked for these bytes
		if !l.m.enter(l.ticket) {
			l.mem, l.status = nil, session.StatusRevoked
			c.rmu.Unlock()
			return errUnwanted
		}
		testpoint.At("tcp: ticket") // the gate is held, the age not checked
	}
	if l.shared != nil {
		l.shared.Enter()
	}
	if l.m != nil {
		if !l.owner.fresh(l.stamp) {
			c.leave(l)
			return errStale
		}
		testpoint.At("tcp: checked") // the piece is about to land
	}
	return nil
}

func (c *conn) leave(l *landing) {
	if l.m != nil {
		testpoint.At("tcp: landed") // the gate is still held
	}
	if l.shared != nil {
		l.shared.Leave()
	}
	if l.m != nil {
		l.m.leave()
	}
	c.rmu.Unlock()
}

// aim lists the next bytes that the kernel may put in place. It reports false where there are none.
func (l *landing) aim(v *vector) bool {
	ahead := l.ranges
	for l.mem != nil && v.n < vectorMax-1 && ahead.left > 0 {
		off, n := ahead.next()
		if n < directMin && ahead.left > directMin {
			break
		}
		v.add(l.mem[off : off+n])
		ahead.advance(n)
	}
	return v.sum > 0
}

// place copies bytes to where they go.
// Preconditions: enter has succeeded.
func (l *landing) place(rest []byte) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	ahead := prefetcher{l.ranges, l.mem}
	ahead.fetch(prefetchAhead)
	for len(rest) > 0 {
		ahead.fetch(1)
		off, n := l.next()
		n = min(n, uint64(len(rest)))
		copy(l.mem[off:off+n], rest)
		rest = rest[n:]
		l.advance(n)
	}
	return nil
}
