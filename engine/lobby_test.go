// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/virtual"
)

// visitor is a connection from a host, of which nothing but its end is looked at.
type visitor struct {
	net.Conn
	host   string
	closed bool
}

func (v *visitor) Close() error         { v.closed = true; return nil }
func (v *visitor) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(v.host), Port: 1} }

// TestOneHostShutsOutNoOther fills the lobby from one host with connections that have shown all
// they can: another host gets in, a further one of the crowd does not, and none goes where no host
// has most of the places.
func TestOneHostShutsOutNoOther(t *testing.T) { virtual.Time(t, oneHostShutsOutNoOther) }

func oneHostShutsOutNoOther(t *testing.T) {
	y := lobby{most: 4, in: map[net.Conn]visit{}}
	enter := func(host string) (*visitor, bool) {
		v := &visitor{host: host}
		in := y.admit(v)
		if in {
			require.True(t, y.note(v, descriptionShown))
		}
		return v, in
	}
	var crowd []*visitor
	for range 4 {
		v, in := enter("10.0.0.1")
		require.True(t, in)
		crowd = append(crowd, v)
		time.Sleep(time.Microsecond) // one is the oldest
	}
	_, in := enter("10.0.0.1")
	require.False(t, in)
	for _, v := range crowd[:2] {
		_, in := enter("10.0.0.2")
		require.True(t, in)
		require.True(t, v.closed)
		require.False(t, y.note(v, descriptionShown))
	}
	_, in = enter("10.0.0.3")
	require.False(t, in, "two hosts have half of the places each")
	require.False(t, crowd[2].closed)
}

// TestTurns: connections of one host have at most half of the exchanges at a time.
func TestTurns(t *testing.T) {
	q := turns{most: 4, of: map[string]int{}}
	q.freed.L = &q.mu
	for range 2 {
		require.True(t, q.take(t.Context(), "a"))
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.False(t, q.take(over, "a"))
	third := make(chan bool, 1)
	go func() { third <- q.take(within(t), "a") }()
	require.True(t, q.take(t.Context(), "b"))
	select {
	case <-third:
		t.Fatal("a host has more than half of the exchanges")
	default:
	}
	q.give("a")
	require.True(t, <-third)
	require.True(t, q.take(t.Context(), "c"))
	require.False(t, q.take(over, "d"), "there are no more")
	for _, host := range []string{"a", "a", "b", "c"} {
		q.give(host)
	}
	require.Zero(t, q.running)
	require.Empty(t, q.of)
}
