// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// checkPeerKilled kills the far side with work in flight in both directions: all tags complete,
// Lost is closed, the connection that it opened has a last message, which wakes a sleeper, and
// later batches fail. So do answers, for which it had no room left.
func checkPeerKilled(t *test) {
	const count, size = 16, 16 << 20
	l, target, r, source := t.local(size), t.local(size), t.remote(size), t.remote(size)
	conn := uint64(0)
	if t.can(driver.CanNotify) {
		conn = t.sendToNear(t.connectBack(), []byte("before the end"))
		t.fillAnswers(conn)
	}
	writes := t.submitPieces(driver.Write, l, r, count, false)
	reads := t.submitPieces(driver.Read, target, source, count, false)
	t.peer.Cancel(writes[0].tag) // must not keep it from completing
	killed := make(chan error, 1)
	go func() { killed <- t.proc.kill() }()
	if conn != 0 {
		got, err := t.host.receive(1, t.h.limit, true)
		if err != nil || got[0].Conn != conn || got[0].Err == nil {
			t.broken("asleep for the last message of a killed peer: %v, %v", got, err)
		}
		t.wantErr(t.host.answer(conn, nil), "answer a killed peer, which had no room",
			driver.ErrPeerLost)
	}
	t.ok(<-killed, "kill")
	for _, p := range writes {
		t.wantErr(t.await(p.tag), "a write in flight when the peer was killed", nil,
			driver.ErrPeerLost, driver.ErrAborted)
	}
	_, refill := t.awaitAll("a read in flight when the peer was killed", reads, nil,
		driver.ErrPeerLost, driver.ErrAborted)
	refill()
	t.until("Lost of a killed peer", func() bool { return closed(t.peer.Lost()) })
	t.wantErr(t.outcomeOf(t.batchOfAll(driver.Write, l, r)), "a write to a killed peer",
		driver.ErrPeerLost)
	t.expectNoMessages(t.near)
	target.expect("behind reads from a peer that was killed")
	t.closeInTime("a killed peer", t.peer.Close)
	if t.tryConnect("a killed process", t.addr, time.Second) == nil {
		t.Errorf("connect to a killed process: no error")
	}
}

// checkPeerFrozen closes the peer, and then the backend, while the far side stands still with work
// in flight, of which the kernel or a device has had time to take the bytes.
func checkPeerFrozen(t *test) {
	closePeer := func() { t.closeInTime("a frozen peer", t.peer.Close) }
	t.closeFrozen(50*time.Millisecond, closePeer, func() {
		_ = t.tryConnect("a frozen process", t.addr, 100*time.Millisecond) // in time is all
		t.closeInTime("the backend of a frozen peer", t.host.b.Close)
		t.reopenNear()
	})
}

// checkPeerThawed closes the peer alone, and goes on with the same backend when the far side does;
// and then the backend, at once and with all its peers.
func checkPeerThawed(t *test) {
	closePeer := func() { t.closeInTime("a frozen peer", t.peer.Close) }
	t.closeFrozen(50*time.Millisecond, closePeer, func() {})
	closeBackend := func() { t.closeInTime("a backend with a frozen peer", t.host.b.Close) }
	t.closeFrozen(0, closeBackend, t.reopenNear)
}

// closeFrozen closes what closing does while the far side stands still with work in flight. What
// memory holds as it returns, it still holds when the far side has gone on, has read what there was
// of the connection to its end, and has served another.
func (t *test) closeFrozen(pause time.Duration, closing, beside func()) {
	const count, size = 8, 8 << 20
	l, target, r, source := t.local(size), t.local(size), t.remote(size), t.remote(size)
	farHears := func(what func(m message) bool) {
		for !what(t.far.receive()) {
		}
	}
	conn := uint64(0)
	if t.can(driver.CanNotify) {
		b := messageAlone([]byte("before the freeze"))
		t.move(b)
		farHears(func(m message) bool {
			conn = m.Conn
			return string(m.Data) == string(b.Notify)
		})
	}
	t.ok(t.proc.freeze(), "freeze")
	writes := t.submitPieces(driver.Write, l, r, count, false)
	reads := t.submitPieces(driver.Read, target, source, count, false)
	time.Sleep(pause)
	closing()
	refill := t.awaitClosed(append(writes, reads...), nil, driver.ErrClosed, driver.ErrAborted,
		driver.ErrPeerLost, driver.ErrUnproven, driver.ErrTimeout)
	beside()
	t.ok(t.proc.thaw(), "thaw")
	if conn != 0 {
		farHears(func(m message) bool { return m.Conn == conn && m.Err != nil })
	}
	t.connect()
	mine, other := t.local(4096), t.remote(4096)
	for range 8 {
		t.move(t.batchOfAll(driver.Write, mine, other))
		t.move(t.batchOfAll(driver.Read, mine, other))
	}
	refill()
	r.expectUnchanged("when the peer went on after Close")
	target.expectUnchanged("when the peer went on after Close")
}

// checkPeerSilent freezes a peer for which nothing waits, for longer than the backend's grace: it
// is not lost.
func checkPeerSilent(t *test) {
	l, r := t.local(1<<16), t.remote(1<<16)
	t.move(t.batchOfAll(driver.Write, l, r))
	t.ok(t.proc.freeze(), "freeze")
	select {
	case <-t.peer.Lost():
		t.Errorf("a peer for which nothing waited was given up since it was silent")
	case <-time.After(2 * t.h.Grace):
	}
	t.ok(t.proc.thaw(), "thaw")
	t.move(t.batchOfAll(driver.Read, l, r))
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
		if t.tryConnect(what, addr, time.Second) == nil {
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
	t.returns("connect with a context that is over", func() {
		other, err := t.host.b.Connect(ctx, t.addr)
		if err == nil {
			_ = other.Close()
		} else {
			t.wantErr(err, "connect with a context that is over", context.Canceled)
		}
	})
	t.peer = p
	t.importMemory(r)
	under := t.submit(t.batchOfAll(driver.Write, l, r))
	if lost != nil && closed(lost) {
		t.Errorf("Lost is closed although the peer is there")
	}
	t.closeInTime("peer", first.Close)
	t.awaitSuccess("by one connection when another was closed", under)
	t.move(batch(driver.Read, desc(l, 0, r, 77, 64)))
	t.ok(r.revoke(), "revoke")
	r.expect("after another connection was closed")
	l.expect("after another connection was closed")
	t.closeInTime("peer", p.Close)
}
