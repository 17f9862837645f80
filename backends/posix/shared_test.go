// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
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
			sabotage(r, func(l *landing) {
				if landed++; l.r.kind == readInto && c.inside.Load() == 0 {
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

// TestARenewStopsNoRenew: a read begins when the Renew of its own memory is over, though that of
// other memory goes on.
func TestARenewStopsNoRenew(t *testing.T) {
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
		time.Sleep(10 * time.Millisecond) // both wait
		for i := range list {
			close(list[1-i].over)
			require.Eventually(t, func() bool {
				n, err := r.b.Poll(r.done[:])
				require.NoError(t, err)
				return n == 1 && r.done[0].Tag == uint64(1-i) && r.done[0].Err == nil
			}, 30*time.Second, time.Millisecond, "the read does not begin")
		}
	})
}

// TestARenewStopsNothingElse: reads into the memory begin when it is over, and nothing else waits.
func TestARenewStopsNothingElse(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 1 << 20
		r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), size), size), size)
		s := &renewed{over: make(chan struct{})}
		m, err := r.b.Register(driver.Segment{Kind: driver.DRAM, Len: size,
			Mem: make([]byte, size), Shared: s})
		require.NoError(t, err)
		require.NoError(t, r.p.Submit(99, &driver.Batch{Op: driver.Read,
			Descs: []driver.Desc{{Len: size, LocalKey: m.Key(), RemoteKey: r.remote}}}))
		for range 20 { // of other memory
			require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: size}))
		}
		close(s.over)
		for end := time.Now().Add(30 * time.Second); ; {
			n, err := r.b.Poll(r.done[:])
			require.NoError(t, err)
			if n == 1 {
				require.NoError(t, r.done[0].Err)
				require.Equal(t, uint64(99), r.done[0].Tag)
				break
			}
			require.True(t, time.Now().Before(end), "the read does not begin")
		}
		require.Zero(t, s.inside.Load())
	})
}
