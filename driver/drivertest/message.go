// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// unreceivedMax is how many bytes of messages a backend takes at most that nobody receives.
const unreceivedMax = 64 << 20

// receiving lets a side receive in another goroutine. The function that it returns waits for all.
func (t *test) receiving(on *side, count int, asleep bool) (all func() []message) {
	c := make(chan reply, 1)
	go func() { c <- on.to.do(request{Do: "receive", Count: count, Asleep: asleep}) }()
	return func() []message {
		r := <-c
		t.ok(r.Err.orNil(), "receive")
		return r.Messages
	}
}

// numbered returns messages of n bytes, each of which tells its number.
func numbered(from, count, n int) (list [][]byte) {
	for i := range count {
		list = append(list, pattern(make([]byte, n), uint64(from+i)))
	}
	return list
}

// checkMessageBehindItsBytes sends vouchers for the bytes of their batches, which the receiver sums
// up as each message comes.
func checkMessageBehindItsBytes(t *test) {
	const slots, slot = 32, 100 << 10
	l, r := t.local(slots*slot), t.remote(slots*slot)
	lens := []uint64{1, 64, 656, 4097, 30000, 70000, 100 << 10}
	for round := range uint64(16) {
		l.refill()
		got := t.receiving(t.far, slots, false)
		var list []posted
		var sums []uint32
		for i := range uint64(slots) {
			b := t.batchOf(driver.Write, l, i*slot, r, i*slot, lens[(i+round)%uint64(len(lens))])
			if t.can(driver.CanPattern) && i%5 == 4 {
				side := driver.Side{Base: i * slot, Stride: slot / 50}
				b = patternBatch(driver.Write, l, r, driver.Pattern{Run: slot / 50, Count: 50,
					Local: side, Remote: side})
			}
			v := voucher{uint64(r.id), r.off + i*slot, slot}
			list = append(list, t.submit(withMessage(b, v.encode())))
			t.apply(b)
			sums = append(sums, sum(r.model()[i*slot:][:slot]))
		}
		t.awaitSuccess("with a message", list...)
		for i, m := range got() {
			if m.Err != nil || m.Sum != sums[i] {
				t.broken("message %d of round %d (%q, %v) came before its bytes", i, round, m.Data,
					m.Err)
			}
		}
	}
	r.expect("after all messages")
}

// checkMessageOrder numbers messages of all sizes that follow long, short and no data. One that is
// too long is refused.
func checkMessageOrder(t *test) {
	const count, long = 600, 200 << 10
	l, r := t.local(long), t.remote(long)
	most := t.caps.MessageMax
	got := t.receiving(t.far, count, true)
	var sent [][]byte
	var list []posted
	for i := range count {
		n := []int{8, 0, 1, 7, 9, min(most, 1000), most - 1, most}[i%8]
		if i > 80 {
			n = min(8, most)
		}
		b := batch(driver.Write)
		switch i % 4 {
		case 0:
			b = t.batchOfAll(driver.Write, l, r)
		case 1:
			b = batch(driver.Write, desc(l, 0, r, 0, 64))
		}
		sent = append(sent, pattern(make([]byte, n), uint64(i)))
		list = append(list, t.submit(withMessage(b, sent[i])))
	}
	t.awaitSuccess("with a message", list...)
	t.checkMessages(got(), sent...)
	t.refused("a message longer than MessageMax", nil, messageAlone(make([]byte, most+1)))
	t.compare("after all messages")
}

// checkMessageBackPressure sends to a program that does not receive until the backend is full, and
// sleeps then: room wakes it.
func checkMessageBackPressure(t *test) {
	size := min(4096, t.caps.MessageMax)
	sent, heard := 0, 0
	send := func() bool {
		_, err := t.host.submitOnce(t.peer, messageAlone(numbered(sent, 1, size)[0]))
		if err == nil {
			sent++
		} else if !errors.Is(err, driver.ErrFull) {
			t.Fatalf("submit: %v", err)
		}
		return err == nil
	}
	// Room for completions is made by polling. What is left is room at the receiver.
	fill := func() {
		for refusals := 0; refusals < 20; {
			if send() {
				refusals = 0
			} else if n, _ := t.host.poll(); n == 0 {
				refusals++
				time.Sleep(100 * time.Microsecond)
			}
			if sent > unreceivedMax/size {
				t.Fatalf("%d MiB of messages were taken that are not received", unreceivedMax>>20)
			}
		}
	}
	hear := func(got func() []message) {
		msgs := got()
		t.checkMessages(msgs, numbered(heard, len(msgs), size)...)
		heard += len(msgs)
	}
	for range 3 {
		fill()
		for got := (func() []message)(nil); ; {
			if send() {
				if got != nil {
					hear(got)
					break
				}
				fill() // room that was told of late: nothing is to wake us yet
				continue
			}
			_, err := t.host.poll()
			t.ok(err, "poll")
			if got == nil { // the next message that the far side takes has to wake us
				got = t.receiving(t.far, sent-heard, false)
			}
			if err := t.host.sleep(t.h.limit); err != nil {
				t.broken("wait for room: %v; a wake-up was lost: room is there: %v", err, send())
			}
		}
	}
	for heard < sent {
		hear(t.receiving(t.far, min(100, sent-heard), false))
		_, _ = t.host.poll()
	}
	t.sendToFar([]byte("behind them all"))
}

// checkMessageOfFailed has batches fail since their memory is revoked: their messages do not
// arrive.
func checkMessageOfFailed(t *test) {
	const n = 100 << 10
	l, r := t.local(n), t.remote(n)
	t.ok(r.revoke(), "revoke")
	for _, size := range []uint64{64, n} {
		b := withMessage(t.batchOf(driver.Write, l, 0, r, 0, size),
			[]byte("not to come"))
		t.wantErr(t.outcomeOf(b), "a message behind memory that was revoked", driver.ErrRevoked)
	}
	delete(t.remotes, r.importKey)
	t.sendToFar([]byte("the next to come"))
	t.expectNoMessages(t.far)
	r.expect("after batches that failed")
}

// checkLastMessage ends connections politely, with work in flight, and by the end of their backend:
// each has one last message, behind those of all batches that succeeded.
func checkLastMessage(t *test) {
	const count, size = 8, 4 << 20
	l, r := t.local(size), t.far.shared(size)
	var numbers []uint64
	for round := range 4 {
		t.importMemory(r)
		conn := t.sendToFar([]byte("first"))
		if slices.Contains(numbers, conn) {
			t.Errorf("connection %d is another's number", conn)
		}
		numbers = append(numbers, conn)
		list := t.submitPieces(driver.Write, l, r, count, true)
		if round == 3 {
			t.closeInTime("backend", t.host.b.Close)
		} else {
			t.closeInTime("peer", t.peer.Close)
		}
		owed, _ := t.awaitAll("a message in flight at Close", list, nil, driver.ErrClosed)
		if round == 3 && t.wiring == Self {
			return // nobody is left to receive
		}
		for last := -1; ; {
			m := t.far.receive()
			if m.Conn != conn || m.Err == nil && int(m.Data[0]) <= last {
				t.broken("message %x (%v) by connection %d behind %d by %d", m.Data, m.Err, m.Conn,
					last, conn)
			}
			if m.Err != nil {
				break
			}
			if last = int(m.Data[0]); len(owed) > 0 && owed[0][0] == m.Data[0] {
				owed = owed[1:]
			}
		}
		if len(owed) > 0 {
			t.broken("the last message came, and those of %d batches have not", owed)
		}
		t.expectNoMessages(t.far)
		if round < 3 {
			delete(t.remotes, r.importKey)
			t.connect()
		}
	}
}

// fillAnswers answers until there is no room, and returns how many answers went out, and memory for
// one.
func (t *test) fillAnswers(conn uint64) (sent int, msg []byte) {
	msg = make([]byte, min(4096, t.caps.MessageMax))
	for ; sent <= unreceivedMax/len(msg); sent++ {
		err := t.host.b.Answer(conn, pattern(msg, uint64(sent)))
		if errors.Is(err, driver.ErrFull) {
			return sent, msg
		}
		t.ok(err, "answer")
	}
	t.Fatalf("%d MiB of answers were taken that are not received", unreceivedMax>>20)
	return 0, nil
}

// checkAnswers answers two connections: in order, of all sizes, by the one that they are for, up to
// where there is no room, and no longer once it has ended.
func checkAnswers(t *test) {
	most := t.caps.MessageMax
	first, firstPeer := t.sendToFar([]byte("answer me")), t.peer
	t.connect()
	second := t.sendToFar([]byte("and me"))
	if first == second || firstPeer.Conn() == t.peer.Conn() {
		t.Fatalf("two connections have the numbers %d and %d, here %d and %d", first, second,
			firstPeer.Conn(), t.peer.Conn())
	}
	for i, n := range []int{0, 1, 8, min(1000, most), most - 1, most} {
		conn, p := first, firstPeer
		if i%2 == 1 {
			conn, p = second, t.peer
		}
		msg := pattern(make([]byte, n), uint64(i))
		t.far.must(request{Do: "answer", Conn: conn, Data: msg})
		if got := t.expectMessages(t.near, msg); got != p.Conn() {
			t.broken("an answer came by connection %d, want %d", got, p.Conn())
		}
	}
	_, err := t.far.try(request{Do: "answer", Conn: first, Data: make([]byte, most+1)})
	if err == nil || errors.Is(err, driver.ErrFull) {
		t.Errorf("an answer longer than MessageMax: %v, want an error that is final", err)
	}
	for _, conn := range []uint64{0, max(first, second) + 1000, 1 << 63, math.MaxUint64} {
		_, err = t.far.try(request{Do: "answer", Conn: conn, Data: []byte("x")})
		t.wantErr(err, fmt.Sprintf("answer connection %d, which never was", conn),
			driver.ErrPeerLost)
	}
	t.wantErr(t.host.b.Answer(t.peer.Conn(), nil), "answer a connection of our own",
		driver.ErrPeerLost)

	// The near side answers the far one, which does not receive, until it is full, and then sleeps.
	conn := t.sendToNear(t.connectBack(), []byte("a lot, please"))
	sent, msg := t.fillAnswers(conn)
	got := t.receiving(t.far, sent+10, false)
	for i := range 10 {
		t.ok(t.host.answer(conn, pattern(msg, uint64(sent+i))), "answer where there was no room")
	}
	t.checkMessages(got(), numbered(0, sent+10, len(msg))...)
	t.closeInTime("peer", firstPeer.Close)
	if last := t.expectLastMessage(t.far); last != first {
		t.broken("connection %d closed, and %d has a last message", first, last)
	}
	_, err = t.far.try(request{Do: "answer", Conn: first, Data: []byte("late")})
	t.wantErr(err, "answer a connection that has closed", driver.ErrPeerLost)
	t.expectNoMessages(t.near)
}
