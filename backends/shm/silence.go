// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// silence is an announcement that does not go away.
type silence struct {
	c     *inbound
	line  int
	value uint64
}

// shutGate keeps silent writers out of foreign memory. With the gate shut none of them
// begins a copy any more. One that was past it is in the middle of process_vm_writev,
// which nothing ends early, and which ends by itself: that is awaited, by the announcement
// or, of a process that stands still, by the threads that it has. A copy that is held up
// within the call (its source may lie on a disk that does not answer) is waited for until ctx is
// over, and so is a writer of another PID namespace, of whose threads nothing
// can be seen.
func (b *Backend) shutGate(ctx context.Context, writers []silence) error {
	if err := b.protect(writers); err != nil {
		return err
	}
	for _, w := range writers {
		threads, err := proc.ThreadsOf(w.c.pid.PID, unix.SYS_PROCESS_VM_WRITEV)
		if err != nil && !errors.Is(err, driver.ErrUnproven) {
			return err
		}
		out := func() bool { return err == nil && threads.Out() }
		for pause := revokeSleep; w.lasts() && !out(); pause = min(2*pause, revokeSleepMax) {
			if b.closed.Load() {
				return driver.ErrClosed
			}
			if err := b.rest(ctx, pause); err != nil {
				return err
			}
		}
	}
	return nil
}

// protect renews the gate, unless all of the writers were barred by it before: a program that
// tries to revoke memory again and again takes one place for a writer that stands still, and not
// one each time.
func (b *Backend) protect(writers []silence) error {
	if !slices.ContainsFunc(writers, func(s silence) bool {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		return s.c.barred[s.line] != s.value
	}) {
		return nil
	}
	if err := b.gate.renew(&b.table, b.passers); err != nil {
		return err
	}
	for _, s := range writers {
		s.c.mu.Lock()
		s.c.barred[s.line] = s.value
		s.c.mu.Unlock()
	}
	return nil
}

// closeGate keeps all peers out of foreign memory for good, and gives a copy under way
// Config.Grace to end. Where a copy into one of these memories has not ended by then, or may still
// begin because the gate could not be shut, it says so, and Memory.Revoke will. What the gates took
// of the address space is given back unless a peer may
// still be about to write there.
// Preconditions: all epochs have ended.
func (b *Backend) closeGate(all map[uint32]*memory) error {
	err := b.gate.close(&b.table, b.passers)
	shut := err == nil
	deadline := b.clock.Now() + int64(b.cfg.Grace)
	var late error
	for _, s := range b.silences() {
		threads, unseen := proc.ThreadsOf(s.c.pid.PID, unix.SYS_PROCESS_VM_WRITEV)
		stands := func() bool { return s.lasts() && !(shut && unseen == nil && threads.Out()) }
		for stands() && b.clock.Now() < deadline {
			b.clock.Sleep(revokeSleep)
		}
		key, write := announcedKey(s.value)
		m := all[key]
		if m != nil && write && m.arena == nil && !m.readOnly && stands() {
			late = fmt.Errorf("close shm: a peer may still be in the middle of a copy into memory "+
				"that is not shareable: do not use it while that process lives: %w",
				driver.ErrTimeout)
			m.late = late
		}
	}
	err = errors.Join(err, late)
	if len(b.silences()) > 0 {
		return err
	}
	return errors.Join(err, b.gate.release())
}

// oldWriters reports, when it is called later, whether the writers have left that may have pages
// of a generation that has just ended. Those that Revoke has made harmless have other pages: of
// the range that they write to, older ones.
func (b *Backend) oldWriters() (over func() bool) {
	writers := slices.DeleteFunc(b.silences(), func(s silence) bool {
		_, write := announcedKey(s.value)
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		return !write || s.c.abandoned[s.line] == s.value
	})
	return func() bool {
		writers = slices.DeleteFunc(writers, func(s silence) bool { return !s.lasts() })
		return len(writers) == 0
	}
}

// silences lists the announcements of all peers that live, those that Revoke gave up as well.
func (b *Backend) silences() (all []silence) {
	for _, c := range *b.inbound.Load() {
		for line := range announceMax {
			s := silence{c: c, line: line, value: c.announced(line)}
			if s.value != 0 && s.lasts() {
				all = append(all, s)
			}
		}
	}
	return all
}

// passers lists the writers that may be about to pass the gate of now: not those for which an
// earlier one was shut.
func (b *Backend) passers() []silence {
	return slices.DeleteFunc(b.silences(), func(s silence) bool {
		_, write := announcedKey(s.value)
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		return !write || s.c.barred[s.line] == s.value
	})
}

// announced is what a line says, 0 when the peer is known to be out.
func (c *inbound) announced(line int) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.left {
		return 0
	}
	return word(c.page, announceAt+uint64(line)*lineBytes).Load()
}

// lasts reports whether the announcement still stands, as far as is known.
func (s *silence) lasts() bool {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	switch {
	case s.c.left:
		return false
	case s.c.page == nil: // the backend has ended: what peers still do is not known
		return true
	}
	return word(s.c.page, announceAt+uint64(s.line)*lineBytes).Load() == s.value &&
		!s.c.pid.Dead()
}
