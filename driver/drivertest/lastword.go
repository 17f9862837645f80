// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var lastWordChecks = []check{
	{name: "LastMessage", wirings: Processes, needs: driver.CanNotify, run: checkLastMessage},
	{name: "LastMessagePolite", wirings: everywhere, needs: driver.CanNotify,
		run: checkLastMessagePolite},
	{name: "LastMessageInFlight", wirings: everywhere, needs: driver.CanNotify,
		run: checkLastMessageInFlight},
	{name: "LastMessageEach", wirings: everywhere, needs: driver.CanNotify,
		run: checkLastMessageEach},
	{name: "LastMessageOfBackend", wirings: Pair | Processes, needs: driver.CanNotify,
		run: checkLastMessageOfBackend},
}

// checkLastMessage kills a sender: after what it had sent comes the news of its
// death, once.
func checkLastMessage(s *stage) {
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	sent := s.sendFromFar(back, 3)
	s.ok(s.proc.kill())
	s.lastWord("of a killed sender", s.home, sent)
	s.noFurtherWord(s.home)
}

// checkLastMessagePolite has senders close: each connection has one last message
// of its own, also one that never carried another, and one beside it goes on.
func checkLastMessagePolite(s *stage) {
	for round := range 4 {
		var ids [2]int
		for i := range ids {
			ids[i] = s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
		}
		silent, other := ids[round%2], ids[1-round%2]
		s.far.must(request{Do: "close peer", Peer: silent})
		s.lastWord("of a sender that never sent", s.home, nil)
		sent := s.sendFromFar(other, round)
		s.far.must(request{Do: "close peer", Peer: other})
		s.far.must(request{Do: "close peer", Peer: other})
		s.lastWord("of a sender that closed", s.home, sent)
	}
	s.noFurtherWord(s.home)
	s.notify([]byte("settle")) // the connection in the other direction does not mind
	if got := s.far.must(request{Do: "receive", Count: 1}).Messages[0]; string(
		got.Data) != "settle" {
		s.Errorf("after other connections were closed %q (%v) arrived, want a new message",
			got.Data, got.Err.orNil())
	}
}

// checkLastMessageEach has one backend open two connections to another: each has a number
// of its own, and the end of one is nothing to the other.
func checkLastMessageEach(s *stage) {
	var ids [2]int
	var conns [2]uint64
	for i := range ids {
		ids[i] = s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
		conns[i] = s.messages("of one connection of two", s.home, s.sendFromFar(ids[i], 2))
	}
	if conns[0] == conns[1] {
		s.Errorf("two connections have the number %d", conns[0])
	}
	for i := range 6 {
		closing, staying := i%2, 1-i%2
		s.far.must(request{Do: "close peer", Peer: ids[closing]})
		if conn := s.lastWord("of one connection of two", s.home, nil); conn != conns[closing] {
			s.Errorf("connection %d was closed, and %d has a last word", conns[closing], conn)
		}
		sent := s.sendFromFar(ids[staying], 2)
		if conn := s.messages("beside a connection that closed", s.home,
			sent); conn != conns[staying] {
			s.Errorf("connection %d has the number %d once another has closed", conns[staying],
				conn)
		}
		ids[closing] = s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
		conns[closing] = s.messages("of a new connection", s.home, s.sendFromFar(ids[closing], 1))
	}
	s.noFurtherWord(s.home)
}

// checkLastMessageInFlight closes a peer with messages in flight: those of
// batches that succeeded arrive, in order, and the last word comes after them.
func checkLastMessageInFlight(s *stage) {
	const count = 12
	size := uint64(512<<10) * count
	l, r := s.local(size), s.far.share(size)
	for range 3 {
		s.imports(r)
		var tags []uint64
		for i := range uint64(count) {
			d := s.pieces(desc(l, i*size/count, r, i*size/count, size/count))
			tags = append(tags, s.submitNotify([]byte{byte(i)},
				d[:min(len(d), s.caps.DescsMax)]...))
		}
		if err := s.inTime("close peer", s.peer.Close); err != nil {
			s.Errorf("close peer: %v", err)
		}
		var sent []byte
		for i, tag := range tags {
			switch err := s.await(tag); {
			case err == nil:
				sent = append(sent, byte(i))
			case !errors.Is(err, driver.ErrClosed):
				s.Errorf("a message in flight at Peer.Close: %v, want nil or %v", err,
					driver.ErrClosed)
			}
		}
		s.wordsInFlight(sent)
		s.connect()
	}
	s.noFurtherWord(s.far)
}

// wordsInFlight takes messages on the far side until the last word: those sent, and maybe some of
// batches that ended otherwise, in order.
func (s *stage) wordsInFlight(sent []byte) {
	s.Helper()
	const what = "a peer that closed with work in flight"
	var got []byte
	for conn := uint64(0); ; {
		m := s.far.must(request{Do: "receive", Count: 1}).Messages[0]
		if conn == 0 {
			conn = m.Conn
		}
		if m.Conn != conn || len(m.Data) != 1 && m.Err == nil {
			s.Errorf("message of %s: %+v, want one by connection %d", what, m, conn)
		}
		if err := m.Err.orNil(); err != nil {
			if !errors.Is(err, driver.ErrPeerLost) || m.Data != nil {
				s.Errorf("last message of %s: %+v, want %v and no data", what, m,
					driver.ErrPeerLost)
			}
			break
		}
		got = append(got, m.Data...)
	}
	for i, word := range got {
		if i > 0 && word <= got[i-1] {
			s.Errorf("messages of %s: % x, want them in order", what, got)
		}
	}
	for _, word := range sent {
		if !bytes.Contains(got, []byte{word}) {
			s.Errorf("messages of %s: % x, want % x, whose batches succeeded", what, got, sent)
		}
	}
}

// checkLastMessageOfBackend closes the backend of a sender, which has several
// connections.
func checkLastMessageOfBackend(s *stage) {
	first := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	s.far.must(request{Do: "connect", Data: s.near.b.Addr()})
	sent := s.sendFromFar(first, 3)
	s.messages("before the sender's backend closed", s.home, sent)
	s.far.must(request{Do: "close backend"})
	for range 2 {
		s.lastWord("of a backend that closed", s.home, nil)
	}
	s.noFurtherWord(s.home)
}

// sendFromFar has the far side send count messages; they are on their way when
// it returns them.
func (s *stage) sendFromFar(peer, count int) (sent [][]byte) {
	s.Helper()
	for i := range count {
		msg := []byte{byte(i)}
		send := request{Do: "submit", Peer: peer, Op: driver.Write, Notify: true, Data: msg}
		s.far.must(request{Do: "await", Tag: s.far.must(send).Tag})
		sent = append(sent, msg)
	}
	return sent
}

// messages takes what a side has received, which must be these, of one connection, and
// returns its number.
func (s *stage) messages(what string, on *side, want [][]byte) (conn uint64) {
	s.Helper()
	got := on.must(request{Do: "receive", Count: len(want)}).Messages
	for i, m := range got {
		if m.Err != nil || !bytes.Equal(m.Data, want[i]) {
			s.Errorf("message %d of %d %s: %x (%v), want %x", i, len(want), what, m.Data,
				m.Err.orNil(), want[i])
		}
		if conn = got[0].Conn; m.Conn != conn {
			s.Errorf("message %d of %d %s came by connection %d, the first by %d", i, len(want),
				what, m.Conn, conn)
		}
	}
	return conn
}

// lastWord takes the last messages of one connection and the news of its end, and returns
// its number.
func (s *stage) lastWord(what string, on *side, sent [][]byte) (conn uint64) {
	s.Helper()
	conn = s.messages(what, on, sent)
	last := on.must(request{Do: "receive", Count: 1}).Messages[0]
	if !errors.Is(last.Err.orNil(), driver.ErrPeerLost) || last.Data != nil || len(sent) > 0 &&
		last.Conn != conn {
		s.Errorf("last message %s: %+v, want %v by connection %d and no data", what, last,
			driver.ErrPeerLost, conn)
	}
	return last.Conn
}

// noFurtherWord listens for a while.
func (s *stage) noFurtherWord(on *side) {
	s.Helper()
	more, _ := on.try(request{Do: "receive", Count: 1, Limit: 40 * time.Millisecond})
	if len(more.Messages) > 0 {
		s.Errorf("after the last message came another: %+v", more.Messages[0])
	}
}
