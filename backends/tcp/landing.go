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

// landing is the destination of the payload of one frame: of a Write, at the owner, or of the
// answer to a Read, at the initiator. It lands in pieces, each between beginPiece and endPiece.
type landing struct {
	ranges
	mem    []byte        // nil: the bytes go nowhere
	shared driver.Shared // of mem; nil: mem is not shared memory
	status session.Status

	// At the owner: the connection, and the memory, ticket and time that the Write names.
	inbound *inbound
	owned   *memory
	ticket  uint64
	stamp   int64

	cancelled *atomic.Bool // at the initiator: the batch is cancelled
}

// The reasons why a piece does not land now.
var (
	errStale    = errors.New("the peer has yet to confirm that it still wants these bytes")
	errUnwanted = errors.New("these bytes go nowhere")
)

// pieceMax bounds a piece that is copied from the chunk. A process that is stopped right behind
// beginPiece copies that much when it goes on.
const pieceMax = 16 << 10

// beginPiece checks whether a piece may land, and keeps it so until endPiece: the connection is not
// stopped (conn.stop waits for landMu), the memory has this ticket (Revoke waits for its gate), and
// the pages of the memory are not replaced. The age is checked last, since the other checks may
// wait. After an error endPiece must not follow.
func (c *conn) beginPiece(l *landing) error {
	c.landMu.Lock()
	if c.stopped.Load() {
		c.landMu.Unlock()
		return errStopped
	}
	if l.mem == nil || l.cancelled != nil && l.cancelled.Load() {
		c.landMu.Unlock()
		return errUnwanted
	}
	if l.owned != nil {
		testpoint.At("tcp: received") // neither ticket nor age of these bytes is checked
		if !l.owned.enterGate(l.ticket) {
			l.mem, l.status = nil, session.StatusRevoked
			c.landMu.Unlock()
			return errUnwanted
		}
		testpoint.At("tcp: ticket") // the gate is held, the age not checked
	}
	if l.shared != nil {
		l.shared.Enter()
	}
	if l.owned != nil {
		if !l.inbound.freshOrAsk(l.stamp) {
			c.endPiece(l)
			return errStale
		}
		testpoint.At("tcp: checked") // the piece is about to land
	}
	return nil
}

// endPiece releases the locks and the gate that beginPiece has taken.
func (c *conn) endPiece(l *landing) {
	if l.owned != nil {
		testpoint.At("tcp: landed") // the gate is still held
	}
	if l.shared != nil {
		l.shared.Leave()
	}
	if l.owned != nil {
		l.owned.leaveGate()
	}
	c.landMu.Unlock()
}

// listDirect lists the next runs that the kernel may fill. It reports false where there are none.
func (l *landing) listDirect(v *vector) bool {
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

// copyIn copies a piece to its place.
// Preconditions: beginPiece has returned nil.
func (l *landing) copyIn(rest []byte) (err error) {
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
