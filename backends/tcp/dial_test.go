// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestAnotherOwnerAtTheFirstPlace: the same address and port on two hosts, as of a bridge that
// both have.
func TestAnotherOwnerAtTheFirstPlace(t *testing.T) {
	testkit.CheckLeaks(t)
	for _, plaintext := range []bool{true, false} {
		cfg := Config{Plaintext: plaintext}
		owner, near := openWith(t, cfg), openWith(t, cfg)
		places := openWith(t, cfg).address.places
		require.NoError(t, dial(t, near, before(t, owner, places...)).Close())
	}
}

// TestASilentFirstPlace accepts, and says nothing: a sink, or a process that was stopped.
func TestASilentFirstPlace(t *testing.T) {
	testkit.CheckLeaks(t)
	owner, near := openWith(t, Config{}), openWith(t, Config{})
	require.NoError(t, dial(t, near, before(t, owner, silent(t))).Close())
}

// TestPlacesAreNamedInTheError of a Connect that none of them welcomes.
func TestPlacesAreNamedInTheError(t *testing.T) {
	testkit.CheckLeaks(t)
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
	for patience := 2 * time.Second; ; patience *= 2 {
		near := openWith(t, Config{Plaintext: true})
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err = near.Connect(ctx, both)
		cancel()
		require.ErrorIs(t, err, driver.ErrTimeout)
		require.ErrorContains(t, err, "no answer from ")
		require.GreaterOrEqual(t, time.Since(begin), patience) // it was asked again
		if patience >= limit || strings.Contains(err.Error(), "at "+wrong) {
			require.ErrorContains(t, err, "no answer from "+mute)
			require.ErrorContains(t, err, "at "+wrong)
			break
		}
	}

	// Nor may it get that of the only place in the time of one try.
	near := openWith(t, Config{Plaintext: true})
	for begin := time.Now(); ; {
		_, err = near.Connect(t.Context(), one)
		require.ErrorIs(t, err, driver.ErrPeerLost)
		if !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(begin) > limit {
			break
		}
	}
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

// door is a place that hands each connection on to an owner, or hangs up on it a little later, as
// before says: n counts them.
func door(t *testing.T, owner *Backend, before func(n int) bool) (addr []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	all.Go(func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				if !before(n) {
					time.Sleep(500 * time.Millisecond)
					return
				}
				to, err := net.Dial("tcp", owner.address.places[0])
				if err != nil {
					return
				}
				defer to.Close()
				all.Go(func() { _, _ = io.Copy(to, c); _ = to.(*net.TCPConn).CloseWrite() })
				_, _ = io.Copy(c, to)
			})
		}
	})
	return altered(t, owner.Addr(), func(a *address) { a.places = []string{l.Addr().String()} })
}

// TestConnectComesAgain: an owner that hung up before it said why, or that gave a peer up before
// all of its connections had come, is asked again, until the caller's context ends.
func TestConnectComesAgain(t *testing.T) {
	for name, before := range map[string]func(clock *testkit.Clock, n int) bool{
		"it hangs up": func(_ *testkit.Clock, n int) bool { return n >= 2 },
		"it was too late for the others": func(clock *testkit.Clock, n int) bool {
			if n == 1 { // a hello came first
				clock.Advance(2 * limit) // openBy sets Handshake to limit
			}
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.CheckLeaks(t)
			clock := testkit.NewClock()
			owner, near := openBy(t, clock, Config{}), open(t, Config{Conns: 1})
			addr := door(t, owner, func(n int) bool { return before(clock, n) })
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			p, err := near.Connect(ctx, addr)
			require.NoError(t, err)
			require.NoError(t, p.Close())
		})
	}
	t.Run("it never welcomes", func(t *testing.T) {
		testkit.CheckLeaks(t)
		owner, near := open(t, Config{}), open(t, Config{Conns: 1})
		ctx, cancel := context.WithCancel(t.Context())
		addr := door(t, owner, func(n int) bool {
			if n == 2 {
				cancel()
			}
			return false
		})
		_, err := near.Connect(ctx, addr)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "the other side hung up")
	})
}
