// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// sleepUntil sleeps on the backend's descriptor as the engine does until the condition holds.
func (t *test) sleepUntil(what string, condition func() bool) {
	for !condition() {
		n, err := t.host.poll()
		t.ok(err, "%s: poll", what)
		if n > 0 || condition() {
			continue
		}
		if err := t.host.sleep(t.h.limit / 2); errors.Is(err, errLate) {
			if n, _ := t.host.poll(); n > 0 || condition() {
				t.broken("%s: a wake-up was lost: it was there, and nothing woke the "+
					"sleeper for %v", what, t.h.limit/2)
			}
			t.Fatalf("%s: nothing came within %v\n%s", what, t.h.limit/2, stacks())
		} else if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func (t *test) isDone(tag uint64) func() bool {
	return func() bool {
		done, err := t.host.outcome(tag)
		t.ok(err, "a batch that is slept for")
		return done
	}
}

// expectSleep makes the near side sleep while nothing comes, for a moment. A backend that never
// lets its user sleep is found.
func (t *test) expectSleep() {
	t.until("sleep of an idle backend", func() bool {
		err := t.host.sleep(5 * time.Millisecond)
		_, _ = t.host.poll()
		_, _ = t.host.receiveOnce(make([]driver.Message, 1))
		return errors.Is(err, errLate)
	})
}

// checkWakeCompletion sleeps for completions of all lengths, with help of those that leave the rest
// to others, and of those who help where somebody else sleeps.
func checkWakeCompletion(t *test) {
	const n = 1 << 20
	l, r := t.local(n), t.remote(n)
	stop := make(chan struct{})
	close(stop)
	t.expectSleep()
	for i := range 300 {
		b := t.batchOf(bothOps[i/5%2], l, 0, r, 0, []uint64{1, 4096, 70000, 300000, n}[i%5])
		var tags []uint64
		for range 1 + i%3 {
			tags = append(tags, t.submit(b).tag)
		}
		switch i % 4 {
		case 1:
			t.peer.Help(tags[0], stop)
		case 2:
			t.peer.Help(tags[0], nil)
		case 3: // a helper that says it did nothing does not poll: what it ended must wake others
			ready, err := t.host.b.Arm()
			t.ok(err, "arm")
			polled, _ := t.host.poll()
			helped := t.peer.Help(tags[0], nil)
			if done, _ := t.host.outcome(tags[0]); !ready && polled == 0 && !helped && !done {
				if err := t.host.sleepArmed(t.h.limit / 2); err != nil {
					t.broken("beside a helper that did nothing: %v", err)
				}
			}
		}
		for _, tag := range tags {
			t.sleepUntil("completion", t.isDone(tag))
		}
		t.apply(b)
		if i%60 == 59 {
			t.compare("after sleeps")
			l.refill()
		}
	}
}

// checkWakeMessage sleeps for the first message of peers that connect meanwhile, and for more. A
// wake-up that was asked for stays asked for, also where Arm said that there is something.
func checkWakeMessage(t *test) {
	for round := range 8 {
		t.expectSleep()
		ready, err := t.host.b.Arm()
		t.ok(err, "arm")
		if ready {
			t.Fatalf("Arm of an idle backend, which has slept, is ready")
		}
		back := t.connectBack()
		send := func() { t.far.run(back, messageAlone([]byte{byte(round)})) }
		send()
		if t.wiring == Self {
			_, _ = t.host.poll()
		}
		if err := t.host.sleepArmed(t.h.limit / 2); err != nil {
			t.broken("peer %d connected and sent a message while this side slept: %v", round, err)
		}
		t.expectMessages(t.near, []byte{byte(round)})
		send()
		t.until("Arm, with a message there", func() bool {
			ready, err := t.host.b.Arm()
			t.ok(err, "arm")
			return ready
		})
		t.expectMessages(t.near, []byte{byte(round)})
		_ = t.host.sleepArmed(0) // the message came while we armed, and used the wake-up
		_, err = t.host.b.Arm()
		t.ok(err, "arm")
		send()
		t.ok(t.host.sleepArmed(t.h.limit/2), "message behind others, and the backend was armed")
		t.expectMessages(t.near, []byte{byte(round)})
		t.far.closePeer(back)
		got, err := t.host.receive(1, t.h.limit, true)
		if err != nil || got[0].Err == nil {
			t.Fatalf("asleep for the last message: %v, %v", got, err)
		}
	}
}

// checkPingPong has both sides sleep for each other.
func checkPingPong(t *test) {
	t.far.must(request{Do: "echo"})
	for i := range uint64(300) {
		msg := binary.LittleEndian.AppendUint64(nil, i)
		tag := t.submit(messageAlone(msg)).tag
		var got []message
		t.sleepUntil("an echo", func() bool {
			var msgs [1]driver.Message
			if n, _ := t.host.receiveOnce(msgs[:]); n == 1 {
				got = append(got, t.host.received(msgs[0]))
			}
			return len(got) > 0
		})
		if string(got[0].Data) != string(msg) || got[0].Conn != t.peer.Conn() {
			t.broken("echo %d is %x by connection %d", i, head(got[0].Data), got[0].Conn)
		}
		t.sleepUntil("the completion of a message", t.isDone(tag))
	}
	t.ok(t.peer.Close(), "close peer") // which ends the other side's echo
	t.far.must(request{Do: "end"})
}
