// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var lastWordChecks = []check{
	{name: "LastMessage", wirings: Processes, needs: []optional{notifier}, run: checkLastMessage},
	{name: "LastMessagePolite", wirings: everywhere, needs: []optional{notifier}, run: checkLastMessagePolite},
	{name: "LastMessageInFlight", wirings: everywhere, needs: []optional{notifier}, run: checkLastMessageInFlight},
	{name: "LastMessageOfBackend", wirings: Pair | Processes, needs: []optional{notifier}, run: checkLastMessageOfBackend},
}

// checkLastMessage kills a sender: after what it had sent comes the news of its
// death, once.
func checkLastMessage(s *stage) {
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	sent := s.sendFromFar(back, 3)
	if err := s.proc.kill(); err != nil {
		s.Fatal(err)
	}
	s.lastWord("of a killed sender", s.home, sent, s.farAddr)
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
		s.lastWord("of a sender that never sent", s.home, nil, s.farAddr)
		sent := s.sendFromFar(other, round)
		s.far.must(request{Do: "close peer", Peer: other})
		s.far.must(request{Do: "close peer", Peer: other})
		s.lastWord("of a sender that closed", s.home, sent, s.farAddr)
	}
	s.noFurtherWord(s.home)
	s.notify([]byte("settle")) // the connection in the other direction does not mind
	if got := s.far.must(request{Do: "receive", Count: 1}).Messages[0]; string(got.Data) != "settle" {
		s.Errorf("after other connections were closed %q (%v) arrived, want a new message", got.Data, got.Err.orNil())
	}
}

// checkLastMessageInFlight closes a peer with messages in flight: those of
// batches that succeeded arrive, in order, and the last word comes after them.
func checkLastMessageInFlight(s *stage) {
	const count = 12
	size := s.fit(512<<10) * count
	l, r := s.local(size), s.far.share(size)
	for range 3 {
		s.imports(r)
		var tags []uint64
		for i := range uint64(count) {
			d := s.pieces(desc(l, i*size/count, r, i*size/count, size/count))
			tags = append(tags, s.submitNotify([]byte{byte(i)}, d[:min(len(d), s.caps.DescsMax)]...))
		}
		if err := s.inTime("close peer", s.peer.Close); err != nil {
			s.Errorf("close peer: %v", err)
		}
		var sent [][]byte
		for i, tag := range tags {
			switch err := s.await(tag); {
			case err == nil:
				sent = append(sent, []byte{byte(i)})
			case !errors.Is(err, driver.ErrClosed):
				s.Errorf("a message in flight at Peer.Close: %v, want nil or %v", err, driver.ErrClosed)
			}
		}
		s.lastWord("of a peer that closed with work in flight", s.far, sent, s.near.b.Addr())
		s.connect()
	}
	s.noFurtherWord(s.far)
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
		s.lastWord("of a backend that closed", s.home, nil, s.farAddr)
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

// messages takes what a side has received, which must be these.
func (s *stage) messages(what string, on *side, want [][]byte) {
	s.Helper()
	got := on.must(request{Do: "receive", Count: len(want)}).Messages
	for i, m := range got {
		if m.Err != nil || !bytes.Equal(m.Data, want[i]) {
			s.Errorf("message %d of %d %s: %x (%v), want %x", i, len(want), what, m.Data, m.Err.orNil(), want[i])
		}
	}
}

// lastWord takes the last messages of one connection and the news of its end.
func (s *stage) lastWord(what string, on *side, sent [][]byte, from []byte) {
	s.Helper()
	s.messages(what, on, sent)
	last := on.must(request{Do: "receive", Count: 1}).Messages[0]
	if !errors.Is(last.Err.orNil(), driver.ErrPeerLost) || last.Data != nil || !bytes.Equal(last.From, from) {
		s.Errorf("last message %s: %+v, want %v from the sender's Addr and no data", what, last, driver.ErrPeerLost)
	}
}

// noFurtherWord listens for a while.
func (s *stage) noFurtherWord(on *side) {
	s.Helper()
	more, _ := on.try(request{Do: "receive", Count: 1, Limit: 40 * time.Millisecond})
	if len(more.Messages) > 0 {
		s.Errorf("after the last message came another: %+v", more.Messages[0])
	}
}
