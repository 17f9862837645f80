// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"math/bits"
	"runtime"
)

// Done reports whether the transfer has ended. It polls the backend, so that a
// goroutine may spin on it.
func (t *Transfer) Done() bool {
	if w := t.look(); w.phase() != posted {
		return w.phase() == done
	}
	for _, c := range t.via() {
		c.lane.spins.Add(1)
		c.lane.poll()
	}
	return t.look().phase() == done
}

// Err returns the outcome of a transfer that is done: nil, or why it failed.
// While it is posted the answer is ErrBusy.
func (t *Transfer) Err() error {
	switch w := t.look(); w.phase() {
	case preparing, posted, ending:
		return ErrBusy
	case done:
		return t.outcome(w)
	}
	return nil
}

// Completed is signalled once for each Post, when that is done. With Wait in use
// on another goroutine it may be signalled more often: ask Done.
func (t *Transfer) Completed() <-chan struct{} {
	if t.watched.CompareAndSwap(false, true) {
		t.sleepers.Add(1) // for good: we cannot know when the channel is let go
		if t.look().phase() == done {
			t.announce()
		}
	}
	return t.completed
}

// Wait blocks until the transfer is done and returns its outcome. The context
// ends the wait, not the transfer.
func (t *Transfer) Wait(ctx context.Context) error {
	w := t.look()
	switch w.phase() {
	case done:
		return t.outcome(w)
	case idle, closed:
		return t.misuse("wait for")
	}
	if t.help(ctx) || t.spin() {
		return t.Err()
	}
	return t.park(ctx, anyPost)
}

// help copies here what no other goroutine copies yet.
func (t *Transfer) help(ctx context.Context) bool {
	for _, c := range t.via() {
		generation := t.look().generation()
		for left := t.outstanding.Load(); left != 0; left &= left - 1 {
			if c.p.Help(tag(t.slot, generation, bits.TrailingZeros64(left)), ctx.Done()) {
				c.lane.poll()
			}
		}
	}
	return t.look().phase() == done
}

// spin polls for Config.Spin, unless a backend asks not to: most transfers of a few pieces end
// within.
func (t *Transfer) spin() bool {
	for _, c := range t.via() {
		if c.lane.caps.Sleep {
			return false
		}
	}
	end := t.e.now() + t.e.cfg.Spin
	for t.e.cfg.Spin > 0 && t.e.now() < end {
		t.poll()
		if t.look().phase() == done {
			return true
		}
		runtime.Gosched()
	}
	return t.look().phase() == done
}

func (t *Transfer) park(ctx context.Context, generation uint64) error {
	conns := t.via()
	for _, c := range conns {
		c.lane.park()
	}
	err := t.sleep(ctx, generation)
	for _, c := range conns {
		c.lane.unpark()
	}
	return err
}

func (t *Transfer) sleep(ctx context.Context, generation uint64) error {
	t.sleepers.Add(1) // pairs with the load in settle, which comes after the state
	defer t.sleepers.Add(-1)
	for t.isPost(generation) {
		select {
		case <-t.completed:
			t.announce() // for the next that waits
		case <-ctx.Done():
			return ctx.Err()
		}
		if t.isPost(generation) {
			runtime.Gosched() // the signal of an earlier post
			select {
			case <-t.completed:
			default:
			}
		}
	}
	t.announce() // the signal taken just now may have been meant for another sleeper
	return t.Err()
}

func (t *Transfer) announce() {
	select {
	case t.completed <- struct{}{}:
	default:
	}
}
