// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

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
// Where ctx ends in between, the next call goes on. Preconditions: m.turn is held.
func (b *Backend) freshPages(ctx context.Context, m *memory) error {
	ranges, err := m.writable()
	if err != nil {
		return err
	}
	for {
		begin := b.clock.Now()
		more, err := m.moveSome(ctx, ranges)
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

// moveSome moves some pages, and reports whether there are more.
func (m *memory) moveSome(ctx context.Context, ranges driver.Ranges) (more bool, err error) {
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

// freshFor puts fresh pages under shared memory that Backend.Close has ended while a peer is still
// in the middle of a write into it. Whether that ever ends will not be known.
func (b *Backend) freshFor(m *memory) error {
	writes := false
	for _, c := range *b.inbound.Load() {
		c.eachIn(m.key, true, func(_ int, _ uint64, write bool) { writes = writes || write })
	}
	if !writes || m.readOnly {
		return nil
	}
	generation := b.table.generation(m.arena.index)
	defer m.arena.shared.OnRenew(func() func() bool { // the arena may have stopped to move it on
		generation.Add(1)
		return func() bool { return false }
	})()
	if err := b.freshPages(context.Background(), m); err != nil {
		return fmt.Errorf("close shm: keep a frozen peer out: %w", err)
	}
	return nil
}
