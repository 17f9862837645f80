// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/silence"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/manualclock"
)

// testClock is a clock that stands until a test moves it.
type testClock struct {
	*manualclock.Clock
	gone atomic.Int64 // when all hosts stopped to acknowledge anything; 0: they did not
}

func newTestClock() *testClock { return &testClock{Clock: manualclock.New()} }

// partition has no host acknowledge anything any more.
func (c *testClock) partition() { c.gone.Store(c.Now()) }

// kernel implements Config.kernel.
func (c *testClock) kernel(conn syscall.RawConn) silence.Outbound {
	if at := c.gone.Load(); at != 0 {
		return silence.Outbound{Unacked: true, Pending: true, SinceAck: time.Duration(c.Now() - at)}
	}
	return silence.Query(conn)
}

// openClocked is openPair for two backends with a clock of their own. It runs while they close.
func openClocked(t *testing.T, cfg Config) (*testClock, *pair) {
	t.Helper()
	leak.Check(t)
	c := newTestClock()
	cfg.clock, cfg.kernel = c, c.kernel
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

// run moves the clock from timer to timer, as it moves for a process that runs, until a condition
// holds. A goroutine that is too slow to keep up sees a process that stood still.
func (c *testClock) run(t *testing.T, what string, ok func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		if ok() {
			return true
		}
		next := c.Next(clock.BeatMax)
		if next == clock.BeatMax { // no timer may be set
			next = clock.BeatMin
		}
		c.Jump(next)
		return false
	})
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
	end := c.Now() + int64(d)
	c.run(t, "time passes", func() bool { return c.Now() >= end })
}

// since is how far the clock has moved.
func (c *testClock) since(begin int64) time.Duration { return time.Duration(c.Now() - begin) }
