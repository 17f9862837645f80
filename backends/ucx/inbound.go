// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"sync"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/internal/session"
)

// inbound is our end of a connection that a peer began: over it the peer reaches
// our memory and sends messages.
type inbound struct {
	b       *Backend
	id      inboundID
	conn    uint64 // its number
	from    address
	worker  int
	reply   []byte // the address of the peer's worker
	grace   uint64
	refusal error // why it is not welcome

	giving sync.Once

	mu       sync.Mutex // no longer than a crossing that does not wait
	link     link       // nil: not there yet, or given back
	linked   uint64     // its id; 0: it never was there
	welcomed bool
	left     bool // the peer says nothing any more
	parted   bool // it said so itself
	said     bool // and the program was told, or need not be
	returned bool // the link was given back
}

// heard implements end.
func (c *inbound) heard(message any) {
	switch m := message.(type) {
	case *importRequest:
		c.imports(m)
	case *bye:
		c.bye(m)
	}
}

// imports answers what a token opens.
func (c *inbound) imports(q *importRequest) {
	a := importAnswer{id: q.id, status: session.StatusRevoked}
	if m := c.b.table.At(q.key); m != nil {
		a = m.answer(q)
	}
	c.say(a.encode())
}

// say sends to the peer, if it is there to hear it.
func (c *inbound) say(msg []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil && !c.left {
		_ = c.link.Control(msg) // a peer that is lost is told of elsewhere
	}
}

// bye answers that nothing of the peer can land any more: all it sent before was
// handled before.
func (c *inbound) bye(m *bye) {
	c.mu.Lock()
	c.parted = true
	there := c.link != nil
	if there {
		_ = c.link.Control(farewell{}.encode())
	}
	tell := c.leave(!m.abandoned)
	c.mu.Unlock()
	c.tell(tell)
	if there {
		c.returnSoon()
	}
}

// lost implements end. Nothing that the peer has sent lands once our end is over, so the link is
// given back.
func (c *inbound) lost(bool) {
	c.mu.Lock()
	there := c.link != nil
	if there {
		c.link.End(ucp.Lost, false)
	}
	tell := c.leave(true)
	c.mu.Unlock()
	c.tell(tell)
	if there {
		c.returnSoon()
	}
}

// there implements end.
func (c *inbound) there() *address { return &c.from }

// over implements end.
func (c *inbound) over(f func(link)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil {
		f(c.link)
	}
}

// returnSoon gives the link back beside; when the backend closes it does so itself.
func (c *inbound) returnSoon() { c.b.tasks.Start(c.giveBack) }

// leave notes that no more messages come, and reports whether the program is to be
// told: not of a connection that the peer's program never had.
// Preconditions: c.mu is held.
func (c *inbound) leave(had bool) (tell bool) {
	if c.left {
		return false
	}
	c.left = true
	c.said = !had || !c.welcomed
	return !c.said
}

// tell has Receive say the last word.
func (c *inbound) tell(tell bool) {
	if tell {
		c.b.words.Add(c)
		c.b.wake()
	}
}

// giveBack ends our end of it.
func (c *inbound) giveBack() {
	c.giving.Do(func() {
		c.mu.Lock()
		link := c.link
		c.link = nil
		if !c.left {
			c.left, c.said = true, true // the backend closes
		}
		if c.refusal != nil {
			c.said = true
		}
		c.mu.Unlock()
		if link != nil {
			_ = link.Close(c.b.cfg.CloseMax) // by force, where time was too short
		}
		c.mu.Lock()
		c.returned = true
		c.mu.Unlock()
		c.forget()
	})
}

// forget takes the connection off the lists when nothing is left of it: its
// messages may wait for Receive for long, and are known by its id.
func (c *inbound) forget() {
	c.mu.Lock()
	over := c.said && c.returned
	c.mu.Unlock()
	if over {
		c.withdraw()
	}
}

// withdraw takes it off the lists.
func (c *inbound) withdraw() {
	c.mu.Lock()
	linked := c.linked
	c.mu.Unlock()
	c.b.remove(linked)
	c.b.endsMu.Lock()
	delete(c.b.inbounds, c.id)
	delete(c.b.accepted, c.conn)
	c.b.endsMu.Unlock()
}
