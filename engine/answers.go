// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// answersMax is how many answers of one connection wait for room. A peer that asks keeps
// to fewer requests.
const answersMax = 256

// answerQueue is what waits to be sent back by one connection.
type answerQueue struct {
	mu      sync.Mutex // guards what follows
	waiting [][]byte
}

// answering lists the senders of a lane whose answers wait for room.
type answering struct {
	mu   sync.Mutex
	list []*sender    // guarded by mu
	any  atomic.Int64 // len(list)
	turn []*sender    // touched by the progress goroutine alone
}

// answer sends b, which may be changed then, back by the sender's connection, at once or when
// there is room. It never blocks. It drops answers for a peer that does not read them.
func (s *sender) answer(b []byte) {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	if len(s.queue.waiting) == 0 {
		if err := s.send(b); !errors.Is(err, driver.ErrFull) {
			return // sent, or the connection has ended
		}
	}
	if len(s.queue.waiting) == answersMax {
		return
	}
	s.queue.waiting = append(s.queue.waiting, slices.Clone(b))
	if len(s.queue.waiting) == 1 {
		s.lane.answering.add(s)
		s.lane.stir() // room may have come before the sender was listed
	}
}

// send hands an answer to the backend. One that is longer than the peer takes is replaced by
// its outcome, which names the cause: the peer must not wait for what never comes.
func (s *sender) send(b []byte) error {
	err := s.lane.b.Answer(s.conn, b)
	if !errors.Is(err, driver.ErrBounds) {
		return err
	}
	head := answerHead(b)
	if short := exchange.AppendOutcome(bytes.Clone(head), err); len(short) < len(b) {
		if err = s.lane.b.Answer(s.conn, short); !errors.Is(err, driver.ErrBounds) {
			return err
		}
	}
	return s.lane.b.Answer(s.conn, append(bytes.Clone(head), exchange.OutOfBounds))
}

// answerHead is the part of an answer before its outcome.
func answerHead(b []byte) []byte {
	switch b[0] {
	case exchange.IsHopEnd:
		return b[:1+exchange.HopName]
	}
	return []byte{exchange.IsWindow, 0, 0}
}

func (a *answering) add(s *sender) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, s)
	a.any.Store(int64(len(a.list)))
}

func (a *answering) remove(s *sender) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = slices.DeleteFunc(a.list, func(other *sender) bool { return other == s })
	a.any.Store(int64(len(a.list)))
}

// sendAnswers sends what waits, as far as there is room. The progress goroutine calls it.
func (l *lane) sendAnswers() {
	a := &l.answering
	if a.any.Load() == 0 {
		return
	}
	a.mu.Lock()
	a.turn = append(a.turn[:0], a.list...)
	a.mu.Unlock()
	for i, s := range a.turn {
		s.sendWaiting()
		a.turn[i] = nil
	}
}

func (s *sender) sendWaiting() {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	for len(s.queue.waiting) > 0 {
		err := s.send(s.queue.waiting[0])
		if errors.Is(err, driver.ErrFull) {
			return
		}
		s.queue.waiting = s.queue.waiting[1:]
		if err != nil {
			s.queue.waiting = nil // the connection has ended
		}
	}
	s.lane.answering.remove(s)
}

// answered deals with an answer of the peer, by a connection of ours.
func (c *conn) answered(data []byte) {
	switch data[0] {
	case exchange.IsWindow, exchange.IsHopEnd:
		c.peer.staged().p.(*stagedPeer).answered(c, data[0], data[1:])
	}
}
