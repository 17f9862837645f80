// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// limit bounds every wait of these tests.
const limit = 20 * time.Second

type outcome struct {
	name  string
	grant *Grant
	err   error
}

// acquire starts an Acquire and returns when it waits.
func acquire(t *testing.T, ctx context.Context, p *Pool, name string, out chan<- outcome,
	h []Hash) {
	t.Helper()
	before := p.Stats().Waiting
	go func() {
		g, err := p.Acquire(ctx, h)
		out <- outcome{name, g, err}
	}()
	for start := time.Now(); p.Stats().Waiting == before; time.Sleep(time.Millisecond) {
		if time.Since(start) > limit {
			t.Fatal("Acquire does not wait")
		}
	}
}

func next(t *testing.T, out <-chan outcome) outcome {
	t.Helper()
	select {
	case o := <-out:
		return o
	case <-time.After(limit):
		t.Fatal("nobody is woken")
	}
	return outcome{}
}

func TestWaitersAreServedInOrder(t *testing.T) { testkit.InVirtualTime(t, waitersAreServedInOrder) }

func waitersAreServedInOrder(t *testing.T) {
	p := newPool(t, 4)
	out := make(chan outcome, 3)
	a, b := take(t, p, 1, 2, 3), take(t, p, 4)
	acquire(t, t.Context(), p, "large", out, hashes(5, 6, 7, 8))
	acquire(t, t.Context(), p, "small", out, hashes(9))
	b.Release() // room for the small one, but the large one was first
	if _, err := p.TryAcquire(hashes(10)); !errors.Is(err, ErrFull) {
		t.Errorf("TryAcquire passes those who wait: %v", err)
	}
	select {
	case o := <-out:
		t.Fatalf("%s was served", o.name)
	case <-time.After(20 * time.Millisecond):
	}
	a.Release()
	first := next(t, out)
	if first.name != "large" || first.err != nil {
		t.Fatalf("first %+v", first)
	}
	first.grant.Release()
	second := next(t, out)
	if second.name != "small" || second.err != nil {
		t.Fatalf("second %+v", second)
	}
	second.grant.Release()
	want(t, p, 4, 0, 0)
}

func TestWaiterFindsWhatWasPublishedMeanwhile(t *testing.T) {
	p := newPool(t, 3)
	out := make(chan outcome, 1)
	a := take(t, p, 1, 2, 3)
	acquire(t, t.Context(), p, "same", out, hashes(1, 2, 4))
	fill(a)
	if o := next(t, out); o.err != nil || len(o.grant.Missing) != 1 {
		t.Errorf("%+v", o)
	}
}

func TestCancelledWaiterLetsOthersPass(t *testing.T) {
	p := newPool(t, 2)
	out := make(chan outcome, 2)
	a := take(t, p, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("changed my mind")
	acquire(t, ctx, p, "large", out, hashes(2, 3))
	acquire(t, t.Context(), p, "small", out, hashes(4))
	cancel(why)
	got := map[string]outcome{}
	for range 2 {
		o := next(t, out)
		got[o.name] = o
	}
	if err := got["large"].err; !errors.Is(err, why) {
		t.Errorf("the cancelled one: %v", err)
	}
	if got["small"].err != nil {
		t.Fatalf("the other one: %v", got["small"].err)
	}
	got["small"].grant.Release()
	a.Release()
	want(t, p, 2, 0, 0)
}

func TestCloseEndsWaiters(t *testing.T) {
	p := newPool(t, 1)
	out := make(chan outcome, 2)
	a := take(t, p, 1)
	acquire(t, t.Context(), p, "one", out, hashes(2))
	acquire(t, t.Context(), p, "two", out, hashes(3))
	p.Close()
	for range 2 {
		if o := next(t, out); !errors.Is(o.err, ErrClosed) {
			t.Errorf("%s: %v", o.name, o.err)
		}
	}
	a.Release()
	want(t, p, 1, 0, 0)
}

// TestHammer has goroutines that take, publish, give back and give up at once,
// and checks that no two write to one block.
func TestHammer(t *testing.T) {
	const blocks, workers, rounds = 24, 8, 400
	p := newPool(t, blocks)
	var writers [blocks]sync.Mutex
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 3))
			for range rounds {
				ctx, cancel := context.WithTimeout(t.Context(),
					time.Duration(r.IntN(3000))*time.Microsecond)
				g, err := p.Acquire(ctx, chainOf(r, 1+r.IntN(blocks)))
				cancel()
				if err != nil {
					continue
				}
				for _, at := range g.Missing {
					if !writers[g.Blocks[at]].TryLock() {
						t.Errorf("block %d has two writers", g.Blocks[at])
						return
					}
				}
				for _, at := range g.Missing {
					writers[g.Blocks[at]].Unlock()
					if r.IntN(4) > 0 {
						g.Publish(at)
					}
				}
				g.Release()
			}
		})
	}
	all.Wait()
	if s := p.Stats(); s.Used != 0 || s.Waiting != 0 || s.Free+s.Cached != blocks {
		t.Errorf("at the end %+v", s)
	}
}
