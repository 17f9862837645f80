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
	"github.com/sluicehq/sluice/internal/testing/standin"
	"github.com/sluicehq/sluice/internal/testing/testkit"
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

// TestDrain: what is posted goes through, and the rest ends.
func TestDrain(t *testing.T) {
	d := fakeDevices(t, 1)
	d.fake.Device(0).Set("rate", 50)
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

// TestPairsAreRemade ends queue pairs with work under way, from either side, and makes them anew:
// each byte gets there and each message once, in order.
func TestPairsAreRemade(t *testing.T) {
	l := openLink(t, fakeDevices(t, 2), testShape{pairs: 2, config: Config{SliceMax: 32 << 10,
		NotifyMax: 32}})
	fill(l.local, 4)
	const n = 200 << 10
	var tags []uint64
	for round := range 8 {
		for range 3 {
			at := uint64(len(tags)%16) * n
			tags = append(tags, l.submit(t, driver.Write, numbered(len(tags)),
				driver.Desc{Local: at, Remote: at, Len: n}))
		}
		pair := round % 2
		if round%2 == 0 {
			require.NoError(t, l.conn.PairEnd(pair))
		} else { // the initiator finds out by itself, or not yet
			require.NoError(t, l.back.PairEnd(pair))
			require.NoError(t, l.conn.PairEnd(pair))
		}
		for _, ok := l.near.News(); ok; _, ok = l.near.News() { // of queue pairs that we ended
		}
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

// TestBatchesWaitForPairs: batches wait while no queue pair is live, and can be cancelled then.
func TestBatchesWaitForPairs(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{})
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

// unread opens a link whose owner has not looked yet at all of n messages that the initiator was
// told are done. The owner looks at them once one of its queue pairs ends.
func unread(t *testing.T, d hosts, n int) *testLink {
	t.Helper()
	cfg := Config{BatchesMax: 4096, NotifyMax: n, ConnsMax: 2}
	l := openLink(t, d, testShape{spin: true, pairs: len(d.near), config: cfg})
	for i := range d.far {
		d.fake.Device(2*i+1).Set("blind", 1)
	}
	for range n {
		l.tag++
		b := &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail}
		require.NoError(t, l.conn.Submit(l.tag, b))
	}
	for range n {
		require.NoError(t, Error(l.take(t)))
	}
	require.Less(t, l.far.ring.Notifs.Load(), uint32(n))
	return l
}

// unreadMany is more than the owner takes in one look at its completions.
const unreadMany = 3000

// TestEndedPairIsDrained ends an owner's queue pair over which more has arrived than it has looked
// at: what the initiator was told is done has arrived.
func TestEndedPairIsDrained(t *testing.T) {
	for name, of := range map[string]struct{ blind, purge uint32 }{
		"kept": {1, 0}, "purged": {1, 1}, "found behind its end": {3, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := fakeDevices(t, 1)
			far := d.fake.Device(1)
			far.Set("purge", of.purge)
			l := unread(t, d, unreadMany)
			far.Set("blind", of.blind)
			require.NoError(t, l.back.PairEnd(0))
			require.EqualValues(t, unreadMany, l.far.ring.Notifs.Load())
			require.EqualValues(t, unreadMany, l.back.Seen())
		})
	}
}

// TestGivenUpPairIsDrained ends an owner's queue pair whose NIC does nothing any more, so that the
// queue pair is given up: what has arrived before is taken off the queue before the queue pair is
// destroyed.
func TestGivenUpPairIsDrained(t *testing.T) {
	const n = 100 // one look takes all of them
	d := fakeDevices(t, 1)
	far := d.fake.Device(1)
	far.Set("purge", 1)
	l := unread(t, d, n)
	far.Set("frozen", 2)
	far.Set("blind", 2)
	require.NoError(t, l.back.PairEnd(0))
	require.EqualValues(t, n, l.far.ring.Notifs.Load())
	require.EqualValues(t, n, l.back.Seen())
}

// TestSeenLooksAtAll has the owner's other queue pair end: what it says it has seen includes all
// that has arrived over the first.
func TestSeenLooksAtAll(t *testing.T) {
	d := fakeDevices(t, 2)
	l := unread(t, d, unreadMany)
	require.NoError(t, l.back.PairEnd(1))
	d.fake.Device(1).Set("blind", 0)
	require.EqualValues(t, unreadMany, l.back.Seen())
}

// keep has the NIC neither stop nor destroy the next queue pair, as often as said.
func keep(d standin.VerbsDevice, times uint32) {
	d.Set("modify_busy", times)
	d.Set("destroy_busy", times)
}

// TestKeptQueuePairDies has the NIC destroy a queue pair only when it is asked once more, which
// nothing but the thread does: the queue pair is news then, and what it had under way is done over
// a new one.
func TestKeptQueuePairDies(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.local, 3)
	near := d.fake.Device(0)
	near.Set("frozen", 1)
	tag := l.submit(t, driver.Write, nil, driver.Desc{Len: 4096})
	keep(near, 1)
	require.ErrorIs(t, l.conn.PairEnd(0), driver.ErrUnproven)
	require.ErrorIs(t, l.conn.PairSettle(0, 0), driver.ErrBusy, "what was posted is not over")
	l.awaitNews(t, PairFailed)
	near.Set("frozen", 0)
	l.make(t, 0)
	l.awaitNews(t, PairLive)
	require.NoError(t, l.outcome(t, tag))
	require.True(t, bytes.Equal(l.remote[:4096], l.local[:4096]))
}

// TestCloseWithKeptQueuePair closes a context whose NIC keeps a queue pair: the end is bounded, and
// says that nothing is proved.
func TestCloseWithKeptQueuePair(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	near := d.fake.Device(0)
	near.Set("frozen", 1)
	l.submit(t, driver.Read, nil, driver.Desc{Len: 4096})
	keep(near, 1)
	require.ErrorIs(t, l.conn.Close(), driver.ErrUnproven)
	require.NoError(t, l.conn.Close())
	l.conn = nil
}

// TestEndWithoutAProof ends a connection with requests under way. Where the peer has not said that
// its queue pairs are gone too, what is on its way to it may land: those batches say so, also one
// that was cancelled. What reads does not: our queue pair is gone.
func TestEndWithoutAProof(t *testing.T) {
	for _, proved := range []bool{false, true} {
		d := fakeDevices(t, 1)
		l := openLink(t, d, testShape{})
		d.fake.Device(0).Set("frozen", 1)
		unproven := map[uint64]bool{
			l.submit(t, driver.Write, nil, driver.Desc{Len: 4096}): !proved,
			l.submit(t, driver.Read, nil, driver.Desc{Len: 4096}):  false,
			l.submit(t, driver.Write, []byte("sent")):              !proved,
		}
		cancelled := l.submit(t, driver.Write, nil, driver.Desc{Len: 4096})
		unproven[cancelled] = !proved
		l.conn.Cancel(cancelled)
		require.NoError(t, l.conn.End(Closed, proved))
		for tag, err := range l.outcomes(t, len(unproven)) {
			if tag != cancelled || !proved {
				require.ErrorIs(t, err, driver.ErrClosed)
			}
			if errors.Is(err, driver.ErrUnproven) != unproven[tag] {
				testkit.ErrorBroken(t, "batch %d, proved %v: %v", tag, proved, err)
			}
		}
		l.close(t)
	}
}
