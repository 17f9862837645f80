// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// The phases of a provider whose pages do not move, and of one that moves them.
const (
	pagesStay int32 = 0
	pagesMove int32 = 2
)

// movable is memory whose provider says when it moves pages.
type movable struct {
	inside atomic.Int64
	phase  atomic.Int32
}

const movableKey = 9

// mapMovable makes the bytes of the forger's target known once more, as memory with a provider.
func (v *victim) mapMovable(t *testing.T) *movable {
	t.Helper()
	m := &movable{}
	require.NoError(t, v.Map(movableKey, Memory{Mem: v.mem[victimFrom:victimTo],
		Ticket: victimTicket,
		Inside: &m.inside, Phase: &m.phase}))
	t.Cleanup(func() {
		m.phase.Store(pagesStay) // also where the test fails before it says so
		_ = v.Revoke(movableKey, testLimit)
	})
	return m
}

// TestAgesWhilePagesMove has a write arrive young, wait for pages that are being moved, and be
// too old when they have come to rest.
func TestAgesWhilePagesMove(t *testing.T) {
	v := openVictim(t)
	m := v.mapMovable(t)
	before := bytes.Clone(v.mem)
	m.phase.Store(pagesMove)
	v.f.send(forged{kind: msgWrite, conn: v.conn.ID(), ticket: victimTicket, key: movableKey,
		size:  8,
		flags: flagFirst}, []byte("eight888"))
	require.True(t, v.answers()) // it has come
	v.Elapse(2 * testGrace)
	m.phase.Store(pagesStay)
	v.f.await(msgConfirm)
	require.True(t, bytes.Equal(before, v.mem), "bytes landed that were too old")
	copy(before[victimFrom:], "eight888")
	v.lands(t, forged{kind: msgConfirmed, conn: v.conn.ID()}, before, clock)
	require.Zero(t, m.inside.Load())
}

// TestPagesThatMoveHoldUpTheirOwn has a write, a read and an answer wait for pages that are
// being moved: the worker answers others, and a revoke of other memory ends.
func TestPagesThatMoveHoldUpTheirOwn(t *testing.T) {
	v := openVictim(t)
	m := v.mapMovable(t)
	before := bytes.Clone(v.mem)
	answer := forged{kind: msgData, conn: v.conn.ID()}
	slot, err := v.conn.Import(Import{Key: 1, Size: 1 << 20, Ticket: 5})
	require.NoError(t, err)
	require.NoError(t, submit(v.conn, driver.Read, 1,
		[]driver.Desc{{Local: 100, Len: 8, LocalKey: movableKey, RemoteKey: slot}}, nil))
	answer.seq = v.f.await(msgRead).seq
	m.phase.Store(pagesMove)
	write := forged{kind: msgWrite, conn: v.conn.ID(), ticket: victimTicket, key: movableKey,
		size: 8, flags: flagFirst}
	v.f.send(write, []byte("eight888"))
	v.f.send(answer, []byte("answered"))
	v.f.send(forged{kind: msgNotif, conn: v.conn.ID(), flags: flagChecked}, []byte("behind"))
	v.alive(t)
	require.NoError(t, v.Revoke(8, testLimit))
	_, early := v.Receive()
	require.False(t, early, "a notification overtook its bytes")
	require.True(t, bytes.Equal(before, v.mem))
	m.phase.Store(pagesStay)
	require.NoError(t, v.outcome(t, 1))
	v.alive(t)
	copy(before[victimFrom:], "eight888")
	copy(before[victimFrom+100:], "answered")
	require.True(t, bytes.Equal(before, v.mem))
	notif, ok := v.Receive()
	require.True(t, ok)
	require.Equal(t, "behind", string(notif.Data))
}

// TestHellosLeaveRoom floods a worker with messages of no connection: what a connection says
// arrives, and few of the others are kept.
func TestHellosLeaveRoom(t *testing.T) {
	v := openVictim(t)
	const flood = 2000
	for range flood {
		v.f.send(forged{kind: msgControl}, []byte("who is there?"))
	}
	v.f.send(forged{kind: msgControl, conn: v.conn.ID()}, []byte("it is me"))
	v.alive(t)
	unknown := 0
	for {
		m, ok := v.Control()
		require.True(t, ok, "a known connection was crowded out by %d others", unknown)
		if m.Conn != 0 {
			require.Equal(t, "it is me", string(m.Data))
			break
		}
		unknown++
	}
	require.LessOrEqual(t, unknown, flood*3/4)
}

// TestRoundTripLongerThanGrace has each message of the peer, its confirmations too, be on the
// way for longer than Grace: the age limit grows until bytes land, once the peer has confirmed it.
func TestRoundTripLongerThanGrace(t *testing.T) {
	const grace, late = testGrace, testGrace * 3 / 2
	v := openVictim(t)
	before := bytes.Clone(v.mem)
	past := func() uint64 { return clock() - uint64(late) }
	v.f.send(forged{kind: msgWrite, conn: v.conn.ID(), ticket: victimTicket, key: 7, size: 8,
		flags: flagFirst,
		echo:  past()}, []byte("eight888"))
	require.Equal(t, uint64(grace), v.f.await(msgConfirm).off)
	v.f.send(forged{kind: msgConfirmed, conn: v.conn.ID(), echo: past(), off: uint64(grace)},
		nil)
	require.Equal(t, uint64(2*grace), v.f.await(msgConfirm).off)
	require.True(t, bytes.Equal(before, v.mem),
		"the limit grew before the peer had confirmed it")
	copy(before[victimFrom:], "eight888")
	v.lands(t, forged{kind: msgConfirmed, conn: v.conn.ID(), off: uint64(2 * grace)}, before,
		past)
}
