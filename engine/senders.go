// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// sender is the other end of a connection that a peer has opened to one of our backends.
// It begins with the hello and ends with the last word of the backend.
type sender struct {
	lane   *lane
	conn   uint64 // the backend's number for the connection
	id     wire.ID
	name   string
	ticket *ticket       // that it has shown; nil: id and name are claims
	gone   chan struct{} // closed by the last word

	// Touched under lane.receiveMu alone.
	peer     *Peer // as of version
	version  uint64
	given    string // the name that the engine gave with its description
	notified bool   // the program was told something of it

	waiting [][]byte // answers; guarded by lane.answers.mu
	window  *window  // guarded by stager.mu
	opening bool     // guarded by stager.mu: a goroutine opens the window
}

// ends are the connections of a lane, by the backend's numbers.
type ends struct {
	senders map[uint64]*sender // guarded by lane.receiveMu
	own     sync.Map           // of *conn: those that we opened
}

// dispatch deals with one message. It returns true with a notification for the program. A message
// that breaks the rules is dropped: its sender waits in vain.
// Preconditions: l.receiveMu is held.
func (l *lane) dispatch(m *driver.Message) (n Notification, forProgram bool) {
	data := m.Data
	m.Data = nil
	s := l.senders[m.Conn]
	switch {
	case m.Err != nil:
		return l.connectionEnded(m.Conn, s, m.Err)
	case len(data) == 0:
		return n, false
	case s == nil:
		// By a connection of ours come answers alone: it has no last word that ends a sender.
		if c, ok := l.own.Load(m.Conn); ok {
			c.(*conn).answered(data)
		} else if data[0] == wire.KindHello {
			l.addSender(m.Conn, data)
		}
		return n, false
	}
	switch data[0] {
	case wire.KindNotification:
		s.notified = true
		return s.notification(data[1:]), true
	case wire.KindPart:
		whole, ok, err := l.e.reassembly.add(s, data[1:], l.e.cfg.NotifyMax)
		if err != nil {
			return l.connectionEnded(m.Conn, s, err)
		}
		if ok {
			s.notified = true
			return s.notification(whole), true
		}
	case wire.KindWindowAsk, wire.KindPut, wire.KindGet, wire.KindWithdrawn:
		l.e.stager.request(s, data[0], data[1:])
	}
	return n, false
}

// addSender begins a sender by its hello.
// Preconditions: l.receiveMu is held.
func (l *lane) addSender(conn uint64, hello []byte) {
	h, ok := wire.ParseHello(hello)
	if !ok {
		return
	}
	s := &sender{lane: l, conn: conn, id: h.ID, name: h.Name, gone: make(chan struct{})}
	l.e.mu.Lock()
	s.ticket = l.e.tickets[h.Show] // of a zero secret there is none
	l.e.mu.Unlock()
	if l.senders == nil {
		l.senders = map[uint64]*sender{}
	}
	l.senders[conn] = s
}

// connectionEnded ends one connection, and no other. A Peer that Serve made ends with the
// connections of the dialler that belong to the same exchange.
// Preconditions: l.receiveMu is held.
func (l *lane) connectionEnded(conn uint64, s *sender, err error) (n Notification,
	forProgram bool) {
	if s == nil {
		return n, false // it never said a hello
	}
	n = s.notification(nil)
	n.Err = err
	delete(l.senders, conn)
	l.e.reassembly.forget(s)
	close(s.gone)
	if s.ticket != nil && n.Peer != nil && n.Peer.served.Load() {
		if c := n.Peer.conns[l.index]; c != nil {
			c.markLost()
		}
	}
	// Connections without a message leave half of the inbox to others: where it is full
	// chains wait, too.
	return n, s.notified || len(l.e.inbox) < (cap(l.e.inbox)+1)/2
}

// notification makes a notification of the sender's for the program.
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

// answersMax is how many answers of one connection wait for room. A peer that asks keeps
// to fewer requests.
const answersMax = 256

// answers are those of a lane's senders that wait for room. The lock is held while the backend
// takes one, which never blocks.
type answers struct {
	mu    sync.Mutex
	of    []*sender    // guarded by mu: those with any, and their waiting
	count atomic.Int64 // len(of)
}

// answer sends b, which may be changed then, back by the sender's connection, at once or when
// there is room. It never blocks. It drops answers for a peer that does not read them.
func (s *sender) answer(b []byte) {
	a := &s.lane.answers
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(s.waiting) == 0 {
		if err := s.send(b); !errors.Is(err, driver.ErrFull) {
			return // sent, or the connection has ended
		}
		a.of = append(a.of, s)
		a.count.Store(int64(len(a.of)))
		s.lane.wakeProgress() // room may have come before the sender was listed
	}
	if len(s.waiting) < answersMax {
		s.waiting = append(s.waiting, slices.Clone(b))
	}
}

// send hands an answer to the backend. One that is longer than the peer takes is replaced by
// its outcome, which names the cause: the peer must not wait for an answer that never comes.
func (s *sender) send(b []byte) error {
	err := s.lane.b.Answer(s.conn, b)
	if !errors.Is(err, driver.ErrBounds) {
		return err
	}
	head := answerHead(b)
	if short := wire.AppendOutcome(bytes.Clone(head), err); len(short) < len(b) {
		if err = s.lane.b.Answer(s.conn, short); !errors.Is(err, driver.ErrBounds) {
			return err
		}
	}
	return s.lane.b.Answer(s.conn, append(bytes.Clone(head), wire.OutOfBounds))
}

// answerHead is the part of an answer before its outcome.
func answerHead(b []byte) []byte {
	switch b[0] {
	case wire.KindHopEnd:
		return b[:1+wire.HopName]
	}
	return []byte{wire.KindWindow, 0, 0}
}

// sendAnswers sends the waiting answers, as far as there is room. The progress goroutine calls it.
func (l *lane) sendAnswers() {
	a := &l.answers
	if a.count.Load() == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of = slices.DeleteFunc(a.of, func(s *sender) bool {
		for len(s.waiting) > 0 {
			err := s.send(s.waiting[0])
			if errors.Is(err, driver.ErrFull) {
				return false
			}
			s.waiting = s.waiting[1:]
			if err != nil {
				s.waiting = nil // the connection has ended
			}
		}
		return true
	})
	a.count.Store(int64(len(a.of)))
}

// answered deals with an answer of the peer, by a connection of ours.
func (c *conn) answered(data []byte) {
	switch data[0] {
	case wire.KindWindow, wire.KindHopEnd:
		c.peer.chains().answered(c, data[0], data[1:])
	}
}
