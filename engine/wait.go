// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"math/bits"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
)

// Done reports whether the transfer has ended. It polls the backend, so that a
// goroutine may spin on it.
func (t *Transfer) Done() bool {
	if w := t.state(); w.phase() != posted {
		return w.phase() == done
	}
	for _, c := range t.via() {
		c.lane.spins.Add(1)
		c.lane.poll()
	}
	return t.state().phase() == done
}

// Advance is Done for a goroutine that asks again and again: it lends the goroutine to the transfer
// first, for one piece of a batch that no other goroutine copies, of 1 MiB over shm by default.
func (t *Transfer) Advance() bool {
	if t.state().phase() == posted {
		t.helpOnce()
	}
	return t.Done()
}

// helpOnce copies one piece of the transfer.
func (t *Transfer) helpOnce() {
	for _, c := range t.via() {
		generation := t.state().generation()
		for left := t.outstanding.Load(); left != 0; left &= left - 1 {
			if c.p.Help(tag(t.slot, generation, bits.TrailingZeros64(left)), atOnce) {
				c.lane.poll() // what has ended is not of this post alone, and woke nobody
				return
			}
		}
	}
}

// atOnce has Help stop after one piece.
var atOnce = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Err returns the outcome of a transfer that is done: nil, or why it failed.
// While it is posted the answer is ErrBusy.
func (t *Transfer) Err() error {
	switch w := t.state(); w.phase() {
	case preparing, posted, ending:
		return ErrBusy
	case done:
		return t.outcome(w)
	}
	return nil
}

// Completed is signalled for each Post, when that is done. It may be signalled once more: ask Done.
func (t *Transfer) Completed() <-chan struct{} {
	if t.sleepers.watch(t.completed) && t.state().phase() == done {
		select {
		case t.completed <- struct{}{}:
		default:
		}
	}
	return t.completed
}

// Wait blocks until the transfer is done and returns its outcome. The context
// ends the wait, not the transfer.
func (t *Transfer) Wait(ctx context.Context) error {
	w := t.state()
	switch w.phase() {
	case done:
		return t.outcome(w)
	case idle, closed:
		return t.misuse("wait for")
	}
	t.help(ctx)
	if t.spin() {
		return t.Err()
	}
	return t.park(ctx, anyPost)
}

// help copies the batches of the transfer that no other goroutine copies yet. Who waits for one of
// a lower class hands over what has room by then, until the post has ended: the scheduler's
// goroutine may not run while all processors copy.
func (t *Transfer) help(ctx context.Context) {
	for again := true; again; {
		for _, c := range t.via() {
			generation := t.state().generation()
			for left := t.outstanding.Load(); left != 0; left &= left - 1 {
				if c.p.Help(tag(t.slot, generation, bits.TrailingZeros64(left)), ctx.Done()) {
					c.lane.poll()
				}
			}
		}
		again = false
		for t.grants != nil && ctx.Err() == nil && t.isPost(anyPost) &&
			t.e.schedule.handOver() {
			again = true
		}
	}
}

// spin polls for Config.Spin, unless a backend asks not to: most transfers of a few pieces end
// within.
func (t *Transfer) spin() bool {
	sleeps := slices.ContainsFunc(t.via(), func(c *conn) bool { return c.lane.caps.Sleep })
	for end := t.e.now() + t.e.cfg.Spin; !sleeps && t.e.now() < end; runtime.Gosched() {
		if t.state().phase() == done {
			return true
		}
		t.poll()
	}
	return t.state().phase() == done
}

// park sleeps until the post of a generation has ended.
func (t *Transfer) park(ctx context.Context, generation uint64) error {
	conns := t.via()
	for _, c := range conns {
		c.lane.park()
	}
	defer func() {
		for _, c := range conns {
			c.lane.unpark()
		}
	}()
	awake := t.sleepers.enter()
	defer t.sleepers.leave(awake)
	for t.isPost(generation) {
		if t.grants != nil && generation == anyPost {
			t.help(ctx) // the schedule has handed over a batch
		}
		select {
		case <-awake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return t.Err()
}

// sleepers are the goroutines that sleep until a post of a transfer ends. Each has a channel of its
// own, so that no other goroutine, and no later post, takes its signal.
type sleepers struct {
	count atomic.Int32

	mu   sync.Mutex
	all  []chan struct{} // with room for one signal; of these, Completed's for good
	free []chan struct{} // for the next: a sleep allocates nothing
}

// enter returns the channel that wake signals. The caller looks at the state after that, and again
// at each signal: settle changes the state before it looks at count.
func (s *sleepers) enter() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	var c chan struct{}
	if n := len(s.free); n > 0 {
		c, s.free = s.free[n-1], s.free[:n-1]
	} else {
		c = make(chan struct{}, 1)
	}
	s.all = append(s.all, c)
	s.count.Store(int32(len(s.all)))
	return c
}

// watch adds a channel for good. It reports true the first time.
func (s *sleepers) watch(c chan struct{}) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.Contains(s.all, c) {
		return false
	}
	s.all = append(s.all, c)
	s.count.Store(int32(len(s.all)))
	return true
}

func (s *sleepers) leave(c chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.all, c)
	s.all = slices.Delete(s.all, i, i+1)
	s.count.Store(int32(len(s.all)))
	select {
	case <-c: // not for the next
	default:
	}
	s.free = append(s.free, c)
}

func (s *sleepers) wake() {
	if s.count.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.all {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// OnDone has f called once for each Post, when that is done: for a program that serves many
// transfers from one place and wants no goroutine for each. Nil takes it away. It is called from
// whatever goroutine ended the transfer, perhaps before Post has returned, so it must not block and
// must not call the engine: it wakes a goroutine, which asks Done. By then the transfer may have
// been posted again. ErrBusy while it is posted.
func (t *Transfer) OnDone(f func()) error {
	if !t.state().atRest() {
		return t.misuse("change")
	}
	if f != nil || t.extras != nil {
		t.extra().hook = f
	}
	return nil
}
