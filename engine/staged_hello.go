// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// farWindow is staging memory of the peer that is ours to use.
type farWindow struct {
	nonce   uint64 // names us in the peer's messages
	number  uint64 // names the window in ours
	slots   int
	carrier *lane
	remote  *Remote

	heard chan []byte // what it said when it was asked
}

// openWindow asks the peer's engine for staging memory, and waits for the answer.
func (sp *stagedPeer) openWindow(ctx context.Context, carrier *lane) (*farWindow, error) {
	w := &farWindow{nonce: rand.Uint64(), carrier: carrier, heard: make(chan []byte, 1)}
	s := sp.s
	s.enlist(w.nonce, session{sp, w})
	msg, err := s.hello(sp.far, w)
	if err == nil {
		err = sp.say(ctx, carrier, msg)
	}
	if err == nil {
		err = sp.accept(ctx, w)
	}
	if err != nil {
		s.enlist(w.nonce, session{})
		return nil, fmt.Errorf("ask the peer for staging memory: %w", err)
	}
	return w, nil
}

// hello is the message that asks: with a description of this engine by which the peer can
// connect back and answer.
func (s *stager) hello(to []byte, w *farWindow) ([]byte, error) {
	return s.introduction(to, isHello, w.nonce, w.carrier)
}

// introduction is a message with which one engine asks another for something that is answered.
func (s *stager) introduction(to []byte, what byte, nonce uint64, by *lane) ([]byte, error) {
	d := &wire.Description{Engine: s.e.id, Host: s.e.host, Name: s.e.cfg.Name, Backends: []wire.Backend{
		{Name: by.caps.Name, Addr: by.b.Addr()}, {Name: Staged, Addr: s.Addr()}}}
	b := binary.LittleEndian.AppendUint64(appendHead(nil, to, what), nonce)
	b, err := wire.Encode(append(b, byte(len(by.caps.Name))), d)
	if err == nil && len(b) > by.caps.MessageMax {
		err = fmt.Errorf("a request of %d bytes, and %s carries messages of at most %d: %w", len(b), by.caps.Name, by.caps.MessageMax, ErrBounds)
	}
	return b, err
}

// say sends one message and waits until it is on its way.
func (sp *stagedPeer) say(ctx context.Context, carrier *lane, msg []byte) error {
	t, err := sp.s.e.NewTransfer(sp.p, Write, Route{Only: carrier.caps.Name})
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	return notifyOnce(ctx, t, msg)
}

// accept takes the answer.
func (sp *stagedPeer) accept(ctx context.Context, w *farWindow) error {
	var body []byte
	select {
	case body = <-w.heard:
	case <-sp.p.conns[w.carrier.index].gone:
		return ErrPeerLost
	case <-ctx.Done():
		return fmt.Errorf("no answer: its engine must be able to connect to this one with %s: %w", w.carrier.caps.Name, driver.ContextError(ctx))
	}
	const fixed = 8 + 2
	if len(body) < fixed {
		return fmt.Errorf("an answer of %d bytes: %w", len(body), ErrCorrupt)
	}
	w.number, w.slots = binary.LittleEndian.Uint64(body), int(binary.LittleEndian.Uint16(body[8:]))
	if w.slots == 0 {
		if err := parseOutcome(body[fixed:]); err != nil {
			return err
		}
		return fmt.Errorf("an answer without slots: %w", ErrCorrupt)
	}
	d, err := sp.p.decode(body[fixed:])
	if err != nil {
		return err
	}
	if len(d.Regions) != 1 || d.Regions[0].Size < uint64(w.slots)*slotBytes || d.Regions[0].Kind != driver.DRAM {
		return fmt.Errorf("a window of %d slots with another memory: %w", w.slots, ErrCorrupt)
	}
	w.remote = sp.p.remoteOf(d, &d.Regions[0])
	_, err = w.remote.key(w.carrier.index)
	return err
}

// close says goodbye. Whoever does not hear it learns of the end with the connection.
func (w *farWindow) close(sp *stagedPeer) {
	s := sp.s
	s.enlist(w.nonce, session{})
	if sp.p.conns[w.carrier.index].isLost() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.e.cfg.AbortGrace)
	defer cancel()
	_ = sp.say(ctx, w.carrier, binary.LittleEndian.AppendUint64(appendHead(nil, sp.far, isBye), w.number))
}

// session is who gets a peer's messages.
type session struct {
	sp *stagedPeer
	w  *farWindow
}

// enlist makes a session known by its nonce, or forgets it.
func (s *stager) enlist(nonce uint64, of session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if of.sp == nil {
		delete(s.sessions, nonce)
		return
	}
	s.sessions[nonce] = of
}

func (s *stager) session(nonce uint64) session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[nonce]
}

// stagedMessage is one that has come.
type stagedMessage struct {
	s    *stager
	lane *lane
	from string
	what byte
	body []byte
}

// takes keeps a message from the program that is for the stager.
func (s *stager) takes(l *lane, m *driver.Message) bool {
	what, body, ours := s.head(m.Data)
	if !ours {
		return false
	}
	switch what {
	case isAuditHello:
		s.receiveAuditHello(&stagedMessage{s, l, m.From, what, body})
		return true
	case isSum:
		s.receiveSum(m.From, body)
		return true
	case isSummed, isAuditReady:
		s.receiveSummed(l, what, body)
		return true
	case isAuditBye:
		s.receiveAuditBye(m.From, body)
		return true
	}
	s.mu.Lock()
	room := s.messages < stagedEvents
	s.messages++
	s.mu.Unlock()
	if room {
		s.push(&stagedMessage{s, l, m.From, what, body})
	}
	return true
}

// happen brings the message to whom it concerns. What makes no sense is dropped: who sent it
// waits in vain.
func (m *stagedMessage) happen() {
	switch m.what {
	case isHello:
		m.s.receiveHello(m)
	case isPut, isGet:
		m.s.receiveHop(m)
	case isWithdrawn:
		m.s.receiveWithdrawal(m)
	case isBye:
		m.s.receiveBye(m)
	case isWindow, isAnswer:
		if len(m.body) < 8 {
			return
		}
		of := m.s.session(binary.LittleEndian.Uint64(m.body))
		switch {
		case of.sp == nil:
		case m.what == isAnswer:
			of.sp.receiveAnswer(m.body[8:])
		default:
			select {
			case of.w.heard <- m.body[8:]:
			default: // a second one
			}
		}
	}
}

// receiveAnswer is the end of a hop that the peer made.
func (sp *stagedPeer) receiveAnswer(body []byte) {
	const fixed = 2 + 4
	if len(body) < fixed {
		return
	}
	i, number := int(binary.LittleEndian.Uint16(body)), binary.LittleEndian.Uint32(body[2:])
	if i >= len(sp.slots) {
		return
	}
	s := sp.slots[i]
	if s.job == nil || s.number != number || s.answered || s.step == atNear {
		return
	}
	s.answered, s.answer = true, parseOutcome(body[fixed:])
	if s.step == atHand {
		s.proceed()
	}
}
