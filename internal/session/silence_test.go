// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestSilenceWatch counts from when something waits, or was acknowledged last, as far as a Look has
// seen.
func TestSilenceWatch(t *testing.T) {
	var w SilenceWatch
	now, out := int64(time.Hour), Outbound{Unacked: true}
	look := func(want time.Duration, paused bool) {
		t.Helper()
		require.Equal(t, want, w.Look(out, now, paused))
		now += int64(time.Second)
		out.SinceAck += time.Second
	}
	look(0, false)
	look(time.Second, false)
	look(2*time.Second, false)
	out.SinceAck = time.Millisecond
	look(0, false)
	look(time.Second, false)
	look(0, true) // this process stood still
	look(0, false)
	look(time.Second, false)
	out.Unacked = false
	look(0, false)
	out.Unacked = true
	look(0, false)
}

// TestOutboundJoin: one connection that is answered is enough, and what waits on any waits.
func TestOutboundJoin(t *testing.T) {
	a := Outbound{Unacked: true, SinceAck: time.Hour}
	b := Outbound{Pending: true, SinceAck: time.Second}
	require.Equal(t, a, NoOutbound.Join(a))
	require.Equal(t, Outbound{Unacked: true, Pending: true, SinceAck: time.Second}, a.Join(b))
	require.ErrorIs(t, HostLost(time.Second), driver.ErrPeerLost)
}

// TestQueryOutbound has a process that reads nothing: its host acknowledges until its socket is
// full, and then what cannot go out is left.
func TestQueryOutbound(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	tcp := conn.(*net.TCPConn)
	raw, err := tcp.SyscallConn()
	require.NoError(t, err)
	KeepAlive(tcp, 0)
	_, err = tcp.Write([]byte("unread"))
	require.NoError(t, err)
	pending := func() bool { return QueryOutbound(raw).Pending }
	require.Eventually(t, func() bool { return !pending() }, 10*time.Second, time.Millisecond)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for err == nil {
			_, err = tcp.Write(make([]byte, 1<<20))
		}
	}()
	require.Eventually(t, pending, 10*time.Second, time.Millisecond)
	require.Less(t, QueryOutbound(raw).SinceAck, time.Minute)
	out, known := OutboundByHost()[netip.MustParseAddr("127.0.0.1")]
	require.True(t, known && out.Pending)
	require.NoError(t, tcp.Close())
	<-ended
	require.Equal(t, Outbound{}, QueryOutbound(raw))
}
