// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/virtual"
)

func counterOf(t testing.TB, e *Engine, number uint32) *Counter {
	t.Helper()
	c, err := e.Counter(number)
	check(t, err)
	return c
}

// TestCountWaitsForAll is a receiver of layers, which wants to know when the last is there.
func TestCountWaitsForAll(t *testing.T) {
	const layers, size = 61, 8 << 10
	a, b := open(t, "a"), open(t, "b")
	src, dst := register(t, a, "src", layers*size), register(t, b, "dst", layers*size)
	p := connect(t, a, b)
	c := counterOf(t, b, 7)
	for round := range uint64(4) {
		fill(src.Bytes(), byte(round))
		var transfers []*Transfer
		for i := range uint64(layers) {
			tr := transfer(t, p, Write)
			check(t, tr.Add(src, i*size, remote(t, p, "dst"), i*size, size))
			check(t, tr.Count(7))
			transfers = append(transfers, tr)
		}
		var all sync.WaitGroup
		for range 3 { // all who wait are told
			all.Go(func() { check(t, c.Wait(within(t), (round+1)*layers)) })
		}
		for i, tr := range transfers {
			if i == layers-1 && c.Value() == (round+1)*layers {
				t.Error("the count is full before the last was posted")
			}
			check(t, tr.Post())
		}
		all.Wait()
		if !bytes.Equal(src.Bytes(), dst.Bytes()) {
			t.Fatal("the count was full before the bytes were there")
		}
		if got := c.Value(); got != (round+1)*layers {
			t.Errorf("%d counts, want %d", got, (round+1)*layers)
		}
		for _, tr := range transfers {
			check(t, tr.Wait(within(t)))
			check(t, tr.Close())
		}
	}
	if got := len(b.Notifications()); got != 0 {
		t.Errorf("%d messages came with the counts", got)
	}
}

// TestCountAcrossBackends counts over two backends at once.
func TestCountAcrossBackends(t *testing.T) {
	both := func(c *Config) {
		first, err := mem.New(mem.Config{})
		check(t, err)
		second, err := mem.New(mem.Config{})
		check(t, err)
		c.Backends = []driver.Backend{renamed{first, "one"}, renamed{second, "two"}}
	}
	a, b := open(t, "a", both), open(t, "b", both)
	p := connect(t, a, b)
	c := counterOf(t, b, 0)
	const n = 90
	done := make(chan error, 1)
	go func() { done <- c.Wait(within(t), n) }()
	for i := range n {
		tr, err := a.NewTransfer(p, Write, Route{Only: []string{"one", "two", "two"}[i%3]})
		check(t, err)
		check(t, tr.Count(0))
		check(t, tr.Post())
		check(t, tr.Wait(within(t)))
		check(t, tr.Close())
	}
	check(t, <-done)
}

// renamed lets an engine have two of a kind.
type renamed struct {
	*mem.Backend
	name string
}

func (r renamed) Caps() driver.Caps {
	c := r.Backend.Caps()
	c.Name = r.name
	return c
}

func TestCountFollowsReads(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	dst := register(t, a, "dst", 4096)
	register(t, b, "src", 4096)
	p := connect(t, a, b)
	tr := transfer(t, p, Read)
	check(t, tr.Add(dst, 0, remote(t, p, "src"), 0, 4096))
	check(t, tr.Count(1)) // the owner may write there again
	check(t, tr.Post())
	check(t, counterOf(t, b, 1).Wait(within(t), 1))
	check(t, tr.Wait(within(t)))
	check(t, tr.Notify([]byte("instead"))) // the last of the two holds
	check(t, tr.Post())
	if n := next(t, b); string(n.Data) != "instead" || counterOf(t, b, 1).Value() != 1 {
		t.Errorf("message %q, counter at %d", n.Data, counterOf(t, b, 1).Value())
	}
	check(t, tr.Wait(within(t)))
}

func TestCountEnds(t *testing.T) { virtual.Time(t, countEnds) }

func countEnds(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	p := connect(t, a, b)
	c := counterOf(t, b, 4000)
	if same := counterOf(t, b, 4000); same != c {
		t.Error("two counters of one number")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Wait(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait in vain: %v", err)
	}
	if err := c.Wait(ctx, 0); err != nil {
		t.Errorf("wait for what is there: %v", err)
	}
	tr := transfer(t, p, Write)
	if err := tr.Count(CountersMax); !errors.Is(err, ErrBounds) {
		t.Errorf("count out of bounds: %v", err)
	}
	if _, err := b.Counter(CountersMax); !errors.Is(err, ErrBounds) {
		t.Errorf("counter out of bounds: %v", err)
	}
	waiting := make(chan error, 2)
	for _, n := range []uint64{5, math.MaxUint64} {
		go func() { waiting <- c.Wait(context.Background(), n) }()
	}
	for b.tally.waiting.Load() != 2 {
		time.Sleep(time.Millisecond)
	}
	check(t, b.Close())
	for range 2 {
		if err := <-waiting; !errors.Is(err, ErrClosed) {
			t.Errorf("wait while the engine closes: %v", err)
		}
	}
	if got := b.tally.waiting.Load(); got != 0 || len(c.waits) != 0 {
		t.Errorf("%d are said to wait, %d are listed", got, len(c.waits))
	}
}

// TestCountUnsupported: where nothing counts it is said, and never replaced in silence.
func TestCountUnsupported(t *testing.T) {
	over := func(c *Config) {
		c.Backends = []driver.Backend{&fake{mute: true}}
	}
	a, b := open(t, "a", over), open(t, "b", over)
	p := connect(t, a, b)
	tr := transfer(t, p, Write)
	check(t, tr.Count(1))
	if err := tr.Post(); !errors.Is(err, ErrNoRoute) {
		t.Errorf("post: %v", err)
	}
	if _, err := b.Counter(1); !errors.Is(err, ErrNotSupported) {
		t.Errorf("counter: %v", err)
	}
}

// busyCounter is a backend of which an arrival comes between two looks at its count.
type busyCounter struct {
	driver.Backend
	value, looks, arriveAt uint64
	awaited                uint64
}

func (b *busyCounter) Count(uint32) uint64 {
	b.looks++
	if b.looks == b.arriveAt {
		b.value++
	}
	return b.value
}

func (b *busyCounter) AwaitCount(_ uint32, n uint64) bool {
	b.awaited = n
	return b.value >= n
}

// TestCountWhileAsking: what arrives between the look at the counts and the request to be told
// of the next is among what is asked for.
func TestCountWhileAsking(t *testing.T) {
	for arriveAt := range uint64(4) {
		first, second := &busyCounter{value: 4, arriveAt: arriveAt + 1}, &busyCounter{value: 5}
		c := &Counter{
			lanes: []*lane{{b: first}, {b: second}},
			seen:  make([]uint64, 2), tally: &tally{},
		}
		w := &countWait{n: 10, done: make(chan struct{})}
		c.enlist(w)
		select {
		case <-w.done:
		default:
			if first.value == 5 {
				t.Fatalf("arrival at look %d: the count is at 10, and who waits for it asked to "+
					"be told of %d and %d",
					arriveAt+1, first.awaited, second.awaited)
			}
			if first.awaited != 5 || second.awaited != 6 {
				t.Errorf("asked to be told of %d and %d, want 5 and 6", first.awaited,
					second.awaited)
			}
		}
	}
}
