// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/wire"
)

// sender is the other end of a connection that a peer has opened to one of our backends.
// It begins with the hello and ends with the last word of the backend.
type sender struct {
	lane   *lane
	conn   uint64 // the backend's number for the connection
	id     wire.ID
	name   string
	ticket *ticket       // that it has shown; nil: id and name are what it claims
	gone   chan struct{} // closed by the last word

	// Touched under lane.receiveMu alone.
	peer    *Peer // as of version
	version uint64
	given   string // the name that the engine gave with its description
	heard   bool   // the program was told something of it

	queue  answerQueue
	window *window // guarded by stager.mu
	asking bool    // guarded by stager.mu: a goroutine opens the window
}

// ends is what a lane knows of connections, by the backend's numbers.
type ends struct {
	senders map[uint64]*sender // guarded by lane.receiveMu
	ownMu   sync.Mutex
	own     map[uint64]*conn // guarded by ownMu; connections that we opened
}

// enlist makes a connection of ours known, before the peer can answer by it.
func (l *lane) enlist(c *conn) {
	l.ownMu.Lock()
	defer l.ownMu.Unlock()
	if l.own == nil {
		l.own = map[uint64]*conn{}
	}
	l.own[c.p.Conn()] = c
}

func (l *lane) unlist(c *conn) {
	l.ownMu.Lock()
	defer l.ownMu.Unlock()
	if n := c.p.Conn(); l.own[n] == c {
		delete(l.own, n)
	}
}

func (l *lane) ownConn(number uint64) *conn {
	l.ownMu.Lock()
	defer l.ownMu.Unlock()
	return l.own[number]
}

// take deals with one message. It returns true with what the program is to receive. What
// breaks the rules is dropped: its sender waits in vain.
// Preconditions: l.receiveMu is held.
func (l *lane) take(m *driver.Message) (n Notification, forProgram bool) {
	data := m.Data
	m.Data = nil
	s := l.senders[m.Conn]
	switch {
	case m.Err != nil:
		return l.lastWord(m.Conn, s, m.Err)
	case len(data) == 0:
		return n, false
	case s == nil:
		// By a connection of ours come answers alone: it has no last word that ends a sender.
		if c := l.ownConn(m.Conn); c != nil {
			c.answered(data)
		} else if data[0] == exchange.IsHello {
			l.greet(m.Conn, data)
		}
		return n, false
	}
	switch data[0] {
	case exchange.IsNotification:
		s.heard = true
		return s.notification(data[1:]), true
	case exchange.IsPart:
		whole, ok, err := l.e.joining.add(s, data[1:], l.e.cfg.NotifyMax)
		if err != nil {
			return l.lastWord(m.Conn, s, err)
		}
		if ok {
			s.heard = true
			return s.notification(whole), true
		}
	case exchange.IsWindowAsk, exchange.IsPut, exchange.IsGet, exchange.IsWithdrawn:
		l.e.stager.asked(s, data[0], data[1:])
	}
	return n, false
}

// greet begins a sender by its hello.
// Preconditions: l.receiveMu is held.
func (l *lane) greet(conn uint64, hello []byte) {
	h, ok := exchange.ParseHello(hello)
	if !ok {
		return
	}
	s := &sender{lane: l, conn: conn, id: h.ID, name: h.Name, gone: make(chan struct{})}
	if h.Show != (exchange.Secret{}) {
		l.e.mu.Lock()
		if t := l.e.tickets[h.Show]; t != nil {
			s.ticket = t
		}
		l.e.mu.Unlock()
	}
	if l.senders == nil {
		l.senders = map[uint64]*sender{}
	}
	l.senders[conn] = s
}

// lastWord ends one connection, and no other. A Peer that Serve made ends with the
// connections of the dialler that belong to the same exchange.
// Preconditions: l.receiveMu is held.
func (l *lane) lastWord(conn uint64, s *sender, err error) (n Notification, forProgram bool) {
	if s == nil {
		return n, false // it never said a hello
	}
	n = s.notification(nil)
	n.Err = err
	delete(l.senders, conn)
	l.e.joining.forget(s)
	close(s.gone)
	if s.ticket != nil && n.Peer != nil && n.Peer.served.Load() {
		if c := n.Peer.conns[l.index]; c != nil {
			c.lose()
		}
	}
	// Connections without a message leave half of the inbox to others: where it is full
	// chains wait, too.
	return n, s.heard || len(l.e.inbox) < (cap(l.e.inbox)+1)/2
}

// notification is what the program receives from the sender.
func (s *sender) notification(data []byte) Notification {
	n := Notification{Backend: s.lane.caps.Name, Data: data}
	n.Peer, n.From = s.known()
	return n
}

// known returns the Peer that stands for the sender's engine, if there is one, and its name.
// A sender that has shown no ticket is not believed to be an engine that had to.
func (s *sender) known() (p *Peer, name string) {
	if s.ticket != nil {
		p = s.ticket.peer.Load()
		if p != nil && p.id == s.id {
			s.given = p.name
			return p, p.name
		}
		return nil, s.given
	}
	e := s.lane.e
	if v := e.peersVersion.Load(); v != s.version || v == 0 {
		p, proven := e.peerOf(s.id)
		s.version, s.peer = v, p
		if proven {
			s.name = ""
		}
	}
	return s.peer, s.name
}

// peerOf returns the last Peer of an engine that was made by plain Connect. proven: the
// engine is known by a ticket.
func (e *Engine) peerOf(id wire.ID) (last *Peer, proven bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for p := range e.peers {
		switch {
		case p.id != id:
		case p.ticket != nil:
			proven = true
		case !p.isLost() && (last == nil || p.number > last.number):
			last = p
		}
	}
	return last, proven
}

// longTurn lets one transfer at a time send a notification in parts over a connection.
type longTurn struct {
	mu      sync.Mutex // guards what follows
	owner   *Transfer
	waiting []*Transfer
}

// take reports whether it is t's turn. Otherwise t waits for it.
func (l *longTurn) take(t *Transfer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.owner == nil {
		l.owner = t
	}
	if l.owner != t && !slices.Contains(l.waiting, t) {
		l.waiting = append(l.waiting, t)
	}
	return l.owner == t
}

// isTurnOf reports whether t has been given the turn.
func (l *longTurn) isTurnOf(t *Transfer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.owner == t
}

// give ends t's turn, or its wait for it, and returns the transfer whose turn it is then.
func (l *longTurn) give(t *Transfer) (next *Transfer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = slices.DeleteFunc(l.waiting, func(other *Transfer) bool { return other == t })
	if l.owner != t {
		return nil
	}
	l.owner = nil
	if len(l.waiting) > 0 {
		l.owner = l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
	return l.owner
}
