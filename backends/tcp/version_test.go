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
	"github.com/sluicehq/sluice/internal/keys"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// Each side that meets another version names both: from the address, from the hello, and from
// the answer to ours.
func TestVersionsAreNamed(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{})
	old := append([]byte("tcp1"), b.addr[4:]...)
	_, err := b.Connect(context.Background(), old)
	require.ErrorIs(t, err, driver.ErrVersion)
	require.ErrorContains(t, err, "version 1, ours is 3")

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
	a := address{owner: keys.NewOwner(), places: []string{l.Addr().String()}}
	newer, err := a.encode()
	require.NoError(t, err)
	_, err = b.Connect(context.Background(), newer)
	require.ErrorIs(t, err, driver.ErrVersion)
	require.ErrorContains(t, err, "version 9, ours is 3")
	require.False(t, errors.Is(err, driver.ErrPeerLost))
}

// A hello whose other connections never come gives its place back after Handshake, whatever
// it says meanwhile.
func TestHelloAloneHoldsNoPlace(t *testing.T) {
	leak.Check(t)
	b := open(t, Config{PeersMax: 1, Handshake: 200 * time.Millisecond})
	near := open(t, Config{})
	var c net.Conn
	var begin int64
	for welcome := (header{}); ; { // again where we were too slow for Handshake
		c, begin = rawDial(t, b), clock()
		_, err := c.Write(append(helloFrame(b, 4), frame(header{kind: kindReady}, nil)...))
		if err == nil {
			welcome, _, err = readFrame(c, kindWelcome)
		}
		if err == nil && welcome.status == 0 {
			break
		}
	}
	p, err := near.Connect(context.Background(), b.Addr())
	if clock()-begin < int64(b.cfg.Handshake) { // later the place may be free
		require.ErrorIs(t, err, driver.ErrFull)
	}
	if err == nil {
		require.NoError(t, p.Close())
	}
	hungUp(t, "a hello without joins", c, headBytes)
	// The place comes free a little later. A peer that is not whole within Handshake is ended
	// like that hello: one of a busy machine comes again.
	for end := time.Now().Add(limit); !staysWhole(t, near, b); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), "no peer stays")
	}
}

// staysWhole reports whether a peer finds a place, and keeps it for longer than Handshake.
func staysWhole(t *testing.T, near, b *Backend) bool {
	t.Helper()
	p, err := near.Connect(context.Background(), b.Addr())
	if err != nil {
		return false
	}
	select {
	case <-p.Lost():
		require.NoError(t, p.Close())
		return false
	case <-time.After(2 * b.cfg.Handshake):
	}
	notify(t, p.(*peer), "still here")
	return true
}
