// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestRefusesUnknownKeys(t *testing.T) {
	l := openLane(t, overTCP)
	good := l.desc(0, 0, 10)
	for name, bad := range map[string]driver.Desc{
		"local key":      {Len: 10, LocalKey: 99, RemoteKey: l.slot},
		"far local key":  {Len: 10, LocalKey: KeysMax + 5, RemoteKey: l.slot},
		"slot":           {Len: 10, LocalKey: testKey, RemoteKey: l.slot + 1},
		"far slot":       {Len: 10, LocalKey: testKey, RemoteKey: 1 << 31},
		"nothing":        l.desc(0, 0, 0),
		"local end":      l.desc(testBytes-9, 0, 10),
		"remote end":     l.desc(0, testBytes-9, 10),
		"round the end":  l.desc(1<<63, 1<<63, 1<<63),
		"beyond the end": l.desc(^uint64(0)-4, 0, 10),
	} {
		err := submit(l.conn, driver.Write, 1, []driver.Desc{good, good, bad}, nil)
		var piece *driver.PieceError
		if !errors.Is(err, driver.ErrBounds) || !errors.As(err, &piece) || piece.Piece != 2 {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := &driver.Pattern{Count: 2, Run: 1, Local: driver.Side{Stride: 1 << 40},
		Remote: driver.Side{Stride: 1}, LocalKey: testKey, RemoteKey: l.slot}
	require.ErrorIs(t, submitNest(l.conn, 1, p), driver.ErrBounds, "pages that overflow")
	l.works(t)
}

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
		begin(driver.Read, i, testBytes)
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
	alone := 0
	for range 3000 {
		l.tag++
		for l.near.Arm() {
			l.near.Poll(make([]ring.Done, 1))
		}
		require.NoError(t, submit(l.conn, driver.Read, l.tag, []driver.Desc{l.desc(8, 16, 8)},
			nil))
		// Submit's caller polls
		inline := l.near.rings[0].Head.Load() != l.near.rings[0].Tail.Load()
		if !l.conn.Help(l.tag, nil) && !inline {
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

func TestRevokesOfSeveralAtOnce(t *testing.T) {
	l := openLane(t, overTCP)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 30 {
				if err := l.far.Revoke(testKey, testLimit); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, l.far.Revoke(KeysMax, testLimit), "no memory")
}

func TestManyMemories(t *testing.T) {
	l := openLane(t, overTCP)
	const n = 10000
	for key := uint32(100); key < 100+n; key++ {
		require.NoError(t, l.far.Map(key, Memory{Mem: l.remote[key*8:][:8],
			Ticket: uint64(key)}))
	}
	if err := l.far.Map(100, Memory{Mem: l.remote[:8], Ticket: 1}); err == nil {
		t.Error("a key twice")
	}
	if err := l.far.Map(KeysMax, Memory{Mem: l.remote[:8], Ticket: 1}); err == nil {
		t.Error("a key beyond the table")
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
		if !bytes.Equal(l.local[d.Local:d.Local+8], l.remote[d.Local*8:d.Local*8+8]) {
			t.Fatalf("key %d: other bytes", d.Local)
		}
	}
	for key := uint32(100); key < 100+n; key++ {
		_ = l.far.Revoke(key, testLimit)
	}
	if err := errors.Join(submit(l.conn, driver.Write, 2, d, nil),
		l.outcome(t, 2)); !errors.Is(err, driver.ErrRevoked) {
		t.Fatalf("write to what is not there any more: %v", err)
	}
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

// TestListThatChanges has a program change an index list while it submits: the bytes beyond what
// was imported stay as they are.
func TestListThatChanges(t *testing.T) {
	const entry, count = 4096, 64
	l := openLane(t, overTCP)
	slot, err := l.conn.Import(Import{Key: testKey, Size: testBytes / 2, Ticket: 1})
	require.NoError(t, err)
	list := make([]uint32, count)
	for i := range list {
		list[i] = uint32(i)
	}
	for i := range l.local[:count*entry] {
		l.local[i] = 0x5a
	}
	beyond := l.remote[testBytes/2:]
	var stop atomic.Bool
	over := make(chan struct{})
	go func() {
		defer close(over)
		for !stop.Load() { // the program's mistake
			atomic.StoreUint32(&list[count-1], testBytes/entry/2)
			atomic.StoreUint32(&list[count-1], count-1)
		}
	}()
	p := driver.Pattern{Count: count, Run: entry, Local: driver.Side{Stride: entry},
		Remote: driver.Side{Stride: entry, List: list}, LocalKey: testKey, RemoteKey: slot}
	for range 20000 {
		l.tag++
		if submitNest(l.conn, l.tag, &p) == nil {
			_ = l.outcome(t, l.tag)
		}
	}
	stop.Store(true)
	<-over
	if beyond[0] == 0x5a {
		testkit.FatalBroken(t, "bytes beyond what was imported were written")
	}
}
