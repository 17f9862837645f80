// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// silent puts the announcement of a peer that never leaves into a page.
func silent(p *peer, key uint32, op driver.Op) {
	p.announce(key, op, 7)
}

func TestFencePutsFreshPagesUnderASilentWriterOnce(t *testing.T) {
	const grace = 500 * time.Millisecond
	b := open(t, Config{Grace: grace})
	m, mem := share(t, b, drivertest.HostMemory, 1<<20)
	other, _ := share(t, b, drivertest.HostMemory, 1<<20)
	p := dial(t, open(t, Config{}), b.Addr())
	fill(mem, 0x5A)
	silent(p, m.Key(), driver.Write)
	generation := b.table.generation(m.arena.index)
	before := generation.Load()

	b.cfg.Grace = time.Hour // for the fence that is cut short, however long it takes
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	wantError(t, "fence cut short", b.Fence(ctx, m.Key()), context.DeadlineExceeded)
	if generation.Load() != before {
		t.Error("a fence cut short moved pages")
	}
	if took := leastFence(t, b, other); took >= time.Hour {
		t.Errorf("fence of other memory: after %v, want at once", took)
	}
	b.cfg.Grace = grace
	begin := time.Now()
	require.NoError(t, b.Fence(context.Background(), m.Key()))
	if time.Since(begin) < grace || generation.Load() == before {
		t.Errorf("fence took %v and generation %d, want the grace %v and fresh pages",
			time.Since(begin), generation.Load(), grace)
	}
	if mem[0] != 0x5A || mem[len(mem)-1] != 0x5A {
		t.Error("fresh pages have lost the content")
	}
	before = generation.Load()
	if took := leastFence(t, b, m); took >= grace || generation.Load() != before {
		t.Errorf("second fence: after %v, want at once, and no more fresh pages", took)
	}
}

// leastFence is the least time of some fences: the machine may be busy with others for a while.
func leastFence(t *testing.T, b *Backend, m *memory) time.Duration {
	t.Helper()
	least := time.Duration(math.MaxInt64)
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		begin := time.Now()
		require.NoError(t, b.Fence(ctx, m.Key()))
		cancel()
		least = min(least, time.Since(begin))
	}
	return least
}

// What a reader still reads lands in its own memory: no page needs to move.
func TestFenceMovesNoPagesForASilentReader(t *testing.T) {
	b := open(t, Config{Grace: 10 * time.Millisecond})
	for _, alloc := range []drivertest.Allocator{drivertest.HostMemory, drivertest.ForeignMemory} {
		m, _ := share(t, b, alloc, 1<<20)
		p := dial(t, open(t, Config{}), b.Addr())
		silent(p, m.Key(), driver.Read)
		var before uint64
		if m.arena != nil {
			before = b.table.generation(m.arena.index).Load()
		}
		require.NoError(t, b.Fence(context.Background(), m.Key()))
		if m.arena != nil && b.table.generation(m.arena.index).Load() != before {
			t.Error("a silent reader made pages move")
		}
	}
}

// A copy that was under way while pages moved is done again, into the new ones.
func TestMoveNoticesPagesThatMovedUnderIt(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	far, farMem := share(t, owner, drivertest.HostMemory, 1<<20)
	near, mem := share(t, b, drivertest.HostMemory, 1<<20)
	p := dial(t, b, owner.Addr())
	token, _ := far.AppendToken(nil)
	key, _, err := p.Import(token)
	require.NoError(t, err)
	fill(mem, 0x77)
	stop := make(chan struct{})
	renewed := make(chan int)
	go func() {
		n := 0
		for ; ; n++ {
			select {
			case <-stop:
				renewed <- n
				return
			default:
			}
			if err := far.arena.shared.Renew(0, 1<<20); err != nil {
				t.Error(err)
			}
			time.Sleep(300 * time.Microsecond)
		}
	}()
	for i := range uint64(200) {
		off := i * 4096
		d := []driver.Desc{{Local: off, Remote: off, Len: 4096, LocalKey: near.Key(),
			RemoteKey: key}}
		require.NoError(t, p.Submit(i, &driver.Batch{Op: driver.Write, Descs: d}))
		require.NoError(t, await(t, b, i))
	}
	close(stop)
	if n := <-renewed; n < 3 {
		t.Logf("only %d renewals met 200 writes", n)
	}
	for i, v := range farMem[:200*4096] {
		if v != 0x77 {
			t.Fatalf("byte %d was written to old pages, and called done", i)
		}
	}
}

func TestExplainNamesTheWay(t *testing.T) {
	owner, b := open(t, Config{}), open(t, Config{})
	near, _ := share(t, b, drivertest.HostMemory, 4096)
	p := dial(t, b, owner.Addr())
	seen := make(map[string]bool)
	for _, alloc := range []drivertest.Allocator{drivertest.HostMemory, drivertest.ForeignMemory} {
		m, _ := share(t, owner, alloc, 4096)
		token, _ := m.AppendToken(nil)
		key, _, err := p.Import(token)
		require.NoError(t, err)
		seen[p.Explain(near.Key(), key)] = true
	}
	if len(seen) != 2 || seen["shm: unknown key"] {
		t.Errorf("explanations: %v, want a mapped one and one by the kernel", seen)
	}
	if err := p.Submit(1, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 1, LocalKey: near.Key(), RemoteKey: 999}}}); !errors.Is(err,
		driver.ErrBounds) {
		t.Errorf("unknown key: %v, want ErrBounds", err)
	}
}
