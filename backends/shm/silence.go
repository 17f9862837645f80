// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/process"
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
// within the call (its source may lie on a disk that does not answer) is waited for as long as
// the fence has patience, and so is a writer of another PID namespace, of whose threads nothing
// can be seen.
func (b *Backend) shutGate(wait *patience, writers []silence) error {
	if err := b.gate.renew(&b.table); err != nil {
		return err
	}
	for _, w := range writers {
		threads, err := process.ThreadsOf(w.c.pid.PID, unix.SYS_PROCESS_VM_WRITEV)
		if err != nil && !errors.Is(err, driver.ErrUnproven) {
			return err
		}
		out := func() bool { return err == nil && threads.Out() }
		for pause := fenceSleep; w.lasts() && !out(); pause = min(2*pause, fenceSleepMax) {
			if b.closed.Load() {
				return driver.ErrClosed
			}
			if err := wait.rest(pause); err != nil {
				return err
			}
		}
	}
	return nil
}

// closeGate keeps all peers out of foreign memory for good, and gives a copy under way
// Config.Grace to end. What the gates took of the address space is given back unless
// a peer may still be about to write there.
// Preconditions: all epochs have ended.
func (b *Backend) closeGate() error {
	err := b.gate.close(&b.table)
	deadline := time.Now().Add(b.cfg.Grace)
	for _, s := range b.silences() {
		threads, err := process.ThreadsOf(s.c.pid.PID, unix.SYS_PROCESS_VM_WRITEV)
		seen := err == nil
		for s.lasts() && !(seen && threads.Out()) && time.Now().Before(deadline) {
			time.Sleep(fenceSleep)
		}
	}
	if len(b.silences()) > 0 {
		return err
	}
	return errors.Join(err, b.gate.release())
}

// silences lists the announcements of all peers that live, those that a fence gave up as well.
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

// announced is what a line says, 0 when the peer is known to be out.
func (c *inbound) announced(line int) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.left {
		return 0
	}
	return word(c.page, announceAt+uint64(line)*lineBytes).Load()
}

// lasts reports whether the announcement still stands.
func (s *silence) lasts() bool {
	return s.c.announced(s.line) == s.value && !s.c.pid.Dead()
}
