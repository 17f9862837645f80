// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// How Fence waits: a copy of a piece takes well under a millisecond, so it spins
// first, and then sleeps longer and longer.
const (
	fenceSpins    = 100
	fenceSleep    = 20 * time.Microsecond
	fenceSleepMax = time.Millisecond
)

// Fence implements driver.Backend. It ends the epoch, so that no copy begins any
// more, and waits until none is announced. A peer that is in the memory for
// longer than Config.Grace is frozen, and is shut out, see shutOut. A copy of this
// backend's own goroutines has no pages but ours, and is always awaited: the goroutine is
// not frozen, or we were, too.
func (b *Backend) Fence(ctx context.Context, key uint32) error {
	b.fences.RLock()
	defer b.fences.RUnlock()
	m := b.memory(key)
	if m == nil {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	return b.fence(&patience{ctx, math.MaxInt64}, m)
}

// fence is Fence. Preconditions: b.fences is held for reading, and m is known.
func (b *Backend) fence(w *patience, m *memory) error {
	epoch, known := m.endEpoch()
	if !known {
		return fmt.Errorf("fence memory: %w", errUnknownKey)
	}
	if err := b.keepOut(w, m, epoch); err != nil {
		return err
	}
	b.mu.Lock()
	m.proved = max(m.proved, epoch)
	b.mu.Unlock()
	return nil
}

// keepOut returns when nothing of an epoch before this one lands any more.
func (b *Backend) keepOut(w *patience, m *memory, epoch uint64) error {
	grace := b.cfg.Grace // of rests, as in patience
	pause := fenceSleep
	for i := 0; ; i++ {
		busy, own := b.copies(m, i > fenceSpins)
		if !busy {
			return nil
		}
		if i < fenceSpins {
			runtime.Gosched()
			continue
		}
		switch {
		case own && b.closed.Load():
			return fmt.Errorf("fence memory: %w", driver.ErrClosed)
		case !own && grace <= 0:
			return b.shutOut(w, m, epoch)
		}
		if err := w.rest(b.clock, pause); err != nil {
			return err
		}
		grace -= pause
		pause = min(2*pause, fenceSleepMax)
	}
}

// patience is how long a fence waits for peers: until ctx ends, and for at most so much rest.
//
// Rest counts as long as it was meant to be, and not by the clock: while this process stands still,
// or a busy machine does not run it, it does not look at peers, and learns nothing about them.
type patience struct {
	ctx  context.Context
	left time.Duration
}

func (w *patience) rest(c clock.Clock, pause time.Duration) error {
	if w.left -= pause; w.left < 0 {
		return fmt.Errorf("fence memory: a peer may still be in the middle of a copy, try again "+
			"later: %w", driver.ErrTimeout)
	}
	return w.sleep(c, pause)
}

// sleep is rest of a fence that does not wait for a peer.
func (w *patience) sleep(c clock.Clock, pause time.Duration) error {
	if w.ctx.Err() != nil {
		return fmt.Errorf("fence memory: %w", driver.ContextError(w.ctx))
	}
	over, timer := clock.After(c, pause)
	select {
	case <-w.ctx.Done():
		timer.Stop()
		return fmt.Errorf("fence memory: %w", driver.ContextError(w.ctx))
	case <-over:
		return nil
	}
}

// copies looks for announcements of a memory, and for those of this backend's own
// goroutines. thorough also asks the kernel whether the peer still lives.
func (b *Backend) copies(m *memory, thorough bool) (busy, own bool) {
	for _, c := range *b.inbound.Load() {
		c.eachIn(m.key, thorough, func(int, uint64, bool) {
			busy = true
			own = own || c.self
		})
	}
	return busy, own
}

// eachIn calls f for every live announcement of a key.
func (c *inbound) eachIn(key uint32, thorough bool, f func(line int, value uint64, write bool)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.left || c.gone && c.looksOut() {
		return
	}
	for i := range announceMax {
		value := word(c.page, announceAt+uint64(i)*lineBytes).Load()
		if value != c.abandoned[i] {
			c.abandoned[i] = 0 // it has gone on: after 2^31 others its number comes again
		}
		if value != c.barred[i] {
			c.barred[i] = 0
		}
		if value == 0 || value == c.abandoned[i] {
			continue
		}
		of, write := announcedKey(value)
		if of != key {
			continue
		}
		if thorough && c.pid.Dead() {
			c.left = true
			return
		}
		f(i, value, write)
	}
}

// shutOut makes what silent peers still do harmless, and remembers their announcements,
// so that the next Fence does not wait for them again. Under shared memory it puts
// fresh pages: what such a peer still writes lands in pages that nothing uses.
// Before foreign memory it shuts the gate. Nothing of a reader can land here, so for
// readers alone it does nothing.
//
// An announcement of the epoch that the fence has begun is not remembered: that mover may have
// found the fresh pages, or the new gate. There is one only where a token of that epoch was given
// out by the time of the look.
func (b *Backend) shutOut(w *patience, m *memory, epoch uint64) error {
	var silent, writers []silence
	for _, c := range *b.inbound.Load() {
		c.eachIn(m.key, true, func(line int, value uint64, write bool) {
			s := silence{c, line, value}
			silent = append(silent, s)
			if write {
				writers = append(writers, s)
			}
		})
	}
	var err error
	switch {
	case len(writers) == 0 || m.readOnly:
	case m.arena != nil:
		err = b.freshPages(w, m, epoch)
	default:
		err = b.shutGate(w, m, epoch, writers)
	}
	if err != nil {
		return fmt.Errorf("fence memory: keep a frozen peer out: %w", err)
	}
	if !b.hidden(m, epoch) {
		return nil
	}
	for _, s := range silent {
		s.c.mu.Lock()
		s.c.abandoned[s.line] = s.value
		s.c.mu.Unlock()
	}
	return nil
}

// hidden reports whether no peer can have a token of this epoch, or of a later one.
func (b *Backend) hidden(m *memory, epoch uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return m.given <= epoch && b.memory(m.key) == m
}

// awaitQuiet gives all peers Config.Grace to leave all memories.
func (b *Backend) awaitQuiet() {
	deadline := b.clock.Now() + int64(b.cfg.Grace)
	for b.clock.Now() < deadline && b.busy() {
		b.clock.Sleep(fenceSleep)
	}
}

func (b *Backend) busy() bool {
	for _, c := range *b.inbound.Load() {
		if c.busy() {
			return true
		}
	}
	return false
}

func (c *inbound) busy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.looksOut() {
		return false
	}
	for i := range announceMax {
		if v := word(c.page, announceAt+uint64(i)*lineBytes).Load(); v != 0 && v != c.abandoned[i] {
			return true
		}
	}
	return false
}
