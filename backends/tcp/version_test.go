// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// Each side that meets another version names both: from the address, from the hello, and from
// the answer to ours.
func TestVersionsAreNamed(t *testing.T) {
	testkit.CheckLeaks(t)
	b := open(t, Config{})
	old := append([]byte("tcp1"), b.encodedAddress[4:]...)
	_, err := b.Connect(context.Background(), old)
	require.ErrorIs(t, err, driver.ErrVersion)
	require.ErrorContains(t, err, "version 1, ours is 5")

	c := rawDial(t, b)
	hello := append(helloFrame(b, 4), "more than this version reads"...)
	hello[4] = 1
	_, err = c.Write(hello)
	require.NoError(t, err)
	_ = c.SetReadDeadline(time.Now().Add(limit))
	said, err := io.ReadAll(c)
	require.NoError(t, err, "the end of a connection to another version")
	require.Len(t, said, headBytes)
	require.Equal(t, byte(wireVersion), said[4])

	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _, _ = readFrame(c, kindHello)
		answer := (&header{kind: kindWelcome}).append(nil)
		answer[4] = 9
		_, _ = c.Write(answer)
	}()
	a := address{owner: session.NewOwner(), places: []string{l.Addr().String()}}
	newer, err := a.encode()
	require.NoError(t, err)
	_, err = b.Connect(context.Background(), newer)
	require.ErrorIs(t, err, driver.ErrVersion)
	require.ErrorContains(t, err, "version 9, ours is 5")
	require.False(t, errors.Is(err, driver.ErrPeerLost))
}

// A hello whose other connections never come gives its place back after Handshake, whatever
// it says meanwhile.
func TestHelloAloneHoldsNoPlace(t *testing.T) {
	testkit.CheckLeaks(t)
	clock := testkit.NewClock()
	b, near := openBy(t, clock, Config{PeersMax: 1}), openBy(t, clock, Config{})
	c := rawDial(t, b)
	_, err := c.Write(append(helloFrame(b, 4), frame(header{kind: kindReady}, nil)...))
	require.NoError(t, err)
	welcome, _, err := readFrame(c, kindWelcome)
	require.NoError(t, err)
	require.Zero(t, welcome.status)
	clock.Advance(b.cfg.Handshake - 1)
	_, err = near.Connect(t.Context(), b.Addr())
	require.ErrorIs(t, err, driver.ErrFull)
	clock.Advance(1)
	hungUp(t, "a hello without joins", c, headBytes)

	var p driver.Peer
	require.Eventually(t, func() bool { // the place comes free a little later
		drain(t, b)
		p, err = near.Connect(t.Context(), b.Addr())
		return err == nil
	}, limit, time.Millisecond)
	notify(t, p.(*peer), "here") // so that the owner knows that all connections are there
	clock.Advance(2 * b.cfg.Handshake)
	notify(t, p.(*peer), "still here")
}
