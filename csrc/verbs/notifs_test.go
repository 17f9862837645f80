// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// awaitMessage checks which comes next.
func (l *testLink) awaitMessage(t *testing.T, want int) {
	t.Helper()
	if n := l.notif(t); !bytes.Equal(n.Data, numbered(want)) {
		t.Fatalf("message %x, want %d", n.Data, want)
	}
}

// A message that the owner has seen proves the writes before it: they are not done again, since
// the owner's program was told, and may use the memory for something else by now.
func TestSeenProvesWrites(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{bytes: 64 << 10})
	fill(l.local, 1)
	d.fake.Device(0).MuteNext(3)
	d.fake.Device(0).Set("frozen", 1) // until both are posted: else the wire is given up
	before := l.submit(t, driver.Write, nil, driver.Desc{Local: 10_000, Remote: 10_000, Len: 5000})
	tag := l.submit(t, driver.Write, numbered(1), driver.Desc{Len: 5000})
	d.fake.Device(0).Set("frozen", 0)
	l.awaitMessage(t, 1)
	l.awaitNews(t, PairFailed)
	if !bytes.Equal(l.remote[:5000], l.local[:5000]) || !bytes.Equal(l.remote[10_000:15_000],
		l.local[10_000:15_000]) {
		t.Fatal("other bytes")
	}
	fill(l.remote[:20_000], 2)
	want := bytes.Clone(l.remote)
	l.make(t, 0)
	l.awaitNews(t, PairLive)
	for _, tag := range []uint64{before, tag} {
		require.NoError(t, l.outcome(t, tag))
	}
	require.NoError(t, l.move(t, driver.Write, driver.Desc{Local: 50_000, Remote: 50_000,
		Len: 1}))
	if !bytes.Equal(l.remote[:20_000], want[:20_000]) {
		t.Error("what the owner was told of was written once more")
	}
}

// It does not prove that the answer of a read before it came back.
func TestSeenDoesNotProveReads(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{bytes: 64 << 10})
	fill(l.remote, 3)
	d.fake.Device(0).MuteNext(3)
	d.fake.Device(0).Set("frozen", 1) // as above
	read := l.submit(t, driver.Read, nil, driver.Desc{Len: 5000})
	l.submit(t, driver.Write, numbered(1), driver.Desc{Local: 10_000, Remote: 10_000, Len: 5000})
	d.fake.Device(0).Set("frozen", 0)
	l.awaitMessage(t, 1)
	l.awaitNews(t, PairFailed)
	l.make(t, 0)
	l.awaitNews(t, PairLive)
	for tag, err := range l.outcomes(t, 2) {
		if err != nil {
			t.Errorf("batch %d (the read is %d): %v", tag, read, err)
		}
	}
	if !bytes.Equal(l.local[:5000], l.remote[:5000]) {
		t.Error("a read is over, and its bytes have not come")
	}
}

// An owner says what its thread has seen, which may be less than its NICs have acknowledged, over
// another rail. Messages keep their numbers all the same: none is lost, and what comes twice is
// dropped.
func TestSeenIsLessThanArrived(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{bytes: 64 << 10})
	for i := range 3 {
		require.NoError(t, l.outcome(t, l.submit(t, driver.Write, numbered(i))))
		l.awaitMessage(t, i)
	}
	d.fake.Device(0).MuteNext(1)
	tag := l.submit(t, driver.Write, numbered(3))
	l.awaitNews(t, PairFailed)
	l.makeHaving(t, 0, func() uint64 { return 2 })
	l.awaitNews(t, PairLive)
	require.NoError(t, l.outcome(t, tag))
	l.awaitMessage(t, 3)
	require.NoError(t, l.outcome(t, l.submit(t, driver.Write, numbered(4))))
	l.awaitMessage(t, 4)
	if n, ok := l.far.Receive(); ok {
		t.Errorf("message %x comes again", n.Data)
	}
}

func numbered(i int) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(i)) }

// TestMalformedMessages changes messages as a peer that means harm would: the owner ends that
// queue pair, and takes nothing of it.
func TestMalformedMessages(t *testing.T) {
	for what, at := range map[string]int{"magic": 0, "kind": 4, "number": 15} {
		t.Run(what, func(t *testing.T) {
			d := fakeDevices(t, 1)
			l := openLink(t, d, testShape{})
			d.fake.Device(0).GarbleNext(at)
			l.tag++
			require.NoError(t,
				l.conn.Submit(l.tag, &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail,
					Notify: []byte("x")}))
			for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
				if n, ok := l.far.News(); ok && n.Kind == PairFailed {
					break
				}
				if time.Now().After(end) {
					t.Fatal("the owner keeps the queue pair")
				}
			}
			if n, ok := l.far.Receive(); ok {
				t.Errorf("message %x", n.Data)
			}
			if got := l.back.Seen(); got != 0 {
				t.Errorf("%d messages were seen", got)
			}
		})
	}
}

// TestRoomIsToldToWhoArmsLater: credit that comes between a refusal and Arm must not be slept
// through.
func TestRoomIsToldToWhoArmsLater(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{})
	sent := 0
	for ; ; sent++ {
		l.tag++
		err := l.conn.Submit(l.tag, batchOf(driver.Write, nil, numbered(sent)))
		if errors.Is(err, driver.ErrFull) {
			break
		}
		require.NoError(t, err)
		require.NoError(t, l.outcome(t, l.tag))
	}
	for range sent {
		l.notif(t)
	}
	for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); {
		// the credit comes meanwhile
		l.near.Drive()
	}
	for end := time.Now().Add(patience); !l.near.Arm(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody says that there is room")
		}
	}
}
