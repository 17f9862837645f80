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

// Revoke implements driver.Memory. It ends the epoch, so that no new copy begins, and waits until
// no copy is announced. A peer that is still announced after Config.Grace is frozen: shutOut makes
// its writes harmless. Revoke always waits for copies of this backend's own goroutines, which have
// no other pages: they cannot be frozen while Revoke runs.
func (m *memory) Revoke(ctx context.Context) error {
	b := m.b
	b.revokes.RLock() // the table and the peers' pages stay
	defer b.revokes.RUnlock()

	// End the epoch. A peer that announces a copy from now on sees that, and copies nothing.
	m.endEpoch()
	if err := m.revokeLock.Lock(ctx); err != nil {
		return fmt.Errorf("revoke memory: another call looks for the proof: %w", err)
	}
	defer m.revokeLock.Unlock()
	if m.gone {
		return m.closeErr
	}

	// Wait for the copies that were announced before. Shut out a peer that stays for too long.
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

	// Free the key. Its next memory has the next epoch.
	m.freeKey()
	return nil
}

// endEpoch ends the epoch of the key, so that all tokens are refused from now on.
func (m *memory) endEpoch() {
	m.b.mu.Lock()
	defer m.b.mu.Unlock()
	if !m.revoked {
		m.revoked = true
		m.b.table.retract(m.key)
	}
}

// freeKey frees the key, and releases the arena and the caller's memory. Precondition: m.revokeLock
// is held.
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

// rest waits for a time, or until ctx ends: then it returns an error.
//
// Revoke counts the pauses that it asked for against Config.Grace, and not the time by the clock:
// while this process was stopped, or a busy machine did not run it, it has not looked at peers.
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
	harmless bool // a Revoke has made sure that the copy cannot land in memory in use
	gated    bool // the gate that the writer may use is shut
}

func (a *announcement) key() uint32 { return uint32(a.word) - 1 }

func (a *announcement) writes() bool { return a.word&announceWrite != 0 }

// announcements returns the present announcements of all peers for which chosen returns true. With
// ask it also asks the kernel whether these peers live, and leaves out those that are dead.
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

// announcementIn returns the word of a line. Preconditions: c.mu is held, and c.page is mapped.
func (c *inbound) announcementIn(line int) uint64 {
	return word(c.page, announceAt+uint64(line)*lineBytes).Load()
}

// stands reports whether the copy may still be under way: the peer lives and has not withdrawn the
// announcement. If this backend can no longer see that, stands returns true.
func (a *announcement) stands() bool {
	a.c.mu.Lock()
	defer a.c.mu.Unlock()
	switch {
	case a.c.left:
		return false
	case a.c.page == nil: // the backend is closed and sees no announcements any more
		return true
	}
	return a.c.announcementIn(a.line) == a.word && !a.c.pid.Dead()
}

// shutOut makes the copies of silent peers harmless, and remembers their announcements, so that the
// next Revoke does not wait for them again. It gives shared memory fresh pages: late writes then
// land in pages that nothing uses. For foreign memory it shuts the gate. If all silent peers are
// readers it does neither, since a reader writes nothing here.
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

// freshMax bounds the ranges to which one Revoke gives fresh pages. Each range cuts the mapping of
// the arena into more pieces, whose number is limited for all memory in the arena.
const freshMax = 1000

// While pages are replaced, peers cannot map the arena, and have to repeat the copies that they
// make meanwhile. So Revoke replaces at most so many bytes or ranges at a time, and then pauses for
// as long as that took.
const (
	freshBytes  = 16 << 20
	freshRanges = 64
)

// freshPages replaces the pages of all ranges that peers may write to. Late writes then land in the
// old pages. So do writes of the program to other bytes of these pages while they are replaced,
// which are lost. writable refuses ranges that share pages with such bytes. An engine names the
// ranges also of a lease or a region that is one, where it begins or ends within a page.
//
// If ctx ends, the next call continues from there. Precondition: m.revokeLock is held.
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

// writable returns the ranges that peers may write to, or an error if they cannot have fresh pages.
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
		page, end = s.PageBytes(), uint64(len(s.Bytes())) // the rest of the last page is unused
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

// renewSome replaces the pages of some ranges, and reports whether there are more.
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

// shutGate keeps silent writers out of foreign memory. With the gate shut no writer can begin a
// copy. A writer that has passed the gate is inside process_vm_writev. Nothing can end that call
// early, but it ends by itself, so shutGate waits: until the announcement is gone or, for a stopped
// process, until /proc shows that none of its threads is inside the call.
//
// Two kinds of writer can make it wait until ctx ends: one whose call does not end, because its
// source is on a disk that does not answer, and one of another PID namespace, whose threads this
// process cannot see.
func (b *Backend) shutGate(ctx context.Context, writers []announcement) error {
	// A stopped writer that an earlier Revoke has gated needs no other gate: the old gate's address
	// stays in use because of it, and a program that revokes often must not use up addresses.
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

// passers returns the writers that may pass the present gate: all but those for which an earlier
// gate was shut.
func (b *Backend) passers() []announcement {
	return b.announcements(true, func(a *announcement) bool { return a.writes() && !a.gated })
}

// oldWriters returns a function that reports whether all writers are gone that may have mapped
// pages of the generation that has just ended. A harmless writer is not one of them: in the range
// to which it writes it has pages of an earlier generation.
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
