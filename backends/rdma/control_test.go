// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// patience bounds what must happen but not when.
const patience = 30 * time.Second

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not in %v", what, patience)
		}
	}
}

// channels are the two ends of a control connection.
func channels(t *testing.T, by clock.Clock) (a, b *channel) {
	t.Helper()
	testkit.CheckLeaks(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	there, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	here, err := l.Accept()
	require.NoError(t, err)
	cfg := &Config{Failure: patience, clock: by}
	cfg.EnsureDefaults()
	a, b = newChannel(here, cfg), newChannel(there, cfg)
	t.Cleanup(func() {
		for _, c := range []*channel{a, b} {
			c.close(nil)
			c.wait()
		}
	})
	return a, b
}

func TestChannel(t *testing.T) {
	a, b := channels(t, clock.Host())
	a.start()
	b.start()
	go func() {
		for i := range 300 {
			b.send(&broken{pair: uint8(i)})
			if i%30 == 0 {
				b.send(ping)
			}
		}
		b.closeWhenRead(patience)
	}()
	for i := range 300 {
		m, err := a.receive()
		if got, ok := m.(*broken); err != nil || !ok || got.pair != uint8(i) {
			t.Fatalf("message %d is %+v, %v", i, m, err)
		}
	}
	if m, err := a.receive(); !errors.Is(err, io.EOF) {
		t.Errorf("after the last message %+v, %v", m, err)
	}
	if _, err := a.receive(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	a.send(ping) // ignored
}

// TestQuiet has a program that reads nothing: its host acknowledges what asks for a sign of life,
// and questions do not pile up.
func TestQuiet(t *testing.T) {
	c := testkit.NewClock()
	a, _ := channels(t, c)
	a.start()
	q := hostWatch{ch: a}
	for range 100 {
		eventually(t, "an acknowledgement", func() bool { return !a.outbound().Pending })
		require.Zero(t, q.silentFor(time.Unix(0, c.Now())))
		c.Advance(patience)
	}
	a.cfg.kernel = func(syscall.RawConn) session.Outbound {
		return session.Outbound{Unacked: true, Pending: true, SinceAck: time.Hour}
	}
	a.mu.Lock()
	a.out = nil
	a.mu.Unlock()
	for i := range time.Duration(3) {
		require.Equal(t, i*patience, q.silentFor(time.Unix(0, c.Now())))
		c.Advance(patience)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	require.Empty(t, a.out)
}

// TestUnread has a peer that reads nothing: what waits for it is bounded.
func TestUnread(t *testing.T) {
	a, _ := channels(t, clock.Host())
	a.start()
	big := &answer{data: make([]byte, messageMax)}
	eventually(t, "the end", func() bool {
		a.send(big)
		select {
		case <-a.over:
			return true
		default:
			return false
		}
	})
	if _, err := a.receive(); !errors.Is(err, errUnread) {
		t.Errorf("closed for %v", err)
	}
}

// TestFarewellReads has a side that closes say so to one that still sends: the deadline by which it
// stopped to receive does not keep it from reading the rest.
func TestFarewellReads(t *testing.T) {
	a, b := channels(t, testkit.NewClock())
	a.start()
	_ = a.conn.SetReadDeadline(aLongTimeAgo) // as inbound.quit does
	a.send(quit)
	a.closeWhenRead(patience)
	m, err := b.receive()
	require.NoError(t, err)
	require.Equal(t, quit, m)
	select {
	case <-a.over:
		t.Error("it has closed though the other side may still send")
	case <-time.After(50 * time.Millisecond):
	}
	b.close(nil)
	a.wait()
}
