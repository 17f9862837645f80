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
	require.ErrorIs(t, refusal(session.Status(h.status)), driver.ErrFull)
	near := open(t, Config{})
	dial(t, near, b.Addr())
	dial(t, near, b.Addr())
	_, err = near.Connect(context.Background(), b.Addr())
	require.ErrorIs(t, err, driver.ErrFull)
}

// TestConnectComesAgainToACrowd: an owner at whose door as many wait of a host as may hangs up on
// the next at once. That is no refusal.
func TestConnectComesAgainToACrowd(t *testing.T) {
	testkit.CheckLeaks(t)
	b, near := open(t, Config{Handshakes: 1}), open(t, Config{})
	var crowd []net.Conn
	for range 128 { // of which one has the place, and 64 wait
		crowd = append(crowd, rawDial(t, b))
	}
	connected := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		p, err := near.Connect(ctx, b.Addr())
		if err == nil {
			err = p.Close()
		}
		connected <- err
	}()
	time.Sleep(50 * time.Millisecond) // so that it is hung up on, most often
	for _, c := range crowd {
		require.NoError(t, c.Close())
	}
	require.NoError(t, <-connected)
}
