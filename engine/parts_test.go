// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/wire"
)

// part is one of a long notification.
func part(flags byte, n int) []byte { return append([]byte{flags}, make([]byte, n)...) }

// TestPartsOfAll: what has begun and not ended takes a sum of all connections, of which the origin
// that holds most gives up what has waited longest. One alone always has room.
func TestPartsOfAll(t *testing.T) {
	const most, limit = 100 << 10, 300 << 10
	j := joining{most: most}
	from := func(origin string) *sender { return &sender{ticket: &ticket{origin: origin}} }
	adds := func(s *sender, flags byte, n int) []byte {
		t.Helper()
		whole, ok, err := j.add(s, part(flags, n), limit)
		require.NoError(t, err)
		require.Equal(t, flags&exchange.LastPart != 0, ok)
		require.True(t, j.bytes <= most || j.holders() == 1)
		return whole
	}
	alone := from("a")
	adds(alone, exchange.FirstPart, 10<<10)
	for range 20 {
		adds(alone, 0, 10<<10)
	}
	require.Len(t, adds(alone, exchange.LastPart, 10<<10), 220<<10)
	require.Zero(t, j.bytes)

	honest := from("b")
	adds(honest, exchange.FirstPart, 20<<10)
	var crowd []*sender
	for range 24 {
		s := from("a")
		crowd = append(crowd, s)
		adds(s, exchange.FirstPart, 10<<10)
	}
	for range 2 {
		adds(honest, 0, 10<<10)
	}
	require.Len(t, adds(honest, exchange.LastPart, 5), 40<<10+5)
	_, _, err := j.add(crowd[0], part(0, 1), limit)
	require.ErrorIs(t, err, ErrFull)
	require.ErrorIs(t, err, ErrPeerLost)
	require.ErrorContains(t, err, "NotificationBytes")
	adds(crowd[23], exchange.LastPart, 1)
	for _, s := range crowd {
		j.forget(s)
	}
	require.Zero(t, j.bytes)
	require.Empty(t, j.of)
}

// TestPartsThatNeverEnd: connections that begin long notifications and end none keep no more than
// the bound, another one's comes, and those that lost one are lost, which the program is told.
func TestPartsThatNeverEnd(t *testing.T) {
	const room, conns = 1 << 20, 24
	over := func(c *Config) {
		b, err := mem.New(mem.Config{})
		require.NoError(t, err)
		c.Backends = []driver.Backend{shortWords{b}}
	}
	e := open(t, "e", over, func(c *Config) { c.NotificationBytes, c.NotifyMax = room, room })
	raw, err := mem.New(mem.Config{})
	require.NoError(t, err)
	defer raw.Close()
	var peers []driver.Peer
	say := func(p driver.Peer, msg []byte) {
		batch, done := driver.Batch{Op: Write, Tail: driver.NotifyTail, Notify: msg},
			[1]driver.Completion{}
		for err := error(ErrFull); errors.Is(err, ErrFull); {
			_, _ = raw.Poll(done[:])
			err = p.Submit(1, &batch)
			require.True(t, err == nil || errors.Is(err, ErrFull), "%v", err)
		}
	}
	for i := range conns {
		p, err := raw.Connect(within(t), e.lanes[0].b.Addr())
		require.NoError(t, err)
		peers = append(peers, p)
		h := exchange.Hello{ID: wire.ID{byte(i + 1)}, Name: "x"}
		say(p, h.Append(nil))
		for n := 0; n < room/2; n += 1 << 10 {
			flags := byte(0)
			if n == 0 {
				flags = exchange.FirstPart
			}
			say(p, append([]byte{exchange.IsPart}, part(flags, 1<<10)...))
		}
	}
	until(t, "all have come", func() bool {
		e.joining.mu.Lock()
		defer e.joining.mu.Unlock()
		return len(e.joining.of) == conns
	})
	e.joining.mu.Lock()
	require.LessOrEqual(t, e.joining.bytes, room)
	e.joining.mu.Unlock()

	a := open(t, "a", over, func(c *Config) { c.NotifyMax = room })
	p, err := a.Dial(within(t), "unix", serveUnix(t, e))
	require.NoError(t, err)
	text := bytes.Repeat([]byte{7}, room/2)
	require.NoError(t, p.Notify(within(t), text))
	require.Equal(t, text, next(t, e).Data)
	say(peers[0], append([]byte{exchange.IsPart}, part(0, 1)...))
	require.ErrorIs(t, next(t, e).Err, ErrFull)
}
