// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// silent puts the announcement of a peer that never leaves into a page.
func silent(p *peer, key uint32, op driver.Op) {
	p.announce(key, op, 7)
}

func TestRevokePutsFreshPagesUnderASilentWriterOnce(t *testing.T) {
	clock := testkit.NewClock()
	b := openBy(t, clock, Config{})
	m, mem := share(t, b, drivertest.HostMemory, 1<<20)
	other, _ := share(t, b, drivertest.HostMemory, 1<<20)
	p := dial(t, open(t, Config{}), b.Addr())
	fill(mem, 0x5A)
	silent(p, m.Key(), driver.Write)
	alike(t, m) // so that the arena stays
	generation := b.table.generation(m.arena.index)
	before := generation.Load()

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, m.Revoke(ctx), context.DeadlineExceeded)
	require.Equal(t, before, generation.Load(), "a Revoke cut short moved pages")
	require.NoError(t, other.Revoke(t.Context())) // at once: the clock stands
	begin, stop := clock.Now(), clock.Run(time.Millisecond)
	require.NoError(t, m.Revoke(t.Context()))
	stop()
	require.GreaterOrEqual(t, clock.Now()-begin, int64(b.cfg.Grace))
	require.Greater(t, generation.Load(), before)
	require.Equal(t, len(mem), bytes.Count(mem, []byte{0x5A}))
	before = generation.Load()
	require.NoError(t, again(t, m).Revoke(t.Context())) // at once: the writer is known
	require.Equal(t, before, generation.Load(), "more fresh pages")
}

// What a reader still reads lands in its own memory: no page needs to move.
func TestRevokeMovesNoPagesForASilentReader(t *testing.T) {
	b := hasty(t)
	for _, alloc := range []drivertest.Allocator{drivertest.HostMemory, drivertest.ForeignMemory} {
		m, _ := share(t, b, alloc, 1<<20)
		p := dial(t, open(t, Config{}), b.Addr())
		silent(p, m.Key(), driver.Read)
		var before uint64
		if m.arena != nil {
			alike(t, m) // so that the arena stays
			before = b.table.generation(m.arena.index).Load()
		}
		require.NoError(t, m.Revoke(context.Background()))
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
			if err := far.arena.shared.Renew(t.Context(), 0, 1<<20); err != nil {
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
