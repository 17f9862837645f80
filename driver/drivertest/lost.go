// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// checkPeerKilled kills the far side with work in flight in both directions: all tags complete,
// Lost is closed, the connection that it opened has a last message, which wakes a sleeper, and
// later batches fail. So do answers, for which it had no room left.
func checkPeerKilled(t *test) {
	const count, size = 16, 16 << 20
	l, r := t.local(size), t.remote(size)
	conn := uint64(0)
	if t.can(driver.CanNotify) {
		b := messageAlone([]byte("before the end"))
		t.far.run(t.back(), b)
		conn = t.hears(t.near, b.Notify)
		t.fillAnswers(conn)
	}
	tags, _ := t.burst(driver.Write, l, r, count, false)
	t.peer.Cancel(tags[0]) // must not keep it from completing
	killed := make(chan error, 1)
	go func() { killed <- t.proc.kill() }()
	if conn != 0 {
		got, err := t.host.receive(1, t.h.limit, true)
		if err != nil || got[0].Conn != conn || got[0].Err == nil {
			testkit.FatalBroken(t, "asleep for the last message of a killed peer: %v, %v", got, err)
		}
		t.wants(t.host.answer(conn, nil), "answer a killed peer, which had no room",
			driver.ErrPeerLost)
	}
	t.ok(<-killed, "kill")
	for _, tag := range tags {
		t.wants(t.await(tag), "a tag in flight when the peer was killed", nil, driver.ErrPeerLost,
			driver.ErrAborted)
	}
	select {
	case <-t.peer.Lost():
	case <-time.After(t.h.limit):
		t.Fatalf("Lost of a killed peer is not closed\n%s", stacks())
	}
	t.wants(t.outcomeOf(t.whole(driver.Write, l, r)), "a write to a killed peer",
		driver.ErrPeerLost)
	t.hearsNoMore(t.near)
	t.ok(t.inTime("close a killed peer", t.peer.Close), "close a killed peer")
	if t.tries("a killed process", t.addr, time.Second) == nil {
		t.Error("connect to a killed process: no error")
	}
}

// checkPeerFrozen closes the peer, and then the backend, while the far side stands still with work
// in flight: both come back, and nothing lands when it goes on.
func checkPeerFrozen(t *test) {
	const count, size = 8, 8 << 20
	l, r := t.local(size), t.remote(size)
	t.ok(t.proc.freeze(), "freeze")
	tags, batches := t.burst(driver.Write, l, r, count, false)
	t.ok(t.inTime("close a frozen peer", t.peer.Close), "close a frozen peer")
	failed := t.over(tags, batches, nil, driver.ErrClosed, driver.ErrAborted, driver.ErrPeerLost,
		driver.ErrUnproven, driver.ErrTimeout)
	_ = t.tries("a frozen process", t.addr, 100*time.Millisecond) // in time is all
	t.ok(t.inTime("close the backend of a frozen peer", t.host.b.Close), "close")
	t.ok(t.proc.thaw(), "thaw")
	r.refill() // a request, which is obeyed only now
	r.staysSame("when the peer went on after a Close that failed %d of %d writes", failed, count)
}

// checkPeerSilent freezes a peer for which nothing waits, for longer than the backend's grace: it
// is not lost.
func checkPeerSilent(t *test) {
	l, r := t.local(1<<16), t.remote(1<<16)
	t.move(t.whole(driver.Write, l, r))
	t.ok(t.proc.freeze(), "freeze")
	select {
	case <-t.peer.Lost():
		t.Error("a peer for which nothing waited was given up since it was silent")
	case <-time.After(2 * t.h.Grace):
	}
	t.ok(t.proc.thaw(), "thaw")
	t.move(t.whole(driver.Read, l, r))
	t.compare("after a silence")
}

// checkConnect connects to nonsense, to a backend that is gone, with a context that ends, and
// twice: one connection does not mind the end of another.
func checkConnect(t *test) {
	addrs := map[string][]byte{"nothing": nil, "zeros": make([]byte, 64),
		"nonsense":   pattern(make([]byte, 64), 1),
		"much of it": pattern(make([]byte, driver.AddrMax), 2)}
	for i := 0; i < len(t.addr); i += 1 + len(t.addr)/20 {
		addrs[fmt.Sprintf("%d of %d bytes", i, len(t.addr))] = t.addr[:i:i]
	}
	if !t.h.SelfOnly {
		gone := t.open("gone")
		addrs["a backend that is gone"] = gone.b.Addr()
		t.ok(gone.b.Close(), "close")
	}
	for what, addr := range addrs {
		if t.tries(what, addr, time.Second) == nil {
			t.Errorf("connect to %s: no error", what)
		}
	}
	const n = 1 << 20
	l, r := t.local(n), t.remote(n)
	first, lost := t.peer, t.peer.Lost()
	ctx, cancel := context.WithCancel(context.Background())
	p, err := t.host.b.Connect(ctx, t.addr)
	t.ok(err, "connect")
	cancel() // which ends nothing that has returned
	_ = t.inTime("connect with a context that is over", func() error {
		other, err := t.host.b.Connect(ctx, t.addr)
		if err == nil {
			_ = other.Close()
		} else {
			t.wants(err, "connect with a context that is over", context.Canceled)
		}
		return nil
	})
	t.peer = p
	t.imports(r)
	tag := t.submit(t.whole(driver.Write, l, r))
	if lost != nil && closed(lost) {
		t.Error("Lost is closed although the peer is there")
	}
	t.ok(t.inTime("close peer", first.Close), "close peer")
	t.wants(t.await(tag), "a write by one connection when another was closed", nil)
	t.apply(t.whole(driver.Write, l, r))
	t.move(batch(driver.Read, desc(l, 0, r, 77, 64)))
	t.ok(r.revoke(), "revoke")
	r.expect("after another connection was closed")
	l.expect("after another connection was closed")
	t.ok(t.inTime("close peer", p.Close), "close peer")
}
