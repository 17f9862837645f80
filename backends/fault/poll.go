// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"

	"github.com/sluicehq/sluice/driver"
)

// Poll implements driver.Backend. What is not of a flight passes as it is.
func (b *Backend) Poll(done []driver.Completion) (int, error) {
	if b.about == 0 {
		return b.Backend.Poll(done)
	}
	b.pollMu.Lock() // against reap
	defer b.pollMu.Unlock()
	n := 0
	if b.held.Load() > 0 {
		if n = b.takeReady(done); n == len(done) {
			return n, nil
		}
	}
	for {
		ended := b.ended.Load()
		m, err := b.Backend.Poll(done[n:])
		switch {
		case b.held.Load() == 0: // before, it would miss a flight that a Submit has entered since
			n += m
		case m == 0:
			n += b.takeReady(done[n:])
		default:
			if n += b.sift(done[n : n+m]); n == 0 {
				continue
			}
		}
		switch {
		case n > 0 || !ended && errors.Is(err, driver.ErrClosed): // a flight may still be in hand
			return n, nil
		default:
			return 0, err
		}
	}
}

// takeReady moves completions of ours that are ready.
func (b *Backend) takeReady(done []driver.Completion) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := copy(done, b.ready)
	b.ready = b.ready[:copy(b.ready, b.ready[n:])]
	b.held.Add(int64(-n))
	for range n {
		b.vacate()
	}
	return n
}

// reap makes room in the wrapped backend, for what it is full of may be completions that
// no caller polls: a batch that was taken must go on all the same.
// Preconditions: b.mu is held, which it lets go of meanwhile.
func (b *Backend) reap() {
	if b.places >= 2*flightsMax {
		return
	}
	b.mu.Unlock()
	defer b.mu.Lock()
	if !b.pollMu.TryLock() {
		return // a caller polls
	}
	defer b.pollMu.Unlock()
	var done [32]driver.Completion
	n, _ := b.Backend.Poll(done[:])
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range done[:n] {
		switch f := b.flights[c.Tag]; {
		case f == nil:
			b.places++
			b.deliver(c)
		case f.observe(c.Err):
			f.finish(f.err)
		}
	}
}

// sift keeps what is to be delivered now, in order, and returns how many.
func (b *Backend) sift(done []driver.Completion) (kept int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range done {
		f := b.flights[c.Tag]
		if f != nil {
			if !f.observe(c.Err) {
				continue
			}
			if f.own || f.breach != (breach{}) {
				f.finish(f.err)
				continue
			}
			c.Err = f.err
			f.leave()
			b.vacate()
		}
		done[kept] = c
		kept++
	}
	return kept
}

// Arm implements driver.Backend. The flag goes up before the look; whatever brings something
// does it the other way round.
func (b *Backend) Arm() (bool, error) {
	b.armed.Store(true)
	ready, err := b.Backend.Arm()
	b.mu.Lock()
	waits := len(b.ready) > 0
	b.mu.Unlock()
	return ready || waits || b.inbox.isReady() || b.news.Swap(false), err
}
