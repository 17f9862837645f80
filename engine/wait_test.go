// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"testing"
)

// TestEveryWaiterWakes has several goroutines wait for each of many posts, with
// a signal of the post before still about.
func TestEveryWaiterWakes(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	for range 300 {
		ctx := within(t) // a busy machine may take long for all of them
		check(t, tr.Post())
		var waiters sync.WaitGroup
		for range 4 {
			waiters.Go(func() {
				if err := tr.park(ctx, anyPost); err != nil {
					t.Error(err)
				}
			})
		}
		tr.sleepers.wake() // stale
		for !f.finishOne(nil) {
		}
		waiters.Wait()
		if t.Failed() {
			return
		}
	}
}

// TestWaitSpinsUnlessTheBackendAsks has a spin that would last longer than any test.
func TestWaitSpinsUnlessTheBackendAsks(t *testing.T) {
	for _, sleep := range []bool{false, true} {
		f := &fake{manual: true, sleep: sleep}
		p, r, m := overFake(t, f, limit)
		p.e.cfg.Spin = 2 * limit
		tr := transfer(t, p, Write)
		scattered(t, tr, r, m, 1)
		check(t, tr.Post())
		spun := make(chan bool, 1)
		go func() { spun <- tr.spin() }()
		if sleep && <-spun {
			t.Error("what is under way is found done")
		}
		for !f.finishOne(nil) {
		}
		if !sleep && !<-spun {
			t.Error("who spins does not find the end")
		}
		check(t, tr.Wait(within(t)))
	}
}
