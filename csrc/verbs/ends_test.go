// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// outcomes takes so many completions.
func (l *testLink) outcomes(t *testing.T, n int) map[uint64]error {
	t.Helper()
	all := map[uint64]error{}
	for range n {
		d := l.take(t)
		if _, twice := all[d.Tag]; twice {
			t.Fatalf("tag %d completes twice", d.Tag)
		}
		all[d.Tag] = Error(d)
	}
	return all
}

// cancelBatches checks that a batch ends once, that what it had posted is waited for, and that the
// queue pair is as good as before.
func cancelBatches(t *testing.T, d hosts) {
	d.slow()
	l := openLink(t, d, testShape{config: Config{Depth: 2, FlightMax: 64 << 10,
		SliceMax: 32 << 10}})
	fill(l.local, 1)
	const n = 1 << 20
	var tags []uint64
	for i := range 4 {
		at := uint64(i) * n
		tags = append(tags, l.submit(t, driver.Write, nil, driver.Desc{Local: at, Remote: at,
			Len: n}))
	}
	msg := l.submit(t, driver.Write, []byte("never"), driver.Desc{Len: n})
	for _, tag := range []uint64{tags[1], tags[3], msg, 12345} {
		l.conn.Cancel(tag)
		l.conn.Cancel(tag)
	}
	all := l.outcomes(t, 5)
	for i, tag := range append(tags, msg) {
		err, aborted := all[tag], i == 1 || i == 3 || i == 4
		if aborted && !errors.Is(err, driver.ErrAborted) || !aborted && err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	if !bytes.Equal(l.local[:n], l.remote[:n]) ||
		!bytes.Equal(l.local[2*n:3*n], l.remote[2*n:3*n]) {
		t.Error("other bytes in what was not cancelled")
	}
	if c := l.counters(t); c.InFlight != 0 {
		t.Errorf("%d bytes under way after the completions", c.InFlight)
	}
	require.NoError(t, l.outcome(t, l.submit(t, driver.Write, []byte("first"))))
	if n := l.notif(t); string(n.Data) != "first" {
		t.Errorf("message %q of a batch that was cancelled, or none", n.Data)
	}
}

// revokeGrants checks that an epoch which is over fails batches, and only those of that import.
func revokeGrants(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	require.NoError(t, l.move(t, driver.Write, driver.Desc{Len: 100}))
	before := append([]byte(nil), l.remote[:5000]...)
	require.NoError(t, l.far.Revoke(testKey))
	l.epoch++
	fresh := l.imported(t) // with the key of before, as the NIC gives it
	fill(l.local, 2)
	stale := l.submit(t, driver.Write, []byte("stale"), driver.Desc{Len: 5000})
	l.tag++
	good := l.tag
	require.NoError(t, l.conn.Submit(good,
		batchOf(driver.Write, []driver.Desc{{Remote: 9000, Len: 4000, LocalKey: testKey,
			RemoteKey: fresh}}, []byte("good"))))
	if n := l.awaitNews(t, PairFailed); n.Pair != 0 {
		t.Errorf("news %+v", n)
	}
	l.make(t, 0)
	l.awaitNews(t, PairLive)
	all := l.outcomes(t, 2)
	if !errors.Is(all[stale], driver.ErrRevoked) {
		t.Errorf("write with an old key: %v", all[stale])
	}
	if all[good] != nil {
		t.Errorf("write with a new key: %v", all[good])
	}
	if !bytes.Equal(before, l.remote[:5000]) {
		t.Error("bytes landed with an old key")
	}
	if n := l.notif(t); string(n.Data) != "good" {
		t.Errorf("message %q", n.Data)
	}
	if err := l.conn.Submit(1, batchOf(driver.Read, l.descs(driver.Desc{Len: 1}), nil)); !errors.Is(
		err, driver.ErrRevoked) {
		t.Errorf("read with an old key: %v", err)
	}
}

// endConnections checks that all batches end, once, and nothing is accepted afterwards.
func endConnections(t *testing.T, d hosts) {
	d.slow()
	for status, want := range map[int32]error{Closed: driver.ErrClosed, Lost: driver.ErrPeerLost} {
		l := openLink(t, d, testShape{config: Config{Depth: 2, FlightMax: 64 << 10,
			SliceMax: 32 << 10}})
		for range 5 {
			l.submit(t, driver.Write, []byte{1}, driver.Desc{Len: 1 << 20})
		}
		l.conn.End(status, true)
		l.conn.End(Aborted, false)
		ended := 0
		for _, err := range l.outcomes(t, 5) {
			if errors.Is(err, want) {
				ended++
			} else if err != nil {
				t.Errorf("%v, want %v", err, want)
			}
		}
		if ended == 0 {
			t.Error("all batches went through")
		}
		if err := l.conn.Submit(1, batchOf(driver.Write, l.descs(driver.Desc{Len: 1}),
			nil)); !errors.Is(err, want) {
			t.Errorf("submit to what has ended: %v, want %v", err, want)
		}
		if _, err := l.conn.Import(Import{Size: 10, RemoteKeys: []uint32{1}}); !errors.Is(err,
			want) {
			t.Errorf("import from what has ended: %v, want %v", err, want)
		}
		if _, err := l.conn.PairMake(0, 0); !errors.Is(err, driver.ErrClosed) {
			t.Errorf("a queue pair of what has ended: %v", err)
		}
		l.close(t)
	}
}

// drainConnections checks that what is posted goes through and the rest ends.
func drainConnections(t *testing.T, d hosts) {
	d.slow()
	l := openLink(t, d, testShape{config: Config{Depth: 2, FlightMax: 64 << 10,
		SliceMax: 32 << 10}})
	fill(l.local, 3)
	small := l.submit(t, driver.Write, nil, driver.Desc{Len: 1000})
	large := l.submit(t, driver.Write, nil, driver.Desc{Remote: 1 << 20, Len: 1 << 20})
	require.NoError(t, l.conn.Drain(patience))
	all := l.outcomes(t, 2)
	if all[small] != nil || !errors.Is(all[large], driver.ErrClosed) {
		t.Errorf("outcomes %v", all)
	}
	if !bytes.Equal(l.local[:1000], l.remote[:1000]) {
		t.Error("other bytes")
	}
	if err := l.conn.Submit(1, batchOf(driver.Write, l.descs(driver.Desc{Len: 1}),
		nil)); !errors.Is(err, driver.ErrClosed) {
		t.Errorf("submit while it drains: %v", err)
	}
}

// remakePairs ends queue pairs with work under way, from either side, and makes them anew: each
// byte gets there and each message once, in order.
func remakePairs(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{pairs: len(d.near), config: Config{SliceMax: 32 << 10,
		NotifyMax: 32}})
	fill(l.local, 4)
	const n = 200 << 10
	var tags []uint64
	for round := range 8 {
		for i := range 3 {
			at := uint64(len(tags)%16) * n
			_ = i
			tags = append(tags, l.submit(t, driver.Write, numbered(len(tags)),
				driver.Desc{Local: at, Remote: at, Len: n}))
		}
		pair := round % len(d.near)
		if round%2 == 0 {
			require.NoError(t, l.conn.PairEnd(pair))
		} else { // the initiator finds out by itself, or not yet
			require.NoError(t, l.back.PairEnd(pair))
			require.NoError(t, l.conn.PairEnd(pair))
		}
		l.drainNews()
		l.make(t, pair)
		for i := range 3 {
			if notif := l.notif(t); !bytes.Equal(notif.Data, numbered(3*round+i)) {
				t.Fatalf("message %x, want %d", notif.Data, 3*round+i)
			}
		}
		for tag, err := range l.outcomes(t, 3) {
			if err != nil {
				t.Errorf("batch %d: %v", tag, err)
			}
		}
	}
	if n, ok := l.far.Receive(); ok {
		t.Errorf("message %x comes again", n.Data)
	}
	if !bytes.Equal(l.local[:16*n], l.remote[:16*n]) {
		t.Error("other bytes")
	}
}

// drainNews takes what news there is: of queue pairs that failed while a test ended them.
func (l *testLink) drainNews() {
	for _, ok := l.near.News(); ok; _, ok = l.near.News() {
	}
}

// waitForPairs checks that batches wait while no queue pair is live, and can be cancelled then.
func waitForPairs(t *testing.T, d hosts) {
	l := openLink(t, d, testShape{})
	require.NoError(t, l.conn.PairEnd(0))
	keep := l.submit(t, driver.Write, numbered(1), driver.Desc{Len: 1000})
	gone := l.submit(t, driver.Write, numbered(2), driver.Desc{Len: 1000})
	l.conn.Cancel(gone)
	if err := l.outcome(t, gone); !errors.Is(err, driver.ErrAborted) {
		t.Errorf("cancelled while it waits: %v", err)
	}
	var done [1]Done
	time.Sleep(20 * time.Millisecond)
	if l.near.Poll(done[:]) != 0 {
		t.Fatalf("completion %+v without a queue pair", done[0])
	}
	l.make(t, 0)
	require.NoError(t, l.outcome(t, keep))
	if n := l.notif(t); !bytes.Equal(n.Data, numbered(1)) {
		t.Errorf("message %x", n.Data)
	}
}
