// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// conns knows the connections of a backend by the backend's numbers, and notes whatever
// breaks "one number for each connection, one last word, and nothing behind it".
type conns struct {
	mu     sync.Mutex // guards what follows
	states map[uint64]connState
	faults []string
}

type connState uint8

const (
	accepted     connState = iota + 1 // a message came by it
	ours                              // Peer.Conn of one that this backend opened
	lastWordCame                      // its last word came
)

func (c *conns) fault(format string, args ...any) {
	if len(c.faults) < 20 {
		c.faults = append(c.faults, fmt.Sprintf(format, args...))
	}
}

// opened notes the number of a new Peer.
func (c *conns) opened(p driver.Peer) {
	conn := p.Conn()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch notifies := p.Can()&driver.CanNotify != 0; {
	case !notifies && conn != 0:
		c.fault("Peer.Conn is %d although the Peer lacks CanNotify", conn)
	case !notifies:
	case conn == 0:
		c.fault("Peer.Conn is 0 although the Peer has CanNotify")
	case c.states[conn] != 0:
		c.fault("Peer.Conn of a new Peer is %d, a number that this backend has used before", conn)
	case p.Conn() != conn:
		c.fault("Peer.Conn is %d, then %d: it must be constant", conn, p.Conn())
	default:
		c.note(conn, ours)
	}
}

func (c *conns) note(conn uint64, state connState) {
	if c.states == nil {
		c.states = map[uint64]connState{}
	}
	c.states[conn] = state
}

// audit looks at messages in the order in which they came.
func (c *conns) audit(msgs []driver.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range msgs {
		c.auditOne(m)
	}
}

func (c *conns) auditOne(m driver.Message) {
	state := c.states[m.Conn]
	switch {
	case m.Conn == 0:
		c.fault("a message (%x, %v) has no number of a connection", head(m.Data), m.Err)
	case state == lastWordCame:
		c.fault("connection %d: %x (%v) came behind its last word", m.Conn, head(m.Data), m.Err)
	case m.Err != nil && state == ours:
		c.fault("connection %d, which this backend opened, has a last word", m.Conn)
	case m.Err != nil && (!errors.Is(m.Err, driver.ErrPeerLost) || m.Data != nil):
		c.fault("connection %d: last word %x with %v, want no data and %v", m.Conn, head(m.Data),
			m.Err, driver.ErrPeerLost)
	case m.Err != nil:
		c.note(m.Conn, lastWordCame)
	case state == 0:
		c.note(m.Conn, accepted)
	}
}

func head(p []byte) []byte { return p[:min(8, len(p))] }

// list returns what is wrong.
func (c *conns) list() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.faults
}
