// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/guest"
)

// testWire is the wire between the first two devices; whatever a test does to it, it is mended.
func testWire(t *testing.T) guest.Wire {
	t.Helper()
	w, err := guest.NewWire(0)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Mend(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// steward makes queue pairs anew as they fail, until it is stopped. It returns how often.
func (l *testLink) steward(t *testing.T, stop <-chan struct{}) int {
	made := 0
	for {
		select {
		case <-stop:
			return made
		case <-time.After(time.Millisecond):
		}
		n, ok := l.near.News()
		if !ok || n.Kind != PairFailed {
			continue
		}
		l.make(t, n.Pair)
		made++
	}
}

// mind has a steward, until what it returns is called, or the test ends. That tells how many queue
// pairs were made anew.
func (l *testLink) mind(t *testing.T) (end func() int) {
	stop, ended := make(chan struct{}), make(chan int, 1)
	go func() {
		defer close(ended) // a refused verb ends the steward, and this goroutine
		ended <- l.steward(t, stop)
	}()
	end = sync.OnceValue(func() int {
		close(stop)
		return <-ended
	})
	t.Cleanup(func() { end() }) // before the link is closed
	return end
}

// TestSoakRealVerbsCutOff loses all packets in mid-transfer: the queue pair fails in its time, is
// made anew as often as needed, and everything goes through once the wire is mended, once.
func TestSoakRealVerbsCutOff(t *testing.T) {
	w := testWire(t)
	l := openLink(t, realDevices(t, 1), testShape{timeout: 16, retries: 2,
		config: Config{SliceMax: 64 << 10}})
	fill(l.local, 5)
	first := l.submit(t, driver.Write, numbered(0), driver.Desc{Len: testBytes})
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, w.Loss("100%"))
	second := l.submit(t, driver.Write, numbered(1), driver.Desc{Len: 1000})
	if n := l.awaitNews(t, PairFailed); n.Status != 12 {
		t.Errorf("the queue pair failed with %s", Status(n.Status))
	}
	l.make(t, 0)
	end := l.mind(t)
	time.Sleep(time.Second) // the queue pair that was made anew may fail, too
	require.NoError(t, w.Loss("0%"))
	for _, tag := range []uint64{first, second} {
		if err := l.outcome(t, tag); err != nil {
			t.Error(err)
		}
	}
	t.Logf("made anew %d times", 1+end())
	for i := range 2 {
		if n := l.notif(t); !bytes.Equal(n.Data, numbered(i)) {
			t.Errorf("message %x, want %d", n.Data, i)
		}
	}
	if n, ok := l.far.Receive(); ok {
		t.Errorf("message %x comes again", n.Data)
	}
	if !bytes.Equal(l.local, l.remote) {
		t.Error("other bytes")
	}
	if c := l.counters(t); c.Again == 0 || c.Failures == 0 || c.InFlight != 0 {
		t.Errorf("counters %+v", c)
	}
}

// TestSoakRealVerbsCancelOnDeadWire aborts what cannot get through: it ends when its queue pair is
// drained and settled, and not before.
func TestSoakRealVerbsCancelOnDeadWire(t *testing.T) {
	w := testWire(t)
	l := openLink(t, realDevices(t, 1), testShape{timeout: 16, retries: 2})
	require.NoError(t, w.Loss("100%"))
	tag := l.submit(t, driver.Write, []byte("never"), driver.Desc{Len: 1 << 20})
	l.conn.Cancel(tag)
	l.awaitNews(t, PairFailed)
	var done [1]Done
	if l.near.Poll(done[:]) != 0 {
		t.Fatalf("completion %+v before the other end is over", done[0])
	}
	l.make(t, 0)
	err := l.outcome(t, tag)
	if !errors.Is(err, driver.ErrAborted) {
		t.Errorf("aborted batch: %v", err)
	}
}

// TestSoakRealVerbsBadWire loses and delays packets: no batch fails, nothing is lost. A queue pair
// that fails all the same, or of which soft-RoCE says nothing more, is made anew, as backends/rdma
// does.
func TestSoakRealVerbsBadWire(t *testing.T) {
	w := testWire(t)
	l := openLink(t, realDevices(t, 1), testShape{config: Config{
		StallNanos: uint64(10 * time.Second)}})
	end := l.mind(t)
	for _, fault := range []func() error{func() error {
		return w.Loss("1%")
	}, func() error { return w.Delay("20ms") }} {
		require.NoError(t, fault())
		for i := range 4 {
			fill(l.local[:1<<20], uint64(i))
			tag := l.submit(t, driver.Write, numbered(i), driver.Desc{Len: 1 << 20})
			if n := l.notif(t); !bytes.Equal(n.Data, numbered(i)) {
				t.Errorf("message %x, want %d", n.Data, i)
			}
			if !bytes.Equal(l.local[:1<<20], l.remote[:1<<20]) {
				t.Error("a message came before its data")
			}
			if err := l.outcome(t, tag); err != nil {
				t.Error(err)
			}
		}
	}
	t.Logf("made anew %d times", end())
}
