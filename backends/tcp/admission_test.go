// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// dialFrom connects from another address of this machine, which is another host to the owner.
func dialFrom(t *testing.T, address string, b *Backend) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}, Timeout: limit}
	c, err := d.Dial("tcp", b.listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// One host that opens connections and says nothing keeps no other out: it has half of the
// places, and its further connections wait or are closed.
func TestOneHostLeavesPlacesForOthers(t *testing.T) {
	testkit.CheckLeaks(t)
	const places = 4
	b := open(t, Config{Handshakes: places, Handshake: limit})
	for range 128 { // until some of them are closed
		dialFrom(t, "127.0.0.2", b)
	}
	for range 20 {
		p := dial(t, open(t, Config{Conns: 1}), b.Addr())
		require.NoError(t, p.Close())
	}
}

// One host has at most half of the peers, and is told so; another finds room.
func TestOneHostHasHalfOfThePeers(t *testing.T) {
	testkit.CheckLeaks(t)
	b := open(t, Config{PeersMax: 4})
	for range 2 {
		c := dialFrom(t, "127.0.0.2", b)
		_, err := c.Write(helloFrame(b, 2))
		require.NoError(t, err)
		h, _, err := readFrame(c, kindWelcome)
		require.NoError(t, err)
		require.Zero(t, h.status)
	}
	c := dialFrom(t, "127.0.0.2", b)
	_, err := c.Write(helloFrame(b, 2))
	require.NoError(t, err)
	h, _, err := readFrame(c, kindWelcome)
	require.NoError(t, err)
	require.ErrorIs(t, refusalOf(session.Status(h.status)), driver.ErrFull)
	near := open(t, Config{})
	dial(t, near, b.Addr())
	dial(t, near, b.Addr())
	_, err = near.Connect(context.Background(), b.Addr())
	require.ErrorIs(t, err, driver.ErrFull)
}

// TestPeersThatLeaveMessages hold their places until these are received: otherwise one that comes
// again and again would have the program keep any number.
func TestPeersThatLeaveMessages(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, near := open(t, Config{PeersMax: 4}), open(t, Config{})
	leave := func() error {
		p, err := near.Connect(t.Context(), owner.Addr())
		if err != nil {
			return err
		}
		notify(t, p.(*peer), "left behind")
		return p.Close()
	}
	require.NoError(t, leave())
	require.NoError(t, leave())
	require.ErrorIs(t, leave(), driver.ErrFull)
	require.Equal(t, "left behind", string(receive(t, owner).Data))
	require.Eventually(t, func() bool {
		drain(t, owner)
		return leave() == nil
	}, limit, time.Millisecond)
}

// TestConnectionsOfAllPeersAreBounded: a peer that asks for several times as many as we open
// ourselves takes as many places, and none is shut out for it where there is room.
func TestConnectionsOfAllPeersAreBounded(t *testing.T) {
	testkit.CheckLeaks(t)
	b := open(t, Config{PeersMax: 84})
	status := func() error {
		c := rawDial(t, b)
		_, err := c.Write(helloFrame(b, 1+connsMax)) // 22 places
		require.NoError(t, err)
		h, _, err := readFrame(c, kindWelcome)
		require.NoError(t, err)
		return refusalOf(session.Status(h.status))
	}
	require.NoError(t, status())
	require.ErrorIs(t, status(), driver.ErrFull)
	p := dial(t, open(t, Config{}), b.Addr())
	require.NoError(t, p.Close())
	few := open(t, Config{PeersMax: 1})
	require.NoError(t, dial(t, open(t, Config{Conns: connsMax}), few.Addr()).Close())
}
