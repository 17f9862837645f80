// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// TestRefusedBatchesKeepCredit: what a batch took for its message comes back where the message is
// not sent, since the batch was cancelled, and where it is not delivered, since the owner has
// refused a piece.
func TestRefusedBatchesKeepCredit(t *testing.T) {
	l := openLane(t, overTCP)
	begin := func(op driver.Op, tag, n uint64) {
		t.Helper()
		d := []driver.Desc{l.desc(0, 0, n)}
		require.Eventually(t, func() bool {
			err := submit(l.conn, op, tag, d, []byte("not delivered"))
			return !errors.Is(err, driver.ErrFull)
		}, testLimit, time.Millisecond, "the credit does not come back")
	}
	for i := range uint64(20) {
		begin(driver.Write, i, testBytes)
		l.conn.Cancel(i)
		if l.outcome(t, i) == nil { // it was done before
			require.Eventually(t, func() bool { _, ok := l.far.Receive(); return ok }, testLimit,
				time.Millisecond)
		}
	}
	require.NoError(t, l.far.Revoke(testKey, testLimit))
	for i := range uint64(20) {
		begin(driver.Write, i, 100000)
		require.ErrorIs(t, l.outcome(t, i), driver.ErrRevoked)
	}
	_, delivered := l.far.Receive()
	require.False(t, delivered, "the message of a batch that failed arrived")
}

// What ends in the hands of a helper wakes nobody, since he looks for it: so he must be told that
// something did.
func TestHelpSaysThatSomethingEnded(t *testing.T) {
	l := openLane(t, overTCP)
	armed := l.near.rings[0].Armed
	alone, stop := 0, [2]chan struct{}{1: make(chan struct{})}
	close(stop[1])
	for i := range 3000 {
		l.tag++
		for l.near.Arm() {
			l.near.Poll(make([]ring.Done, 1))
		}
		require.NoError(t, submit(l.conn, driver.Read, l.tag, []driver.Desc{l.desc(8, 16, 8)},
			nil))
		// Submit's caller polls
		inline := l.near.rings[0].Head.Load() != l.near.rings[0].Tail.Load()
		if !l.conn.Help(l.tag, stop[i%2]) && !inline {
			for end := time.Now().Add(testLimit); armed.Load() != 0; time.Sleep(
				time.Microsecond) {
				if l.near.rings[0].Head.Load() != l.near.rings[0].Tail.Load() &&
					time.Now().After(end) {
					t.Fatal("a batch has ended, nobody was woken, and Help says that it " +
						"did nothing")
				}
			}
			alone++
		}
		require.NoError(t, l.outcome(t, l.tag))
	}
	t.Logf("%d of 3000 reads ended without help", alone)
}

func TestContextThatHasEnded(t *testing.T) {
	l := openLane(t, overTCP)
	l.close(t)
	l.close(t)
	_ = l.far.Revoke(testKey, testLimit)
	l.far.Drive()
	require.ErrorIs(t, l.far.Map(testKey, Memory{Mem: l.remote, Ticket: 1}), driver.ErrClosed)
	_, err := l.far.Connect(0, nil)
	require.ErrorIs(t, err, driver.ErrClosed)
	_, received := l.far.Receive()
	_, told := l.far.Control()
	require.False(t, received || told, "a context that has ended goes on")
}

func TestManyMemories(t *testing.T) {
	l := openLane(t, overTCP)
	const n = 10000
	for key := uint32(100); key < 100+n; key++ {
		require.NoError(t, l.far.Map(key, Memory{Mem: l.remote[key*8:][:8],
			Ticket: uint64(key)}))
	}
	require.Error(t, l.far.Map(100, Memory{Mem: l.remote[:8], Ticket: 1}), "a key twice")
	for _, key := range []uint32{4 << 20, 1 << 31} {
		require.Error(t, l.far.Map(key, Memory{Mem: l.remote[:8], Ticket: 1}), "beyond the table")
		require.NoError(t, l.far.Revoke(key, testLimit))
	}
	var d []driver.Desc
	for key := uint32(100); key < 100+n; key += 997 {
		slot, err := l.conn.Import(Import{Key: key, Size: 8, Ticket: uint64(key)})
		require.NoError(t, err)
		d = append(d, driver.Desc{Local: uint64(key), Len: 8, LocalKey: testKey,
			RemoteKey: slot})
	}
	fill(l.local[:n+200], 3)
	require.NoError(t, errors.Join(submit(l.conn, driver.Write, 1, d, nil),
		l.outcome(t, 1)))
	for _, d := range d {
		require.True(t, bytes.Equal(l.local[d.Local:d.Local+8], l.remote[d.Local*8:d.Local*8+8]),
			"key %d: other bytes", d.Local)
	}
	for key := uint32(100); key < 100+n; key++ {
		_ = l.far.Revoke(key, testLimit)
	}
	require.ErrorIs(t, errors.Join(submit(l.conn, driver.Write, 2, d, nil), l.outcome(t, 2)),
		driver.ErrRevoked, "write to what is not there any more")
}

// TestIdle leaves a connection alone for 500 times the Grace of its ends: they keep it alive, and
// it works as before.
func TestIdle(t *testing.T) {
	l := openLane(t, overTCP)
	for range 500 {
		for _, c := range []*Context{l.near, l.far} {
			c.Elapse(testGrace)
			for m, ok := c.Control(); ok; m, ok = c.Control() {
				require.False(t, m.Lost, "an idle peer was given up")
			}
		}
	}
	require.Eventually(t, func() bool { return max(l.conn.Sends(), l.back.Sends()) <= 2 },
		testLimit, time.Millisecond, "messages that UCX keeps")
	l.works(t)
}

// TestSilence: a peer that has not pinged is silent at once where something waits for it, else when
// a ping of either Grace would be late.
func TestSilence(t *testing.T) {
	v := openVictim(t)
	require.True(t, v.answers())
	silent := func(want bool) {
		t.Helper()
		heard, _ := v.conn.Silence()
		require.Equal(t, want, heard > 0, "silent for %v", heard)
	}
	v.conn.Bind(0x4242, uint64(time.Hour)) // its next ping may take 23 minutes
	v.Elapse(20 * time.Minute)
	silent(false)
	v.read(t, 1, driver.Desc{Len: 8})
	silent(true)
	v.conn.Cancel(1)
	require.ErrorIs(t, v.outcome(t, 1), driver.ErrAborted)
	silent(false)
	v.Elapse(10 * time.Minute)
	silent(true)
}

// burn writes over the stack that calls before it used.
//
//go:noinline
func burn(v byte) (sum byte) {
	var stack [32 << 10]byte
	for i := range stack {
		stack[i] = v
	}
	for _, x := range stack {
		sum += x
	}
	return sum
}

//go:noinline
func submitNest(c *Conn, tag uint64, p *driver.Pattern) error {
	return c.Submit(tag, &driver.Batch{Op: driver.Write, Pattern: p})
}

// TestRefusedNest has an owner refuse nested writes that were issued as a whole by the time Submit
// returned: what is told of them is not read from the caller's stack.
func TestRefusedNest(t *testing.T) {
	l := openLane(t, overTCP)
	p := &driver.Pattern{Count: 4, Run: 16, Local: driver.Side{Stride: 4096},
		Remote: driver.Side{Stride: 4096}, LocalKey: testKey, RemoteKey: l.slot,
		Loops: []driver.Loop{{N: 3, Local: 64, Remote: 64}}}
	require.NoError(t, l.far.Revoke(testKey, testLimit))
	for i := range 50 {
		burn(byte(i))
		require.NoError(t, submitNest(l.conn, uint64(i), p))
		burn(0)
		err := l.outcome(t, uint64(i))
		require.ErrorIs(t, err, driver.ErrRevoked)
	}
}
