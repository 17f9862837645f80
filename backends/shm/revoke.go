// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// How Revoke waits: a copy of a piece takes well under a millisecond, so it spins
// first, and then sleeps longer and longer.
const (
	revokeSpins    = 100
	revokeSleep    = 20 * time.Microsecond
	revokeSleepMax = time.Millisecond
)

// keepOut returns when nothing lands any more that a peer began by a token of the memory.
// Preconditions: its epoch has ended, and m.turn is held.
func (b *Backend) keepOut(ctx context.Context, m *memory) error {
	grace := b.cfg.Grace // of rests, see rest
	pause := revokeSleep
	for i := 0; ; i++ {
		busy, own := b.copies(m, i > revokeSpins)
		switch {
		case !busy:
			return nil
		case i < revokeSpins:
			runtime.Gosched()
			continue
		case own && b.closed.Load():
			return fmt.Errorf("revoke memory: %w", driver.ErrClosed)
		case !own && grace <= 0:
			return b.shutOut(ctx, m)
		}
		if err := b.rest(ctx, pause); err != nil {
			return err
		}
		grace -= pause
		pause = min(2*pause, revokeSleepMax)
	}
}

// rest waits for a while, unless ctx is over.
//
// What counts against Config.Grace is how long a rest was meant to be, and not the clock: while
// this process stands still, or a busy machine does not run it, it does not look at peers, and
// learns nothing about them.
func (b *Backend) rest(ctx context.Context, pause time.Duration) error {
	if ctx.Err() == nil {
		over, timer := clock.After(b.clock, pause)
		defer timer.Stop()
		select {
		case <-over:
			return nil
		case <-ctx.Done():
		}
	}
	return fmt.Errorf("revoke memory: %w", driver.ContextError(ctx))
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
// so that the next Revoke does not wait for them again. Under shared memory it puts
// fresh pages: what such a peer still writes lands in pages that nothing uses.
// Before foreign memory it shuts the gate. Nothing of a reader can land here, so for
// readers alone it does nothing.
func (b *Backend) shutOut(ctx context.Context, m *memory) error {
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
		err = b.freshPages(ctx, m)
	default:
		err = b.shutGate(ctx, writers)
	}
	if err != nil {
		return fmt.Errorf("revoke memory: keep a frozen peer out: %w", err)
	}
	for _, s := range silent {
		s.c.mu.Lock()
		s.c.abandoned[s.line] = s.value
		s.c.mu.Unlock()
	}
	return nil
}

// awaitQuiet gives all peers Config.Grace to leave all memories.
func (b *Backend) awaitQuiet() {
	deadline := b.clock.Now() + int64(b.cfg.Grace)
	for b.clock.Now() < deadline && b.busy() {
		b.clock.Sleep(revokeSleep)
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
