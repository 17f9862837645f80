// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

// unread opens a link whose owner has not looked yet at all of n messages that the initiator was
// told are done. The owner looks at them once one of its queue pairs ends.
func unread(t *testing.T, d hosts, n int) *testLink {
	t.Helper()
	cfg := Config{BatchesMax: 4096, NotifyMax: n, ConnsMax: 2}
	l := openLink(t, d, testShape{spin: true, pairs: len(d.near), config: cfg})
	for i := range d.far {
		d.fake.Device(2*i+1).Set(fakeverbs.Blind, 1)
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
			far.Set(fakeverbs.Purge, of.purge)
			l := unread(t, d, unreadMany)
			far.Set(fakeverbs.Blind, of.blind)
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
	far.Set(fakeverbs.Purge, 1)
	l := unread(t, d, n)
	far.Set(fakeverbs.Frozen, 2)
	far.Set(fakeverbs.Blind, 2)
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
	d.fake.Device(1).Set(fakeverbs.Blind, 0)
	require.EqualValues(t, unreadMany, l.back.Seen())
}
