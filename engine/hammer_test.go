// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestHammer does everything at once, for the race detector: transfers that are
// posted, aborted and reset, leases that come and go, regions and peers too.
func TestHammer(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := open(t, "a"), open(t, "b")
	src, dst := register(t, a, "src", 1<<20), register(t, b, "dst", 1<<20)
	p := connect(t, a, b)
	seed := uint64(0)
	var workers sync.WaitGroup
	run := func(f func(i int, rng *rand.Rand)) {
		rng := rand.New(rand.NewPCG(1, seed))
		seed++
		workers.Go(func() {
			for i := range 1000 {
				f(i, rng)
			}
		})
	}
	for range 3 {
		tr := transfer(t, p, Write)
		run(func(i int, rng *rand.Rand) { hammerTransfer(t, tr, src, remote(t, p, "dst"), i, rng) })
	}
	run(func(i int, rng *rand.Rand) {
		l, err := dst.Lease(uint64(rng.IntN(255))*4096, 4096,
			LeaseOptions{TTL: time.Duration(1+rng.IntN(3)) * time.Millisecond})
		check(t, err)
		if m, err := p.Import(l.Token()); err == nil {
			_ = put(p, src, m, 6)
			check(t, m.Close())
		}
		check(t, l.Revoke(context.Background()))
	})
	run(func(i int, _ *rand.Rand) {
		r, err := b.Register(fmt.Sprintf("r%d", i), dst.seg)
		check(t, err)
		check(t, r.Close())
	})
	run(func(i int, _ *rand.Rand) {
		q := connect(t, a, b)
		_ = put(q, src, remote(t, q, "dst"), 1)
		check(t, q.Close())
		_ = a.Stats()
	})
	stop := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() { // longer than the workers: one whose message has no room waits for it
		for {
			select {
			case <-b.Notifications():
			case <-stop:
				return
			}
		}
	})
	workers.Wait()
	close(stop)
	reader.Wait()
	for { // so that no sender waits when the engines close
		select {
		case <-b.Notifications():
			continue
		default:
		}
		break
	}
}

func hammerTransfer(t *testing.T, tr *Transfer, src *Region, m *Remote, i int, rng *rand.Rand) {
	check(t, tr.Reset())
	for range 1 + rng.IntN(5) {
		n := uint64(1 + rng.IntN(200<<10))
		check(t, tr.Add(src, uint64(rng.IntN(1<<19)), m, uint64(rng.IntN(1<<19)), n))
	}
	if i%4 == 0 {
		check(t, tr.Notify([]byte("hammer")))
	}
	check(t, tr.Post())
	if i%3 == 0 {
		go tr.Done()
		check(t, tr.Abort(context.Background()))
	}
	if err := tr.Wait(context.Background()); err != nil && !errors.Is(err, ErrAborted) &&
		!errors.Is(err, ErrBusy) {
		t.Error(err)
	}
}
