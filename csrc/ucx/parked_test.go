// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// parkedBytes is what a thread has in hand when it stands.
const parkedBytes = 8 << 10

func openSpots(t *testing.T) *Spots {
	t.Helper()
	s, err := NewSpots()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// stand calls f, which has a thread come to a spot and stand there until goOn. The end of the test
// lets it go on, too: a test that fails would otherwise close what the thread uses.
func stand(t *testing.T, s *Spots, spot int, f func() error) (goOn func() error) {
	t.Helper()
	s.Park(spot)
	over := make(chan error, 1)
	go func() { over <- f() }() // it may be its thread that stands
	goOn = sync.OnceValue(func() error {
		s.Park(AtNone)
		return errors.Join(s.Leave(), <-over)
	})
	t.Cleanup(func() { _ = goOn() })
	require.NoError(t, s.came.SetReadDeadline(time.Now().Add(testLimit)))
	require.NoError(t, s.Await())
	return goOn
}

// TestRevokeWhileALandingStands has the owner's worker stand between its look at ticket and age
// and the copy of a write: Revoke waits for it, and nothing lands behind the revoke.
func TestRevokeWhileALandingStands(t *testing.T) {
	spots, l := openStanding(t)
	l.revokeStands(t, stand(t, spots, AtCopy, func() error {
		return l.begins(driver.Write)
	}))
	clear(l.remote)
	l.tag = 1
	// it may have landed before the revoke
	require.NotErrorIs(t, l.outcome(t, 1), driver.ErrFull)
	require.NoError(t, l.far.Revoke(testKey, testLimit))
	require.True(t, bytes.Equal(make([]byte, parkedBytes), l.remote[:parkedBytes]),
		"a byte landed behind the revoke")
}

// TestRevokeWhileAnAnswerStands does so with the answer to a read: it has no byte that was
// written behind the revoke.
func TestRevokeWhileAnAnswerStands(t *testing.T) {
	spots, l := openStanding(t)
	fill(l.remote, 5)
	want := slices.Clone(l.remote[:parkedBytes])
	l.revokeStands(t, stand(t, spots, AtAnswer, func() error {
		return l.begins(driver.Read)
	}))
	clear(l.remote)
	if err := l.outcome(t, 1); err == nil {
		require.True(t, bytes.Equal(want, l.local[:parkedBytes]),
			"a read has bytes that were written behind the revoke")
	} else {
		require.ErrorIs(t, err, driver.ErrRevoked)
	}
}

// openStanding opens a lane whose owner alone has spots.
func openStanding(t *testing.T) (*Spots, *lane) {
	t.Helper()
	spots := openSpots(t)
	c := overTCP
	c.Spots = spots
	l := openLane(t, c)
	fill(l.local, 1)
	return spots, l
}

// begins submits what has a thread come to a spot.
func (l *lane) begins(op driver.Op) error {
	return submit(l.conn, op, 1, []driver.Desc{l.desc(0, 0, parkedBytes)}, nil)
}

// revokeStands revokes the owner's memory while its worker stands: Revoke ends behind it.
func (l *lane) revokeStands(t *testing.T, goOn func() error) {
	t.Helper()
	revoked := make(chan error, 1)
	go func() { revoked <- l.far.Revoke(testKey, testLimit) }()
	require.ErrorIs(t, l.far.Revoke(testKey, time.Millisecond), driver.ErrTimeout)
	require.Empty(t, revoked, "Revoke returned while a worker stood behind its look")
	require.NoError(t, goOn())
	require.NoError(t, <-revoked)
}
