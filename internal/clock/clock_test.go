// SPDX-License-Identifier: Apache-2.0

package clock

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHost(t *testing.T) {
	c := Host()
	begin := c.Now()
	require.GreaterOrEqual(t, begin, int64(time.Hour))
	over, timer := After(c, time.Millisecond)
	<-over
	require.False(t, timer.Stop())
	c.Sleep(time.Millisecond)
	require.GreaterOrEqual(t, c.Now()-begin, int64(2*time.Millisecond))
	over, timer = After(c, time.Hour)
	require.True(t, timer.Stop())
	select {
	case <-over:
		t.Error("a timer that was stopped has ended")
	default:
	}
}

// late is a clock whose timers may fire later than they are due: as often as fire is called.
type late struct {
	Clock
	due []func()
}

func (l *late) AfterFunc(_ time.Duration, f func()) Timer { return &lateTimer{l, f} }

func (l *late) fire() {
	due := l.due
	l.due = nil
	for _, f := range due {
		f()
	}
}

type lateTimer struct {
	l *late
	f func()
}

func (t *lateTimer) Stop() bool { t.l.due = nil; return true }

func (t *lateTimer) Reset(time.Duration) bool {
	t.l.due = []func(){t.f}
	return true
}

// TestAfterRunning: however late each beat is, all of them must come.
func TestAfterRunning(t *testing.T) {
	c := &late{}
	calls := 0
	timer := AfterRunning(c, time.Second, func() { calls++ })
	for range beats - 1 {
		c.fire()
	}
	require.Zero(t, calls)
	c.fire()
	require.Equal(t, 1, calls)
	c.fire()
	require.Equal(t, 1, calls, "it was called again")
	require.False(t, timer.Stop())

	timer.Reset(time.Second)
	c.fire()
	require.True(t, timer.Reset(time.Second))
	for range beats - 1 {
		c.fire()
	}
	require.Equal(t, 1, calls)
	require.True(t, timer.Stop())
	c.fire()
	require.Equal(t, 1, calls, "it was called though it was stopped")

	over := make(chan struct{})
	AfterRunning(Host(), time.Millisecond, func() { close(over) })
	<-over
}
