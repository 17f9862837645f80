// SPDX-License-Identifier: Apache-2.0

package clock_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestStopwatch counts what a process that runs sees, and nothing of the time in which it stood
// still, nor of the beat after that.
func TestStopwatch(t *testing.T) {
	c := testkit.NewClock()
	s := clock.NewStopwatch(c, 32*time.Second)
	begin := s.Look()
	counts := func(want time.Duration) {
		t.Helper()
		require.Equal(t, want, s.Look().Sub(begin))
	}
	for i := range time.Duration(10) {
		counts(i * clock.BeatMax)
		c.Jump(clock.BeatMax)
	}
	counts(10 * clock.BeatMax)
	c.Jump(2 * clock.BeatMax)
	counts(12 * clock.BeatMax)
	c.Jump(time.Hour)
	counts(12 * clock.BeatMax)
	c.Jump(clock.BeatMax / 2)
	counts(12 * clock.BeatMax)
	c.Jump(clock.BeatMax)
	counts(12*clock.BeatMax + clock.BeatMax/2)
	s.Rest()
	c.Jump(time.Hour)
	counts(12*clock.BeatMax + clock.BeatMax/2)
	c.Jump(clock.BeatMax)
	counts(13*clock.BeatMax + clock.BeatMax/2)
}

// TestStopwatchTicks has it look once a beat, and when the time has come.
func TestStopwatchTicks(t *testing.T) {
	c := testkit.NewClock()
	s := clock.NewStopwatch(c, 32*clock.BeatMin)
	at := s.Look()
	rings := func(until, want time.Duration) {
		t.Helper()
		_, timer := s.Tick(at.Add(until))
		require.Equal(t, want, c.Next(time.Hour))
		timer.Stop()
	}
	rings(time.Hour, clock.BeatMin)
	rings(clock.BeatMin/2, clock.BeatMin/2)
	c.Jump(time.Hour)
	s.Look()
	rings(0, clock.BeatMin) // what is held does not make it spin
}

// TestStopwatchOnABusyMachine has each second look be late, and each look: a wait ends all the
// same, but no sooner than it would where none was.
func TestStopwatchOnABusyMachine(t *testing.T) {
	for _, often := range []int{1, 2} {
		c := testkit.NewClock()
		const beat = time.Second / 32
		s := clock.NewStopwatch(c, time.Second)
		begin, started := s.Look(), c.Now()
		for i := range 1000 {
			c.Jump(beat)
			if i%often == 0 {
				c.Jump(2 * beat)
			}
			s.Look()
		}
		counted := s.Look().Sub(begin)
		require.GreaterOrEqual(t, counted, time.Second)
		require.Greater(t, time.Duration(c.Now()-started), 8*counted)
	}
}

// TestPass has a process stop in a wait: that counts as one beat of 32, and the wait goes on.
func TestPass(t *testing.T) {
	c := testkit.NewClock()
	begin, passed, stop := c.Now(), make(chan bool, 1), make(chan struct{})
	go func() { passed <- clock.Pass(c, time.Second, nil, nil) }()
	set := func() {
		require.Eventually(t, func() bool { return c.Next(time.Hour) < time.Hour }, 10*time.Second,
			time.Millisecond)
	}
	set()
	c.Advance(time.Second / 2)
	c.Jump(time.Hour)
	c.Advance(time.Second/2 - time.Second/32 - 1)
	require.Empty(t, passed)
	c.Advance(1)
	require.True(t, <-passed)
	require.EqualValues(t, time.Hour+time.Second-time.Second/32, c.Now()-begin)
	go func() { passed <- clock.Pass(c, time.Second, nil, stop) }()
	set()
	close(stop)
	require.False(t, <-passed)
	require.Equal(t, time.Hour, c.Next(time.Hour), "its timer runs on")
}
