// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// unreceivedMax is how many bytes of messages a backend takes at most that nobody receives.
const unreceivedMax = 64 << 20

// received is what a request in another goroutine has brought.
type received struct {
	msgs []message
	err  error
}

// receiving has a side receive beside this goroutine.
func (t *test) receiving(on *side, count int, asleep bool) <-chan received {
	c := make(chan received, 1)
	go func() {
		r, err := on.try(request{Do: "receive", Count: count, Asleep: asleep})
		c <- received{r.Messages, err}
	}()
	return c
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
		var tags []uint64
		var sums []uint32
		for i := range uint64(slots) {
			d := t.cut(desc(l, i*slot, r, i*slot, lens[(i+round)%uint64(len(lens))]))
			n := uint64(0)
			for _, piece := range d {
				n += piece.Len
			}
			b := batch(driver.Write, d...)
			if t.can(driver.CanPattern) && i%5 == 4 {
				n = slot
				b = &driver.Batch{Op: driver.Write, Pattern: &driver.Pattern{Run: slot / 50,
					Count:    50,
					LocalKey: l.key, RemoteKey: r.as, Local: driver.Side{Base: i * slot,
						Stride: slot / 50}, Remote: driver.Side{Base: i * slot, Stride: slot / 50}}}
			}
			v := voucher{uint64(r.id), r.off + i*slot, n}
			tags = append(tags, t.submit(withMessage(b, v.encode())))
			t.apply(b)
			sums = append(sums, sum(r.model()[i*slot:][:n]))
		}
		for _, tag := range tags {
			t.ok(t.await(tag), "a write with a message")
		}
		all := <-got
		t.ok(all.err, "receive")
		for i, m := range all.msgs {
			if m.Err != nil || m.Sum != sums[i] {
				testkit.FatalBroken(t,
					"message %d of round %d (%q, %v) came before its bytes", i, round,
					m.Data, m.Err.orNil())
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
	var tags []uint64
	for i := range count {
		n := []int{8, 0, 1, 7, 9, min(most, 1000), most - 1, most}[i%8]
		if i > 80 {
			n = min(8, most)
		}
		msg := pattern(make([]byte, n), uint64(i))
		b := messageAlone(msg)
		switch i % 4 {
		case 0:
			b = withMessage(t.whole(driver.Write, l, r), msg)
		case 1:
			b = withMessage(batch(driver.Write, desc(l, 0, r, 0, 64)), msg)
		}
		sent, tags = append(sent, msg), append(tags, t.submit(b))
		t.apply(b)
	}
	for _, tag := range tags {
		t.ok(t.await(tag), "a write with a message")
	}
	all := <-got
	t.ok(all.err, "receive")
	t.heard(all.msgs, sent...)
	t.refused("a message longer than MessageMax", nil, messageAlone(make([]byte, most+1)))
	t.compare("after all messages")
}

// checkMessageBackPressure sends to a program that does not receive until the backend is full, and
// sleeps then: room wakes it.
func checkMessageBackPressure(t *test) {
	msg := make([]byte, min(4096, t.caps.MessageMax))
	sent := 0
	send := func() bool {
		_, err := t.host.once(t.peer, messageAlone(pattern(msg, uint64(sent))))
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
			if sent > unreceivedMax/len(msg) {
				t.Fatalf("%d MiB of messages were taken that are not received", unreceivedMax>>20)
			}
		}
	}
	heard := 0
	hear := func(all received) {
		t.ok(all.err, "receive")
		for _, m := range all.msgs {
			if want := pattern(make([]byte, len(msg)),
				uint64(heard)); string(m.Data) != string(want) {
				testkit.FatalBroken(t, "message %d of %d is another, or damaged (%v)", heard, sent,
					m.Err.orNil())
			}
			heard++
		}
	}
	for range 3 {
		fill()
		ready := sent - heard
		got := make(chan received, 1)
		for asked := false; ; {
			if send() {
				if asked {
					break
				}
				fill() // room that was told of late: nothing is to wake us yet
				ready = sent - heard
				continue
			}
			if _, err := t.host.poll(); err != nil {
				t.Fatalf("poll: %v", err)
			}
			if !asked { // the next message that the far side takes has to wake us
				asked = true
				go func() { got <- <-t.receiving(t.far, ready, false) }()
			}
			if err := t.host.sleep(t.h.limit); err != nil {
				testkit.FatalBroken(t,
					"wait for room: %v; a wake-up was lost: room is there: %v", err,
					send())
			}
		}
		hear(<-got)
	}
	for heard < sent {
		hear(<-t.receiving(t.far, min(100, sent-heard), false))
		_, _ = t.host.poll()
	}
	t.tell([]byte("behind them all"))
}

// checkMessageOfFailed has batches fail since their memory is revoked: their messages do not
// arrive.
func checkMessageOfFailed(t *test) {
	const n = 100 << 10
	l, r := t.local(n), t.remote(n)
	t.ok(r.revoke(), "revoke")
	for _, size := range []uint64{64, n} {
		b := withMessage(batch(driver.Write, t.cut(desc(l, 0, r, 0, size))...),
			[]byte("not to come"))
		t.wants(t.outcomeOf(b), "a write with a message to memory that was revoked",
			driver.ErrRevoked)
	}
	delete(t.remotes, r.as)
	t.tell([]byte("the next to come"))
	t.hearsNoMore(t.far)
	r.expect("after batches that failed")
}

// checkLastMessage ends connections politely, with work in flight, and by the end of their backend:
// each has one last message, behind those of all batches that succeeded.
func checkLastMessage(t *test) {
	const count, size = 8, 4 << 20
	l, r := t.local(size), t.far.shared(size)
	var numbers []uint64
	for round := range 4 {
		t.imports(r)
		conn := t.tell([]byte("first"))
		if slices.Contains(numbers, conn) {
			t.Errorf("connection %d is another's number", conn)
		}
		numbers = append(numbers, conn)
		tags, _ := t.burst(driver.Write, l, r, count, true)
		if round == 3 {
			t.ok(t.inTime("close backend", t.host.b.Close), "close backend")
		} else {
			t.ok(t.inTime("close peer", t.peer.Close), "close peer")
		}
		var owed []byte
		for i, tag := range tags {
			if err := t.await(tag); err == nil {
				owed = append(owed, byte(i))
			} else {
				t.wants(err, "a message in flight at Close", driver.ErrClosed)
			}
		}
		if round == 3 && t.wiring == Self {
			return // nobody is left to receive
		}
		last := -1
		for {
			m := t.far.must(request{Do: "receive", Count: 1}).Messages[0]
			if m.Conn != conn || m.Err == nil && int(m.Data[0]) <= last {
				testkit.FatalBroken(t, "message %x (%v) by connection %d behind %d by %d", m.Data,
					m.Err.orNil(), m.Conn, last, conn)
			}
			if m.Err != nil {
				break
			}
			if last = int(m.Data[0]); len(owed) > 0 && owed[0] == byte(last) {
				owed = owed[1:]
			}
		}
		if len(owed) > 0 {
			testkit.FatalBroken(t,
				"the last message came, and those of %d have not, whose batches "+
					"succeeded", owed)
		}
		t.hearsNoMore(t.far)
		if round < 3 {
			delete(t.remotes, r.as)
			t.connect()
		}
	}
}

// fillAnswers answers until there is no room, and returns how many answers went out, and memory for
// one.
func (t *test) fillAnswers(conn uint64) (sent int, msg []byte) {
	t.Helper()
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
	first, firstPeer := t.tell([]byte("answer me")), t.peer
	t.connect()
	second := t.tell([]byte("and me"))
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
		if got := t.hears(t.near, msg); got != p.Conn() {
			testkit.FatalBroken(t, "an answer came by connection %d, want %d", got, p.Conn())
		}
	}
	_, err := t.far.try(request{Do: "answer", Conn: first, Data: make([]byte, most+1)})
	if err == nil || errors.Is(err, driver.ErrFull) {
		t.Errorf("an answer longer than MessageMax: %v, want an error that is final", err)
	}
	for _, conn := range []uint64{0, max(first, second) + 1000, 1 << 63, math.MaxUint64} {
		_, err = t.far.try(request{Do: "answer", Conn: conn, Data: []byte("x")})
		t.wants(err, fmt.Sprintf("answer connection %d, which never was", conn), driver.ErrPeerLost)
	}
	t.wants(t.host.b.Answer(t.peer.Conn(), nil), "answer a connection of our own",
		driver.ErrPeerLost)

	// The near side answers the far one, which does not receive, until it is full, and then sleeps.
	back := t.back()
	b := messageAlone([]byte("a lot, please"))
	t.far.run(back, b)
	conn := t.hears(t.near, b.Notify)
	sent, msg := t.fillAnswers(conn)
	got := t.receiving(t.far, sent+10, false)
	for i := range 10 {
		t.ok(t.host.answer(conn, pattern(msg, uint64(sent+i))), "answer where there was no room")
	}
	all := <-got
	t.ok(all.err, "receive answers")
	for i, m := range all.msgs {
		if m.Err != nil || string(m.Data) != string(pattern(msg, uint64(i))) {
			testkit.FatalBroken(t,
				"answer %d of %d is another, or damaged (%v)", i, sent, m.Err.orNil())
		}
	}
	t.ok(t.inTime("close peer", firstPeer.Close), "close peer")
	if last := t.hearsLast(t.far); last != first {
		testkit.FatalBroken(t, "connection %d closed, and %d has a last message", first, last)
	}
	_, err = t.far.try(request{Do: "answer", Conn: first, Data: []byte("late")})
	t.wants(err, "answer a connection that has closed", driver.ErrPeerLost)
	t.hearsNoMore(t.near)
}
