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

// TestFenceWhileALandingStands has the owner's worker stand between its look at ticket and age
// and the copy of a write: the fence waits for it, and nothing lands behind the fence.
func TestFenceWhileALandingStands(t *testing.T) {
	spots, l := openStanding(t)
	l.fenceStands(t, stand(t, spots, AtCopy, func() error {
		return l.begins(driver.Write)
	}))
	clear(l.remote)
	l.tag = 1
	// it may have landed before the fence
	require.NotErrorIs(t, l.outcome(t, 1), driver.ErrFull)
	require.NoError(t, l.far.Fence(testKey, 3))
	require.True(t, bytes.Equal(make([]byte, parkedBytes), l.remote[:parkedBytes]),
		"a byte landed behind the fence")
}

// TestFenceWhileAnAnswerStands does so with the answer to a read: it has no byte that was
// written behind the fence.
func TestFenceWhileAnAnswerStands(t *testing.T) {
	spots, l := openStanding(t)
	fill(l.remote, 5)
	want := slices.Clone(l.remote[:parkedBytes])
	l.fenceStands(t, stand(t, spots, AtAnswer, func() error {
		return l.begins(driver.Read)
	}))
	clear(l.remote)
	if err := l.outcome(t, 1); err == nil {
		require.True(t, bytes.Equal(want, l.local[:parkedBytes]),
			"a read has bytes that were written behind the fence")
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

// fenceStands fences the owner's memory while its worker stands: the fence ends behind it.
func (l *lane) fenceStands(t *testing.T, goOn func() error) {
	t.Helper()
	fenced := make(chan error, 1)
	go func() { fenced <- l.far.Fence(testKey, 2) }()
	select {
	case err := <-fenced:
		t.Fatalf("the fence returned %v while a worker stood behind its look", err)
	case <-time.After(50 * time.Millisecond): // it cannot be seen to wait
	}
	require.NoError(t, goOn())
	require.NoError(t, <-fenced)
}
