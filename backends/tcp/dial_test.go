// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// ways are the three of a connection, as far as Config sets them.
var ways = map[string]func() Config{
	"plain":     func() Config { return Config{Plaintext: true} },
	"pinned":    func() Config { return Config{} },
	"certified": func() Config { return Config{TLS: sharedAuthority.config()} },
}

// TestAnotherOwnerAtTheFirstPlace: the same address and port on two hosts, as of a bridge that
// both have.
func TestAnotherOwnerAtTheFirstPlace(t *testing.T) {
	for name, config := range ways {
		t.Run(name, func(t *testing.T) {
			leak.Check(t)
			owner, near := openWith(t, config()), openWith(t, config())
			places := openWith(t, config()).address.places
			require.NoError(t, dial(t, near, before(t, owner, places...)).Close())
		})
	}
}

// TestASilentFirstPlace accepts, and says nothing: a sink, or a process that was stopped.
func TestASilentFirstPlace(t *testing.T) {
	for name, config := range ways {
		t.Run(name, func(t *testing.T) {
			leak.Check(t)
			owner, near := openWith(t, config()), openWith(t, config())
			require.NoError(t, dial(t, near, before(t, owner, silent(t))).Close())
		})
	}
}

// TestPlacesAreNamedInTheError of a Connect that none of them welcomes.
func TestPlacesAreNamedInTheError(t *testing.T) {
	leak.Check(t)
	owner, other := openWith(t, Config{Plaintext: true}), openWith(t, Config{Plaintext: true})
	mute, wrong := silent(t), other.address.places[0]
	both := before(t, owner, mute, wrong)
	alone := owner.address
	alone.places = []string{wrong}
	one, err := alone.encode()
	require.NoError(t, err)
	require.NoError(t, owner.Close())

	// A machine that is busy may not get the answer of the second place in the time that the
	// first one leaves: then there is more time.
	for handshake := 2 * time.Second; ; handshake *= 2 {
		near := openWith(t, Config{Plaintext: true, Handshake: handshake})
		begin := time.Now()
		_, err = near.Connect(t.Context(), both)
		require.ErrorIs(t, err, driver.ErrTimeout)
		require.ErrorContains(t, err, "no answer from ")
		require.GreaterOrEqual(t, time.Since(begin), handshake) // it was asked again
		if handshake >= limit || strings.Contains(err.Error(), "at "+wrong) {
			require.ErrorContains(t, err, "no answer from "+mute)
			require.ErrorContains(t, err, "at "+wrong)
			break
		}
	}

	near := openWith(t, Config{Plaintext: true})
	_, err = near.Connect(t.Context(), one)
	require.ErrorIs(t, err, driver.ErrPeerLost)
	require.ErrorContains(t, err, "at "+wrong+": another program has this port")
}

func openWith(t *testing.T, cfg Config) *Backend {
	t.Helper()
	cfg.Listen = "127.0.0.1:0"
	if cfg.Handshake == 0 {
		cfg.Handshake = limit
	}
	b, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// before is the description of an owner with other places before its own.
func before(t *testing.T, owner *Backend, places ...string) []byte {
	t.Helper()
	return altered(t, owner.Addr(), func(a *address) { a.places = append(places, a.places...) })
}

// silent is a place that keeps open what calls.
func silent(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	})
	return l.Addr().String()
}

// sendBuffer returns what SetWriteBuffer was given, which the kernel doubles for what it adds.
func sendBuffer(t *testing.T, tcp *net.TCPConn) (n int) {
	t.Helper()
	raw, err := tcp.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		n, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
	}))
	require.NoError(t, err)
	return n / 2
}

// nearest is the send buffer that a connection within a host has.
func nearest(t *testing.T, l net.Listener) int {
	t.Helper()
	near, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer near.Close()
	require.NoError(t, near.(*net.TCPConn).SetWriteBuffer(nearBuffer))
	return sendBuffer(t, near.(*net.TCPConn))
}

func TestSendBufferWithinAHost(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	owner, b := open(t, Config{}), open(t, Config{})
	dialled := dial(t, b, owner.Addr()).conns
	var accepted []*conn
	owner.mu.Lock()
	for _, g := range owner.accepted {
		g.mu.Lock()
		accepted = append(accepted, g.conns...)
		g.mu.Unlock()
	}
	owner.mu.Unlock()
	require.Len(t, accepted, len(dialled))
	want := nearest(t, l)
	for _, c := range append(accepted, dialled...) {
		require.Equal(t, want, sendBuffer(t, c.tcp))
	}
}
