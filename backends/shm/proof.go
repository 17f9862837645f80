// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/proc"
)

// How Revoke waits: a copy of a piece takes well under a millisecond, so it spins
// first, and then sleeps longer and longer.
const (
	revokeSpins    = 100
	revokeSleep    = 20 * time.Microsecond
	revokeSleepMax = time.Millisecond
)

// Revoke implements driver.Memory. It ends the epoch, so that no copy begins any more, and waits
// until none is announced. A peer that is in the memory for longer than Config.Grace is frozen, and
// is shut out. A copy of this backend's own goroutines has no pages but ours, and is always
// awaited: the goroutine is not frozen, or we were, too.
func (m *memory) Revoke(ctx context.Context) error {
	b := m.b
	b.revokes.RLock() // the table and the peers' pages stay
	defer b.revokes.RUnlock()

	// The epoch ends. A peer that announces a copy from now on finds that, and copies nothing.
	m.endEpoch()
	if err := m.revokeLock.Lock(ctx); err != nil {
		return fmt.Errorf("revoke memory: another call looks for the proof: %w", err)
	}
	defer m.revokeLock.Unlock()
	if m.gone {
		return m.closeErr
	}

	// The copies that were announced before end. A peer that stays is shut out.
	inside := func(a *announcement) bool { return a.key() == m.key && !a.harmless }
	grace, pause := b.cfg.Grace, revokeSleep
	for i := 0; ; i++ {
		copies := b.announcements(i > revokeSpins, inside)
		if len(copies) == 0 {
			break
		}
		if i < revokeSpins {
			runtime.Gosched()
			continue
		}
		own := slices.ContainsFunc(copies, func(a announcement) bool { return a.c.self })
		if own && b.closed.Load() {
			return fmt.Errorf("revoke memory: %w", driver.ErrClosed)
		}
		if !own && grace <= 0 {
			if err := b.shutOut(ctx, m, copies); err != nil {
				return fmt.Errorf("revoke memory: keep a frozen peer out: %w", err)
			}
			break
		}
		if err := b.rest(ctx, pause); err != nil {
			return fmt.Errorf("revoke memory: %w", err)
		}
		grace -= pause
		pause = min(2*pause, revokeSleepMax)
	}

	// The key is free, in the next epoch.
	m.freeKey()
	return nil
}

// endEpoch has all tokens refused from now on.
func (m *memory) endEpoch() {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if !m.revoked {
		m.revoked = true
		m.b.table.retract(m.key)
	}
}

// freeKey gives back the key and what else the memory has. Preconditions: m.revokeLock is held.
func (m *memory) freeKey() {
	m.gone = true
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	m.b.memories[m.key].Store(nil)
	m.b.freeKeys = append(m.b.freeKeys, m.key)
	if m.release != nil {
		m.release()
	}
	if m.arena != nil {
		m.b.releaseArena(m.arena)
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
	return driver.ContextError(ctx)
}

// announcement is a word by which a peer says that a copy may be under way in our memory.
type announcement struct {
	c        *inbound
	line     int
	word     uint64
	harmless bool // a Revoke has seen to it that nothing of it lands any more
	gated    bool // the gate that the writer may have taken is shut
}

func (a *announcement) key() uint32 { return uint32(a.word) - 1 }

func (a *announcement) writes() bool { return a.word&announceWrite != 0 }

// announcements lists those of all peers that stand and that are chosen. ask has it ask the kernel
// whether a peer that announces something still lives.
func (b *Backend) announcements(ask bool, chosen func(*announcement) bool) (list []announcement) {
	for _, c := range *b.inbound.Load() {
		list = c.announcements(list, ask, chosen)
	}
	return list
}

func (c *inbound) announcements(
	list []announcement, ask bool, chosen func(*announcement) bool,
) []announcement {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.left || c.gone && c.hasLeft() {
		return list
	}
	others := len(list)
	for i := range announceMax {
		a := announcement{c: c, line: i, word: c.announcementIn(i)}
		// A peer numbers its announcements, and after 2^31 others a number comes again.
		if a.word != c.harmless[i] {
			c.harmless[i] = 0
		}
		if a.word != c.gated[i] {
			c.gated[i] = 0
		}
		a.harmless, a.gated = c.harmless[i] != 0, c.gated[i] != 0
		if a.word == 0 || !chosen(&a) {
			continue
		}
		if ask && c.hasLeft() {
			return list[:others]
		}
		list = append(list, a)
	}
	return list
}

// announcementIn reads the word of a line. Preconditions: c.mu is held, and c.page is mapped.
func (c *inbound) announcementIn(line int) uint64 {
	return word(c.page, announceAt+uint64(line)*lineBytes).Load()
}

// stands reports whether the announcement is still there, as far as is known.
func (a *announcement) stands() bool {
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	switch {
	case a.c.left:
		return false
	case a.c.page == nil: // the backend has ended: what peers still do is not known
		return true
	}
	return a.c.announcementIn(a.line) == a.word && !a.c.pid.Dead()
}

// shutOut makes what silent peers still do harmless, and remembers their announcements, so that
// the next Revoke does not wait for them again. Under shared memory it puts fresh pages: what such
// a peer still writes lands in pages that nothing uses. Before foreign memory it shuts the gate.
// Nothing of a reader can land here, so for readers alone it does nothing.
func (b *Backend) shutOut(ctx context.Context, m *memory, silent []announcement) error {
	writers := slices.DeleteFunc(slices.Clone(silent), func(a announcement) bool {
		return !a.writes()
	})
	var err error
	switch {
	case len(writers) == 0 || m.readOnly:
	case m.arena != nil:
		err = b.freshPages(ctx, m)
	default:
		err = b.shutGate(ctx, writers)
	}
	if err != nil {
		return err
	}
	for _, a := range silent {
		a.c.mu.Lock()
		a.c.harmless[a.line] = a.word
		a.c.mu.Unlock()
	}
	return nil
}

// freshMax is how many ranges one Revoke puts fresh pages under: each cuts the mapping of the arena
// in more pieces, of which there is a limited number for all memory in it.
const freshMax = 1000

// While pages move, peers cannot map the arena, and what they copy meanwhile they copy again. So
// Revoke moves so many bytes, or so many ranges, at a time, and then leaves the peers as much time
// as it has taken.
const (
	freshBytes  = 16 << 20
	freshRanges = 64
)

// freshPages puts fresh pages under all that peers may write: what writers still write lands in old
// pages. What the program writes in the same pages at that moment would be lost: that is its own
// affair with a lease of one range, and not done with ranges that others may lie between.
//
// Where ctx ends in between, the next call goes on. Preconditions: m.revokeLock is held.
func (b *Backend) freshPages(ctx context.Context, m *memory) error {
	ranges, err := m.writable()
	if err != nil {
		return err
	}
	for {
		begin := b.clock.Now()
		more, err := m.renewSome(ctx, ranges)
		if !more || err != nil {
			return err
		}
		if err := b.rest(ctx, time.Duration(b.clock.Now()-begin)); err != nil {
			return err
		}
	}
}

// writable lists the ranges that can have fresh pages.
func (m *memory) writable() (driver.Ranges, error) {
	if m.only == nil {
		return driver.Ranges{{Len: uint64(len(m.bytes))}}, nil
	}
	if len(m.only) > freshMax {
		return nil, fmt.Errorf("%d ranges, at most %d: lease larger blocks, or fewer at once: %w",
			len(m.only), freshMax, driver.ErrFull)
	}
	page, end := uint64(pageBytes), m.arena.size
	if s, ok := m.arena.shared.(interface {
		PageBytes() uint64
		Bytes() []byte
	}); ok {
		page, end = s.PageBytes(), uint64(len(s.Bytes())) // the rest of its last page is nothing's
	}
	for _, r := range m.only {
		from, to := m.off+r.Off, m.off+r.Off+r.Len
		if from%page != 0 || to%page != 0 && to != end {
			return nil, fmt.Errorf("ranges that share pages of %d bytes with others: lease whole "+
				"pages, or wait until the writer goes on: %w", page, driver.ErrBusy)
		}
	}
	return m.only, nil
}

// renewSome moves some pages, and reports whether there are more.
func (m *memory) renewSome(ctx context.Context, ranges driver.Ranges) (more bool, err error) {
	var moved, n uint64
	for _, r := range ranges {
		end := r.Off + r.Len
		if end <= m.renewed {
			continue
		}
		from := max(r.Off, m.renewed)
		step := (m.off+from)/freshBytes*freshBytes + freshBytes - m.off // where a huge page begins
		to := min(end, step)
		if moved += to - from; n == freshRanges || moved > freshBytes {
			return true, nil
		}
		if err := m.arena.shared.Renew(ctx, m.off+from, to-from); err != nil {
			return false, err
		}
		m.renewed = to
		if n++; to < end {
			return true, nil
		}
	}
	return false, nil
}

// shutGate keeps silent writers out of foreign memory. With the gate shut none of them
// begins a copy any more. One that was past it is in the middle of process_vm_writev,
// which nothing ends early, and which ends by itself: that is awaited, by the announcement
// or, of a process that stands still, by the threads that it has. A copy that is held up
// within the call (its source may lie on a disk that does not answer) is waited for until ctx is
// over, and so is a writer of another PID namespace, of whose threads nothing
// can be seen.
func (b *Backend) shutGate(ctx context.Context, writers []announcement) error {
	// A program that revokes again and again takes one place for a writer that stands still, and
	// not one each time.
	if slices.ContainsFunc(writers, func(a announcement) bool { return !a.gated }) {
		if err := b.gate.renew(&b.table, b.passers); err != nil {
			return err
		}
		for _, a := range writers {
			a.c.mu.Lock()
			a.c.gated[a.line] = a.word
			a.c.mu.Unlock()
		}
	}
	for _, a := range writers {
		threads, err := proc.ThreadsOf(a.c.pid.PID, unix.SYS_PROCESS_VM_WRITEV)
		if err != nil && !errors.Is(err, driver.ErrUnproven) {
			return err
		}
		out := func() bool { return err == nil && threads.Out() }
		for pause := revokeSleep; a.stands() && !out(); pause = min(2*pause, revokeSleepMax) {
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

// passers lists the writers that may be about to pass the gate of now: not those for which an
// earlier one was shut.
func (b *Backend) passers() []announcement {
	return b.announcements(true, func(a *announcement) bool { return a.writes() && !a.gated })
}

// oldWriters reports, when it is called later, whether the writers have left that may have pages
// of a generation that has just ended. Those that Revoke has made harmless have other pages: of
// the range that they write to, older ones.
func (b *Backend) oldWriters() (over func() bool) {
	writers := b.announcements(true, func(a *announcement) bool {
		return a.writes() && !a.harmless
	})
	return func() bool {
		writers = slices.DeleteFunc(writers, func(a announcement) bool { return !a.stands() })
		return len(writers) == 0
	}
}

// closeMemories ends all memories, and gives peers that are in the middle of a copy Config.Grace to
// leave. After that shared memory gets fresh pages, and the gate of foreign memory is shut for
// good.
// What cannot be proved is the error, here and of each later Memory.Revoke. All peers of ours are
// closed by now, and no Register begins.
func (b *Backend) closeMemories() error {
	all := map[uint32]*memory{}
	for i := range b.memories {
		if m := b.memories[i].Load(); m != nil {
			m.endEpoch()
			all[m.key] = m
		}
	}
	for key, m := range all {
		_ = m.revokeLock.Lock(context.Background()) // never fails
		if m.gone {                                 // its own Revoke came first
			m.revokeLock.Unlock()
			delete(all, key)
			continue
		}
		m.freeKey()
	}
	dangerous := func(a *announcement) bool { return !a.harmless }
	for end := b.clock.Now() + int64(b.cfg.Grace); b.clock.Now() < end; {
		if len(b.announcements(true, dangerous)) == 0 {
			break
		}
		b.clock.Sleep(revokeSleep)
	}

	err := b.closeGate(all)
	for _, m := range all {
		if m.arena != nil && !m.readOnly && len(b.announcements(true, func(a *announcement) bool {
			return dangerous(a) && a.writes() && a.key() == m.key
		})) > 0 {
			m.closeErr = b.lastPages(m)
			err = errors.Join(err, m.closeErr)
		}
		m.revokeLock.Unlock()
	}
	return err
}

// lastPages puts fresh pages under shared memory as the backend closes.
func (b *Backend) lastPages(m *memory) error {
	generation := b.table.generation(m.arena.index)
	defer m.arena.shared.OnRenew(func() func() bool { // the arena may have stopped to move it on
		generation.Add(1)
		return func() bool { return false } // whether the writer ever leaves will not be known
	})()
	if err := b.freshPages(context.Background(), m); err != nil {
		return fmt.Errorf("close shm: keep a frozen peer out: %w", err)
	}
	return nil
}

// closeGate keeps all peers out of foreign memory for good, and gives a copy under way
// Config.Grace to end. It says where a copy into one of these memories has not ended by then, or
// may still begin because the gate could not be shut. What the gates took of the address space is
// given back unless a peer may still be about to write there.
// Preconditions: all epochs have ended.
func (b *Backend) closeGate(all map[uint32]*memory) error {
	each := func(*announcement) bool { return true }
	err := b.gate.close(&b.table, b.passers)
	shut := err == nil
	deadline := b.clock.Now() + int64(b.cfg.Grace)
	var late error
	for _, a := range b.announcements(true, each) {
		threads, unseen := proc.ThreadsOf(a.c.pid.PID, unix.SYS_PROCESS_VM_WRITEV)
		dangerous := func() bool {
			return a.stands() && !(shut && unseen == nil && threads.Out())
		}
		for dangerous() && b.clock.Now() < deadline {
			b.clock.Sleep(revokeSleep)
		}
		m := all[a.key()]
		if m != nil && a.writes() && m.arena == nil && !m.readOnly && dangerous() {
			late = fmt.Errorf("close shm: a peer may still be in the middle of a copy into memory "+
				"that is not shareable: do not use it while that process lives: %w",
				driver.ErrTimeout)
			m.closeErr = late
		}
	}
	err = errors.Join(err, late)
	if len(b.announcements(true, each)) > 0 {
		return err
	}
	return errors.Join(err, b.gate.release())
}
