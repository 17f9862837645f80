// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var answerChecks = []check{
	{name: "AnswerOrder", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkAnswerOrder},
	{name: "AnswerSizes", wirings: everywhere, needs: driver.CanNotify, run: checkAnswerSizes},
	{name: "AnswerEach", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkAnswerEach},
	{name: "AnswerBackPressure", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkAnswerBackPressure},
	{name: "AnswerPingPong", wirings: Pair | Processes, needs: driver.CanNotify,
		meets: true, run: checkAnswerPingPong},
	{name: "AnswerUnknown", wirings: everywhere, needs: driver.CanNotify, run: checkAnswerUnknown},
	{name: "AnswerEnded", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkAnswerEnded},
	{name: "AnswerKilled", wirings: Processes, needs: driver.CanNotify,
		meets: true, run: checkAnswerKilled},
}

// answer sends one answer, and sleeps while there is no room, as the engine does.
func (h *host) answer(conn uint64, msg []byte, limit time.Duration) error {
	for end := time.Now().Add(limit); ; {
		err := h.b.Answer(conn, msg)
		if !errors.Is(err, driver.ErrFull) {
			return err
		}
		if err := h.park(time.Until(end)); err != nil {
			return fmt.Errorf("wait for room for an answer: %w", err)
		}
		if _, err := h.ledger.poll(); err != nil {
			return err
		}
	}
}

// numbered makes answer i of n bytes.
func numbered(msg []byte, i int) {
	paint(msg, uint64(i))
	binary.LittleEndian.PutUint64(msg, uint64(i))
}

// answers is the chore of a side that answers one connection q.Count times. The bytes are
// overwritten as soon as Answer has returned.
func (h *host) answers(q request, stop <-chan struct{}) (o outcome) {
	msg := make([]byte, max(8, q.Len))
	for ; o.count < q.Count && !stopped(stop); o.count++ {
		numbered(msg, int(q.Off)+o.count)
		err := h.answer(q.Conn, msg, h.h.Limit)
		clear(msg)
		if err != nil {
			o.faults = []string{fmt.Sprintf("answer %d: %v", int(q.Off)+o.count, err)}
			return o
		}
	}
	return o
}

// fillAnswers answers until there is no room, at most q.Count times.
func (h *host) fillAnswers(q request) (count int, err error) {
	msg := make([]byte, max(8, q.Len))
	for ; count < q.Count; count++ {
		numbered(msg, count)
		if err := h.b.Answer(q.Conn, msg); errors.Is(err, driver.ErrFull) {
			return count, nil
		} else if err != nil {
			return count, err
		}
	}
	return count, nil
}

// connOf has a peer send a message, and returns the number that the far side has for the
// connection.
func (s *stage) connOf(peer int) uint64 {
	s.Helper()
	s.ok(s.near.send(peer, []byte("here")), "send a message")
	return s.messages("to be answered", s.far, [][]byte{[]byte("here")})
}

// answered takes count answers, numbered from 0 and of n bytes, by one connection.
func (s *stage) answered(conn uint64, count int, n uint64) {
	s.Helper()
	want := make([]byte, n)
	for i := range count {
		got, err := s.near.receive(1, s.h.Limit)
		if err != nil {
			s.hang(fmt.Sprintf("answer %d of %d: %v", i, count, err))
		}
		numbered(want, i)
		if m := got[0]; m.Err != nil || !bytes.Equal(m.Data, want) {
			s.Fatalf("answer %d of %d reads %x (%v), or other bytes behind", i, count, head(m.Data),
				m.Err.orNil())
		}
		if got[0].Conn != conn {
			s.Fatalf("answer %d came by connection %d, want the Peer's %d", i, got[0].Conn, conn)
		}
	}
}

// calm ends the far side's chore, which must have found nothing.
func (s *stage) calm() {
	s.Helper()
	for _, fault := range s.far.must(request{Do: "ended"}).Faults {
		s.Errorf("far side: %s", fault)
	}
}

func checkAnswerOrder(s *stage) {
	const count = 600
	conn := s.connOf(s.peerID)
	n := uint64(min(64, s.caps.MessageMax))
	s.far.must(request{Do: "answers", Conn: conn, Count: count, Len: n})
	s.answered(s.peer.Conn(), count, n)
	s.calm()
	s.noFurtherWord(s.home)
}

func checkAnswerSizes(s *stage) {
	conn, most := s.connOf(s.peerID), s.caps.MessageMax
	for _, n := range []int{0, 1, 7, 8, 9, min(most, 1000), most - 1, most} {
		msg := painted(uint64(n), s.seed())
		s.far.must(request{Do: "answer", Conn: conn, Data: msg})
		got, err := s.near.receive(1, s.h.Limit)
		if err != nil {
			s.hang(fmt.Sprintf("an answer of %d bytes: %v", n, err))
		}
		if got[0].Err != nil || !bytes.Equal(got[0].Data, msg) || got[0].Conn != s.peer.Conn() {
			s.Errorf("an answer of %d bytes arrived as %d others by connection %d (%v)",
				n, len(got[0].Data), got[0].Conn, got[0].Err.orNil())
		}
	}
	_, err := s.far.try(request{Do: "answer", Conn: conn, Data: make([]byte, most+1)})
	if err == nil || errors.Is(err, driver.ErrFull) {
		s.Errorf("an answer longer than MessageMax: %v, want an error that is final", err)
	}
	s.noFurtherWord(s.home)
}

// checkAnswerEach answers two connections of one backend, and closes one of them.
func checkAnswerEach(s *stage) {
	other, err := s.near.connect(s.farAddr, s.h.Limit)
	s.ok(err, "connect again")
	peers := []int{s.peerID, other}
	conns := []uint64{s.connOf(peers[0]), s.connOf(peers[1])}
	for i := range 8 {
		at := i % 2
		if i == 5 {
			if err := s.inTime("close peer", s.peer.Close); err != nil {
				s.Errorf("close peer: %v", err)
			}
			s.lastWord("of the connection that closed", s.far, nil)
		}
		if i >= 5 {
			at = 1
		}
		s.far.must(request{Do: "answers", Conn: conns[at], Count: 3, Len: 8})
		s.answered(s.near.peer(peers[at]).Conn(), 3, 8)
		s.calm()
	}
}

// checkAnswerBackPressure answers a program that does not receive, until the backend says
// that it is full. The side that answers sleeps then, and room must wake it.
func checkAnswerBackPressure(s *stage) {
	const enough = 64 << 20 // bytes: a backend that takes more has no back-pressure to speak of
	const more = 100
	conn := s.connOf(s.peerID)
	n := uint64(min(4096, s.caps.MessageMax))
	most := enough / int(n)
	full := s.far.must(request{Do: "fill answers", Conn: conn, Count: most, Len: n}).Count
	if full == most {
		s.Errorf("%d MiB of answers were taken that are not received: no back-pressure", enough>>20)
	}
	s.far.must(request{Do: "answers", Conn: conn, Off: uint64(full), Count: more, Len: n})
	// Else it may find room without a wake-up.
	s.far.must(request{Do: "await parked", Limit: s.h.Limit})
	s.answered(s.peer.Conn(), full+more, n)
	s.calm()
	s.noFurtherWord(s.home)
}

// checkAnswerPingPong has both sides sleep for each other over one connection.
func checkAnswerPingPong(s *stage) {
	s.far.must(request{Do: "echo", Answer: true, Parked: true})
	for i := range uint64(300) {
		tag := s.submitNotify(binary.LittleEndian.AppendUint64(nil, i))
		got := 0
		s.sleepUntil(fmt.Sprintf("answer %d", i), func() bool {
			msgs, _ := s.near.receive(1-got, 0)
			got += len(msgs)
			return got == 1
		})
		s.sleepUntil("the completion of a message", s.isDone(tag))
	}
	for _, fault := range s.far.must(request{Do: "calm"}).Faults {
		s.Errorf("far side: %s", fault)
	}
}

// checkAnswerUnknown answers connections that never were, and those that this side opened.
func checkAnswerUnknown(s *stage) {
	conn := s.connOf(s.peerID)
	for _, c := range []uint64{0, conn + 1000, 1 << 32, 1 << 63, math.MaxUint64} {
		_, err := s.far.try(request{Do: "answer", Conn: c, Data: []byte("x")})
		if !errors.Is(err, driver.ErrPeerLost) {
			s.Errorf("answer connection %d, which never was: %v, want %v", c, err,
				driver.ErrPeerLost)
		}
	}
	if err := s.near.b.Answer(s.peer.Conn(), []byte("x")); !errors.Is(err, driver.ErrPeerLost) {
		s.Errorf("answer a connection of our own: %v, want %v", err, driver.ErrPeerLost)
	}
	s.noFurtherWord(s.home)
}

// checkAnswerEnded answers a connection that has closed.
func checkAnswerEnded(s *stage) {
	for range 3 {
		conn := s.connOf(s.peerID)
		s.far.must(request{Do: "answer", Conn: conn, Data: []byte("before")})
		s.messages("by an answer", s.home, [][]byte{[]byte("before")})
		if err := s.inTime("close peer", s.peer.Close); err != nil {
			s.Errorf("close peer: %v", err)
		}
		if last := s.lastWord("of a connection that was answered", s.far, nil); last != conn {
			s.Errorf("connection %d closed, and %d has a last word", conn, last)
		}
		_, err := s.far.try(request{Do: "answer", Conn: conn, Data: []byte("late")})
		if !errors.Is(err, driver.ErrPeerLost) {
			s.Errorf("answer a connection that has closed: %v, want %v", err, driver.ErrPeerLost)
		}
		s.connect()
	}
	s.noFurtherWord(s.home)
}

// checkAnswerKilled answers a process that was killed: a sender that waits for room learns
// of it, too.
func checkAnswerKilled(s *stage) {
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	conn := s.messages("before the end", s.home, s.sendFromFar(back, 1))
	s.ok(s.proc.freeze())
	msg := make([]byte, min(4096, s.caps.MessageMax))
	for range 64 << 20 / len(msg) {
		if err := s.near.b.Answer(conn, msg); err != nil {
			if !errors.Is(err, driver.ErrFull) {
				s.Errorf("answer a frozen process: %v, want nil or %v", err, driver.ErrFull)
			}
			break
		}
	}
	s.ok(s.proc.kill())
	s.lastWord("of a killed process", s.home, nil)
	if err := s.near.answer(conn, msg, s.h.Limit); !errors.Is(err, driver.ErrPeerLost) {
		s.Errorf("answer a killed process: %v, want %v", err, driver.ErrPeerLost)
	}
}
