// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// begin submits n batches that take a while, tags from 0 up.
func (l *lane) begin(t *testing.T, op driver.Op, n uint64) {
	t.Helper()
	for tag := range n {
		d := []driver.Desc{l.desc(1, 3, 1<<20), l.desc(2<<20, 5<<19, 1<<20)}
		require.NoError(t, submit(l.conn, op, tag, d, nil))
	}
}

func TestCancelAtEveryStage(t *testing.T) {
	l := openLane(t, overTCP)
	for round := range 60 {
		op := []driver.Op{driver.Write, driver.Read}[round%2]
		l.begin(t, op, 4)
		for spin := time.Now(); time.Since(spin) < time.Duration(round)*20*time.Microsecond; {
		}
		for _, tag := range []uint64{1, 0, 3, 99, 0} {
			l.conn.Cancel(tag)
		}
		for tag, err := range l.outcomes(t, 0, 4) {
			if err != nil && (!errors.Is(err, driver.ErrAborted) || tag == 2) {
				t.Fatalf("round %d, tag %d: %v", round, tag, err)
			}
		}
	}
	l.works(t)
}

func TestDrainAndEndWithWorkInFlight(t *testing.T) {
	for name, end := range map[string]func(l *lane) error{
		"drain": func(l *lane) error { return l.conn.Drain(testLimit) },
		"close": func(l *lane) error {
			l.conn.End(Closed, true)
			l.conn.End(Lost, true)
			return nil
		},
		"lost": func(l *lane) error { l.conn.End(Lost, true); return nil },
		"both": func(l *lane) error {
			_ = l.conn.Drain(0)
			l.conn.End(Closed, true)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := openLane(t, overTCP)
			for _, op := range []driver.Op{driver.Write, driver.Read} {
				l.begin(t, op, 6)
				require.NoError(t, end(l))
				for tag, err := range l.outcomes(t, 0, 6) {
					if err != nil && !errors.Is(err, driver.ErrClosed) &&
						!errors.Is(err, driver.ErrPeerLost) {
						t.Fatalf("tag %d: %v", tag, err)
					}
				}
				why := driver.ErrClosed
				if name == "lost" {
					why = driver.ErrPeerLost
				}
				if err := submit(l.conn, op, 9, []driver.Desc{l.desc(0, 0, 1)},
					nil); !errors.Is(err, why) {
					t.Fatalf("submit after the end: %v", err)
				}
				if _, err := l.conn.Import(Import{Key: testKey, Size: 10,
					Ticket: 1}); !errors.Is(err, why) {
					t.Fatalf("import after the end: %v", err)
				}
				_ = l.conn.Lanes()
				l.again(t)
			}
		})
	}
}

// again replaces the connection.
func (l *lane) again(t *testing.T) {
	t.Helper()
	_, _ = l.conn.Close(testGrace), l.back.Close(testGrace)
	l.conn, l.back = join(t, l.near, l.far)
	l.imports(t)
}

func TestDropInFlight(t *testing.T) {
	l := openLane(t, overTCP)
	for range 20 {
		slot := l.slot
		l.begin(t, driver.Read, 2)
		l.conn.Drop(slot)
		l.conn.Drop(slot)
		if err := submit(l.conn, driver.Read, 9, []driver.Desc{l.desc(0, 0, 1)},
			nil); !errors.Is(err, driver.ErrBounds) {
			t.Fatalf("submit to what was dropped: %v", err)
		}
		l.imports(t)
		for tag, err := range l.outcomes(t, 0, 2) {
			if err != nil {
				t.Fatalf("tag %d: %v", tag, err)
			}
		}
		l.works(t)
		l.conn.Drop(l.slot)
		l.imports(t)
		if l.slot > 1 {
			t.Fatalf("slot %d: those that nobody uses are not used again", l.slot)
		}
	}
	l.conn.Drop(1 << 30)
}

// A peer that is ourselves answers within the call that asks it.
func TestConnectionToItself(t *testing.T) {
	l := openLane(t, overTCP)
	conn, back := join(t, l.near, l.near)
	slot, err := conn.Import(Import{Key: testKey, Size: testBytes, Ticket: 1})
	require.NoError(t, err)
	fill(l.local[:100000], 1)
	for i := range 50 {
		d := []driver.Desc{{Remote: 1 << 20, Len: 50000, LocalKey: testKey, RemoteKey: slot},
			{Local: 50000, Remote: 1<<20 + 50001, Len: 40000, LocalKey: testKey,
				RemoteKey: slot}}
		for tag := range uint64(3) {
			require.NoError(t, submit(conn, []driver.Op{driver.Write, driver.Read}[i%2], tag, d,
				nil))
		}
		conn.Cancel(uint64(i % 3))
		l.outcomes(t, 0, 3)
	}
	require.NoError(t, l.near.Revoke(testKey, testLimit))
	d := []driver.Desc{{Remote: 1 << 20, Len: 50000, LocalKey: testKey, RemoteKey: slot}}
	require.NoError(t, errors.Join(submit(conn, driver.Write, 1, d, []byte("x"))))
	if err := l.outcome(t, 1); !errors.Is(err, driver.ErrRevoked) {
		t.Fatalf("an old ticket: %v", err)
	}
	_, _ = conn.Close(testGrace), back.Close(testGrace)
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
	_, _ = l.conn.Close(testGrace), l.back.Close(testGrace)
	for range 2 {
		require.NoError(t, errors.Join(l.near.Close(), l.far.Close()))
	}
	l.conn, l.back = nil, nil
	_ = l.far.Revoke(testKey, testLimit)
	l.far.Drive()
	require.ErrorIs(t, l.far.Map(testKey, Memory{Mem: l.remote, Ticket: 1}), driver.ErrClosed)
	_, err := l.far.Connect(0, nil)
	require.ErrorIs(t, err, driver.ErrClosed)
	_, received := l.far.Receive()
	_, told := l.far.Control()
	require.False(t, received || told, "a context that has ended goes on")
}
