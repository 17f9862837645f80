// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// counted stands in for memory whose pages may be renewed: it counts what is inside.
type counted struct {
	driver.Shared
	inside, entered atomic.Int64
}

func (c *counted) TryEnter() bool { c.Enter(); return true }
func (c *counted) Enter()         { c.inside.Add(1); c.entered.Add(1) }
func (c *counted) Leave()         { c.inside.Add(-1) }

// TestReadsEnter has reads, straight, through the page cache and by a buffer, end while pages
// cannot be renewed, and writes not mind.
func TestReadsEnter(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 1 << 20
		for _, cfg.Buffered = range []bool{false, true} {
			r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), size), size), size)
			c := &counted{}
			seg := driver.Segment{Kind: driver.DRAM, Len: size, Mem: r.mem, Shared: c}
			m, err := r.b.Register(seg)
			require.NoError(t, err)
			r.local = m.Key()
			landed := 0
			sabotage(r, func(l *files.Landing) {
				if landed++; l.R.Kind == files.Read && c.inside.Load() == 0 {
					t.Error("a read has landed where pages could be renewed")
				}
			})
			require.NoError(t, r.move(t, driver.Write, driver.Desc{Len: size}))
			require.Zero(t, c.entered.Load(), "a write has entered")
			for _, d := range []driver.Desc{{Len: size}, {Local: 3, Remote: 5, Len: 100},
				{Remote: 9, Len: size - 9}} {
				before := c.entered.Load()
				require.NoError(t, r.move(t, driver.Read, d))
				require.Greater(t, c.entered.Load(), before)
				require.Zero(t, c.inside.Load(), "a read has not left")
			}
			// Two memories whose pieces follow each other in the file, for one request.
			other := &counted{}
			seg.Shared = other
			m, err = r.b.Register(seg)
			require.NoError(t, err)
			require.NoError(t, r.p.Submit(1, &driver.Batch{Op: driver.Read, Descs: []driver.Desc{
				{Len: size / 4, LocalKey: r.local, RemoteKey: r.remote},
				{Local: size / 2, Remote: size / 4, Len: size / 4, LocalKey: m.Key(),
					RemoteKey: r.remote}}}))
			require.NoError(t, r.outcome(t, 1))
			require.Zero(t, c.inside.Load())
			require.Zero(t, other.inside.Load())
			require.NotZero(t, other.entered.Load())
			require.NotZero(t, landed)
		}
	})
}

// renewed is memory with a Renew that runs until it is over.
type renewed struct {
	counted
	over chan struct{}
}

func (r *renewed) Enter() { <-r.over; r.counted.Enter() }

func (r *renewed) TryEnter() bool {
	select {
	case <-r.over:
		return r.counted.TryEnter()
	default:
		return false
	}
}

// TestARenewStopsNothingElse: a read begins when the Renew of its own memory is over, and waits for
// that of no other memory. What no Renew concerns does not wait.
func TestARenewStopsNothingElse(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 4096
		r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), size), size), size)
		var list [2]*renewed
		for i := range list {
			list[i] = &renewed{over: make(chan struct{})}
			m, err := r.b.Register(driver.Segment{Kind: driver.DRAM, Len: size,
				Mem: make([]byte, size), Shared: list[i]})
			require.NoError(t, err)
			require.NoError(t, r.p.Submit(uint64(i), &driver.Batch{Op: driver.Read,
				Descs: []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: r.remote}}}))
		}
		for range 20 { // of other memory
			require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: size}))
		}
		for i := range list {
			close(list[1-i].over)
			require.NoError(t, r.outcome(t, uint64(1-i)))
			require.Zero(t, list[1-i].inside.Load())
		}
	})
}
