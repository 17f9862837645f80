// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"os"
	"runtime"
	"runtime/pprof"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// patience bounds what must happen but not when.
const patience = 30 * time.Second

func mustEvent(t testing.TB) *Event {
	t.Helper()
	e, err := NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// within fails the test instead of hanging it.
func within(t testing.TB, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		t.Fatalf("%s did not return", what)
		return nil
	}
}

// overBoth does the same with events that are eventfds and with those of virtual time.
func overBoth(t *testing.T, do func(t *testing.T)) {
	t.Run("eventfd", do)
	t.Run("channel", func(t *testing.T) { inVirtualTime(t, do) })
}

func TestSignalBeforeWait(t *testing.T) { overBoth(t, signalBeforeWait) }

func signalBeforeWait(t *testing.T) {
	e := mustEvent(t)
	for range 3 {
		require.NoError(t, e.Signal())
	}
	require.NoError(t, within(t, "Wait", e.Wait))
	require.False(t, e.Drain(), "three signals woke more than one Wait")
}

func TestDrain(t *testing.T) { overBoth(t, drainOnce) }

func drainOnce(t *testing.T) {
	e := mustEvent(t)
	require.False(t, e.Drain(), "a new event is signalled")
	_ = e.Signal()
	if !e.Drain() || e.Drain() {
		t.Error("a signal must be drained exactly once")
	}
}

func TestEverySignalWakesItsWait(t *testing.T) { overBoth(t, everySignalWakesItsWait) }

func everySignalWakesItsWait(t *testing.T) {
	ping, pong := mustEvent(t), mustEvent(t)
	const rounds = 2000
	go func() {
		for range rounds {
			if ping.Wait() != nil || pong.Signal() != nil {
				return
			}
		}
	}()
	for i := range rounds {
		require.NoError(t, ping.Signal())
		require.NoError(t, pong.SetDeadline(time.Now().Add(patience)))
		require.NoError(t, pong.Wait(), "round %d", i)
	}
}

func TestWaitersHoldNoThreads(t *testing.T) {
	before := pprof.Lookup("threadcreate").Count()
	const sleepers = 100
	var wg sync.WaitGroup
	events := make([]*Event, sleepers)
	for i := range events {
		events[i] = mustEvent(t)
		wg.Go(func() {
			if err := events[i].Wait(); err != nil {
				t.Error(err)
			}
		})
	}
	for range 100 {
		runtime.Gosched()
	}
	time.Sleep(20 * time.Millisecond) // lets them fall asleep; too short only weakens the test
	if grown := pprof.Lookup("threadcreate").Count() - before; grown > sleepers/4 {
		t.Errorf("%d sleeping goroutines hold %d threads", sleepers, grown)
	}
	for _, e := range events {
		_ = e.Signal()
	}
	_ = within(t, "a waiter", func() error { wg.Wait(); return nil })
}

func TestCloseWakesEveryWaiter(t *testing.T) { overBoth(t, closeWakesEveryWaiter) }

func closeWakesEveryWaiter(t *testing.T) {
	e := mustEvent(t)
	results := make(chan error, 3)
	for range cap(results) {
		go func() { results <- e.Wait() }()
	}
	time.Sleep(5 * time.Millisecond)
	require.NoError(t, within(t, "Close", e.Close))
	for range cap(results) {
		require.ErrorIs(t, within(t, "Wait", func() error { return <-results }), os.ErrClosed,
			"a waiter got")
	}
	require.EqualValues(t, driver.ErrClosed, e.Signal(), "Signal after Close")
	require.EqualValues(t, driver.ErrClosed, e.Wait(), "Wait after Close")
	if e.FD() != -1 || e.Drain() || e.SetDeadline(time.Now()) == nil || e.Close() != nil {
		t.Error("a closed event answers as if it were open")
	}
}

func TestDeadline(t *testing.T) { overBoth(t, deadlineEnds) }

func deadlineEnds(t *testing.T) {
	e := mustEvent(t)
	require.NoError(t, e.SetDeadline(time.Now().Add(time.Millisecond)))
	if err := within(t, "Wait", e.Wait); err != driver.ErrTimeout ||
		!errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Wait past its deadline: %v", err)
	}
	_ = e.SetDeadline(time.Time{})
	_ = e.Signal()
	require.NoError(t, within(t, "Wait", e.Wait), "Wait after the deadline was taken away")
}

// TestSignalRacesClose fails under the race detector, or by a write into a
// foreign descriptor, if a number were used after it was closed.
func TestSignalRacesClose(t *testing.T) { overBoth(t, signalRacesClose) }

func signalRacesClose(t *testing.T) {
	for range 200 {
		e, err := NewEvent()
		require.NoError(t, err)
		var wg sync.WaitGroup
		wg.Go(func() {
			for e.Signal() == nil {
			}
		})
		wg.Go(func() {
			for e.Wait() == nil {
			}
		})
		wg.Go(func() {
			for e.FD() >= 0 {
				e.Drain()
			}
		})
		require.NoError(t, e.Close())
		_ = within(t, "a user of the closed event", func() error { wg.Wait(); return nil })
	}
}

func TestEventFromFDIsTheSameEvent(t *testing.T) { overBoth(t, eventFromFDIsTheSameEvent) }

func eventFromFDIsTheSameEvent(t *testing.T) {
	e := mustEvent(t)
	peer, err := EventFromFD(e.FD())
	require.NoError(t, err)
	_ = peer.Signal()
	require.NoError(t, within(t, "Wait", e.Wait))
	require.NoError(t, peer.Close())
	if err := e.Signal(); err != nil || !e.Drain() {
		t.Errorf("closing the duplicate closed the event: %v", err)
	}
}

func TestEventFromFDRefusesOthers(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	if _, err := EventFromFD(int(w.Fd())); !errors.Is(err, driver.ErrNotSupported) {
		t.Errorf("a pipe: %v", err)
	}
	if _, err := EventFromFD(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("no descriptor: %v", err)
	}
}

func TestNothingAllocates(t *testing.T) {
	overBoth(t, func(t *testing.T) {
		e := mustEvent(t)
		if n := testing.AllocsPerRun(100, func() {
			if e.Signal() != nil || e.Wait() != nil || e.Drain() {
				t.Fatal("lost a signal")
			}
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}
