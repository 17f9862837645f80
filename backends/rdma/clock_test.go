// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/leak"
)

// testClock is a clock that stands until a test moves it.
type testClock struct {
	mu     sync.Mutex
	time   time.Time
	alarms []alarm
}

type alarm struct {
	at   time.Time
	ring chan time.Time // has one place
}

func newTestClock() *testClock { return &testClock{time: time.Unix(1000, 0)} }

// clock is what a Config takes.
func (c *testClock) clock() clock { return clock{c.now, c.after} }

// openClocked is openPair for two backends with a clock of their own. It runs while they close.
func openClocked(t *testing.T, cfg Config) (*testClock, *pair) {
	t.Helper()
	leak.Check(t)
	c := newTestClock()
	cfg.clock = c.clock()
	p := &pair{outcomes: map[uint64]error{}}
	for _, end := range []**Backend{&p.near, &p.far} {
		b, err := newFake(cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.during(t, b.Close)) })
		*end = b
	}
	p.peer = p.connect(t)
	return c, p
}

func (c *testClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.time
}

func (c *testClock) after(d time.Duration) <-chan time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	ring := make(chan time.Time, 1)
	c.alarms = append(c.alarms, alarm{c.time.Add(d), ring})
	return ring
}

// jump moves the clock at once, as it moves for a process that is stopped meanwhile.
func (c *testClock) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.time = c.time.Add(d)
	waiting := c.alarms[:0]
	for _, a := range c.alarms {
		if a.at.After(c.time) {
			waiting = append(waiting, a)
		} else {
			a.ring <- c.time
		}
	}
	c.alarms = waiting
}

// run moves the clock from alarm to alarm, as it moves for a process that runs, until a condition
// holds. A goroutine that is too slow to keep up sees a process that stood still.
func (c *testClock) run(t *testing.T, what string, ok func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		if ok() {
			return true
		}
		c.jump(c.next())
		return false
	})
}

// next is when the next alarm rings, or soon.
func (c *testClock) next() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	least := beatMin
	for i, a := range c.alarms {
		if d := a.at.Sub(c.time); i == 0 || d < least {
			least = d
		}
	}
	return least
}

// during runs the clock until f returns.
func (c *testClock) during(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	c.run(t, "a call returns", func() bool { return len(done) > 0 })
	return <-done
}

// await runs the clock until a batch ends.
func (c *testClock) await(t *testing.T, p *pair, tag uint64) error {
	t.Helper()
	return c.during(t, func() error { return p.await(t, tag) })
}

// awaitLost runs the clock until the peer is lost.
func (c *testClock) awaitLost(t *testing.T, p *pair) {
	t.Helper()
	c.run(t, "the peer is lost", func() bool { return p.peer.gone.Load() })
}

// runFor is run for some time.
func (c *testClock) runFor(t *testing.T, d time.Duration) {
	t.Helper()
	end := c.now().Add(d)
	c.run(t, "time passes", func() bool { return !c.now().Before(end) })
}

// since is how far the clock has moved.
func (c *testClock) since(begin time.Time) time.Duration { return c.now().Sub(begin) }

// TestStopwatch counts what a process that runs sees, and nothing of the time in which it stood
// still, nor of the beat after that.
func TestStopwatch(t *testing.T) {
	c := newTestClock()
	s := newStopwatch(c.clock(), 32*time.Second)
	begin := s.at
	require.Equal(t, beatMax, s.beat)
	counts := func(want time.Duration) {
		t.Helper()
		require.Equal(t, want, s.look().Sub(begin))
	}
	for i := range time.Duration(10) {
		counts(i * beatMax)
		c.jump(beatMax)
	}
	counts(10 * beatMax)
	c.jump(2 * beatMax)
	counts(12 * beatMax)
	c.jump(time.Hour)
	counts(12 * beatMax)
	c.jump(beatMax / 2)
	counts(12 * beatMax)
	c.jump(beatMax)
	counts(12*beatMax + beatMax/2)
	s.rest()
	c.jump(time.Hour)
	counts(12*beatMax + beatMax/2)
	c.jump(beatMax)
	counts(13*beatMax + beatMax/2)
}

// TestStopwatchTicks has it look once a beat, and when the time has come.
func TestStopwatchTicks(t *testing.T) {
	c := newTestClock()
	s := newStopwatch(c.clock(), 32*beatMin)
	rings := func(until, want time.Duration) {
		t.Helper()
		s.tick(s.at.Add(until))
		require.Equal(t, want, c.alarms[len(c.alarms)-1].at.Sub(c.now()))
	}
	rings(time.Hour, beatMin)
	rings(beatMin/2, beatMin/2)
	c.jump(time.Hour)
	s.look()
	rings(0, beatMin) // what is held does not make it spin
}

// TestPassStandsStill has a process stop in a wait: the wait goes on for as long as was left.
func TestPassStandsStill(t *testing.T) {
	c := newTestClock()
	begin, passed := c.now(), make(chan bool, 1)
	go func() { passed <- c.clock().pass(time.Second, nil, nil) }()
	c.runFor(t, time.Second/2)
	c.jump(time.Hour)
	c.run(t, "the wait ends", func() bool { return len(passed) > 0 })
	require.True(t, <-passed)
	require.GreaterOrEqual(t, c.since(begin), time.Hour+time.Second)
}

// TestStopwatchOnABusyMachine has each second look be late, and each look: a wait ends all the
// same, but no sooner than it would where none was.
func TestStopwatchOnABusyMachine(t *testing.T) {
	for _, often := range []int{1, 2} {
		c := newTestClock()
		s := newStopwatch(c.clock(), time.Second)
		begin, started := s.at, c.now()
		for i := range 1000 {
			c.jump(s.beat)
			if i%often == 0 {
				c.jump(2 * s.beat)
			}
			s.look()
		}
		require.GreaterOrEqual(t, s.at.Sub(begin), time.Second)
		require.Greater(t, c.since(started), 8*s.at.Sub(begin))
	}
}
