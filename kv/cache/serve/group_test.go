// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// TestGroup: an engine has clients of several servers; what becomes of one concerns no other.
func TestGroup(t *testing.T) {
	var paths []string
	var servers []*Server
	for range 3 {
		_, s, path := openWhole(t)
		paths, servers = append(paths, path), append(servers, s)
	}
	e, err := openEngine("user")
	require.NoError(t, err)
	g := NewGroup(e)
	var clients []*Client
	for _, path := range paths {
		c, err := g.Dial(t.Context(), "unix", path)
		require.NoError(t, err)
		require.Equal(t, "node", c.Name())
		clients = append(clients, c)
	}
	servers[0].mu.Lock()
	for _, c := range servers[0].clients {
		c.cancel()
	}
	servers[0].mu.Unlock()
	<-clients[0].Lost()
	require.ErrorIs(t, clients[0].Ping(t.Context()), engine.ErrPeerLost)
	require.NoError(t, clients[1].Close(t.Context()))
	require.NoError(t, clients[2].Ping(t.Context()))
	again, err := g.Dial(t.Context(), "unix", paths[0])
	require.NoError(t, err)
	require.NoError(t, again.Ping(t.Context()))
	require.NoError(t, clients[0].Close(t.Context()))
	g.Close()
	<-again.Lost()
	_, err = g.Dial(t.Context(), "unix", paths[0])
	require.ErrorIs(t, err, engine.ErrClosed)
	require.NoError(t, again.Close(t.Context()))
	require.NoError(t, clients[2].Close(t.Context()))
	require.NoError(t, e.Close())
}

// TestPins: what a client has pinned stays until it unpins it, its time is over, or it is gone.
func TestPins(t *testing.T) {
	c, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	keys := keysOf(1, 4) // as many as one namespace may keep
	u.fill(keys)
	_, err = u.Store(t.Context(), keys, u.place(0, 4))
	require.NoError(t, err)
	pin, err := u.Pin(t.Context(), append(keysOf(100, 1), keys...), time.Hour)
	require.NoError(t, err)
	require.Equal(t, append([]cache.Outcome{cache.Missing}, all(cache.Done, 4)...), pin.Outcomes())
	require.EqualValues(t, 4*blockBytes, c.Stats().Held)
	_, err = u.Pin(t.Context(), keys, time.Hour)
	require.ErrorIs(t, err, cache.ErrNoRoom)
	for _, ttl := range []time.Duration{0, time.Millisecond, 2 * time.Hour} {
		_, err = u.Pin(t.Context(), keys, ttl)
		require.ErrorIs(t, err, engine.ErrBounds)
	}
	for from := uint64(1000); from < 1064; from += 8 { // all that there is room for, twice
		others := keysOf(from, 8)
		u.fill(others)
		_, err := u.Store(t.Context(), others, u.place(0, 8))
		require.NoError(t, err)
	}
	found, err := u.Match(t.Context(), keys)
	require.NoError(t, err)
	require.Equal(t, 4, found.Prefix)
	require.NoError(t, u.Space.Close(), "the pin keeps its namespace")
	require.NoError(t, pin.Close())
	require.NoError(t, pin.Close())
	until(func() bool { return c.Stats().Held == 0 })
	u.Space, err = u.Client.Namespace(t.Context(), "model", [32]byte{1})
	require.NoError(t, err)

	// Pins that have ended by their time make way, and those of a client that is gone end.
	for range pinsMax {
		pin, err := u.Pin(t.Context(), nil, time.Hour)
		require.NoError(t, err)
		require.Empty(t, pin.Outcomes())
	}
	_, err = u.Pin(t.Context(), nil, time.Hour)
	require.ErrorIs(t, err, engine.ErrBusy)
	s.mu.Lock()
	for _, of := range s.clients {
		for _, p := range of.pins {
			p.Close() // as its time does
		}
	}
	s.mu.Unlock()
	_, err = u.Pin(t.Context(), keys, time.Hour)
	require.NoError(t, err)
	require.EqualValues(t, 4*blockBytes, c.Stats().Held)

	// Nobody waits for this one any more.
	other, err := openUser(t.Context(), path)
	require.NoError(t, err)
	require.NoError(t, other.Space.Close())
	other.Space, err = other.Client.Namespace(t.Context(), "other", [32]byte{1})
	require.NoError(t, err)
	_, err = other.Store(t.Context(), keysOf(7, 1), other.place(0, 1))
	require.NoError(t, err)
	q := other.about(keysOf(7, 1))
	q.rest = le.AppendUint64(nil, uint64(time.Hour))
	body, err := other.ask(t.Context(), kindPin, q)
	require.NoError(t, err)
	require.EqualValues(t, 5*blockBytes, c.Stats().Held)
	late := make(chan []byte, 1)
	late <- answer(1, nil, body)[headBytes:]
	other.latePin(late)
	until(func() bool { return c.Stats().Held == 4*blockBytes })
	require.NoError(t, other.Client.Close(t.Context()))
	require.NoError(t, u.Client.Close(t.Context()))
	until(func() bool { return c.Stats().Held == 0 })
}
