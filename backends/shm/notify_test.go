// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestShowBesideArm sends while the receiver falls asleep.
func TestShowBesideArm(t *testing.T) {
	page := testkit.MemoryOutsideGo(t, int(connectionBytes(1<<12)))
	out, in := sender{ring: ringOf(page, 0)}, receiver{ring: ringOf(page, 0)}
	msgs := make([]driver.Message, 2)
	reserve := func() entry {
		e, err := out.reserve([]byte("a message"))
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	next := reserve()
	testkit.OneSideSees(t, in.arm, func() bool { return out.publish(next, true) }, func() {
		out.armed.Store(0)
		if n, _ := in.receive(1, msgs); n != 1 {
			t.Fatalf("%d messages, want 1", n)
		}
		next = reserve()
	})
}

// TestReserveBesideReceive asks for room while the receiver makes some.
func TestReserveBesideReceive(t *testing.T) {
	page := testkit.MemoryOutsideGo(t, int(connectionBytes(1<<12)))
	out, in := sender{ring: ringOf(page, 0)}, receiver{ring: ringOf(page, 0)}
	msg := make([]byte, 1<<11)
	msgs := make([]driver.Message, 2)
	send := func() bool {
		e, err := out.reserve(msg)
		if err == nil {
			out.publish(e, true)
		}
		return err == nil
	}
	for send() {
	}
	in.arm()
	took := func() (wakes bool) {
		_, wakes = in.receive(1, msgs)
		return wakes
	}
	testkit.OneSideSees(t, send, took, func() {
		for send() {
		}
		out.waiting.Store(0)
	})
}

// TestFullRingOfASilentOwner: an owner takes bytes for ever, but once notifications fill its ring
// it is lost if it gives no sign of life within Failure. An owner that lives, and whose program
// does not take them, keeps its peers waiting for room.
func TestFullRingOfASilentOwner(t *testing.T) {
	clock := testkit.NewClock()
	owner, b := open(t, Config{}), openBy(t, clock, Config{RingBytes: ringBytesMin})
	far, _ := share(t, owner, drivertest.HostMemory, 4096)
	m, _ := share(t, b, drivertest.HostMemory, 4096)
	p := dial(t, b, owner.Addr())
	key := importOf(t, p, far)
	failure := b.cfg.Failure
	notify := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail, Notify: make([]byte, 20<<10)}
	var err error
	for err == nil {
		if err = p.Submit(1, notify); err == nil {
			require.NoError(t, await(t, b, 1))
		}
	}
	require.ErrorIs(t, err, driver.ErrFull)
	for range 12 { // it answers each time
		soon(t, "an answer", func() bool { return !p.asks() })
		clock.Advance(failure / 4)
		require.ErrorIs(t, p.Submit(1, notify), driver.ErrFull)
	}
	soon(t, "an answer", func() bool { return !p.asks() })

	p.sendMu.Lock() // no request reaches the owner any more
	defer p.sendMu.Unlock()
	clock.Advance(failure / 4)
	require.ErrorIs(t, p.Submit(1, notify), driver.ErrFull)
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 4096, LocalKey: m.Key(), RemoteKey: key}}}))
	require.NoError(t, await(t, b, 2))
	clock.Advance(failure - 1)
	time.Sleep(20 * time.Millisecond)
	require.ErrorIs(t, p.Submit(1, notify), driver.ErrFull)
	clock.Advance(1)
	<-p.Lost()
	require.ErrorIs(t, p.Submit(1, notify), driver.ErrPeerLost)
}

// asks reports whether a question is under way.
func (p *peer) asks() bool {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	return p.ping.timer != nil
}
