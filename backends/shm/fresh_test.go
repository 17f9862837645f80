// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"encoding/binary"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// TestFreshPagesAreAMatterOfTheContext has a Revoke of much memory end in between. The next one
// goes on from there.
func TestFreshPagesAreAMatterOfTheContext(t *testing.T) {
	const steps = 3
	b := hasty(t)
	m, mem := share(t, b, drivertest.HostMemory, steps*freshBytes)
	fill(mem, 0x3C)
	p := dial(t, open(t, Config{}), b.Addr())
	renewals, cancel := 0, func() {}
	t.Cleanup(m.arena.shared.OnRenew(func() func() bool {
		renewals++
		cancel()
		return nil
	}))
	silent(p, m.Key(), driver.Write)
	var ctx context.Context
	ctx, cancel = context.WithCancel(t.Context())
	require.ErrorIs(t, m.Revoke(ctx), context.Canceled)
	require.Equal(t, 1, renewals, "after its context had ended")
	cancel = func() {}
	require.NoError(t, m.Revoke(t.Context()))
	require.Equal(t, steps, renewals)
	m = again(t, m)
	require.NoError(t, m.Revoke(t.Context()))
	require.Equal(t, steps, renewals, "the writer is known")
	for i, v := range mem {
		if v != 0x3C {
			t.Fatalf("byte %d is another one", i)
		}
	}
}

// TestAPeerGoesOnBesideFreshPages writes again and again beside the range that gets them.
func TestAPeerGoesOnBesideFreshPages(t *testing.T) {
	const far, beside = 4 * freshBytes, 1 << 20
	owner, b := hasty(t), open(t, Config{})
	space, err := drivertest.HostMemory(far + beside)
	require.NoError(t, err)
	t.Cleanup(func() { _ = owner.Close(); _ = space.Free() })
	lease := func(off, n uint64) *memory {
		seg, err := space.Segment.Slice(off, n, [16]byte{byte(n >> 20)})
		require.NoError(t, err)
		m, err := owner.Register(seg)
		require.NoError(t, err)
		return m.(*memory)
	}
	big, small := lease(0, far), lease(far, beside)
	near, _ := share(t, b, drivertest.HostMemory, beside)
	p := dial(t, b, owner.Addr())
	token, err := small.AppendToken(nil)
	require.NoError(t, err)
	key, _ := take(t, p, token)
	_, err = big.AppendToken(nil)
	require.NoError(t, err)
	silent(p, big.Key(), driver.Write)
	revoked, writes := make(chan error, 1), uint64(0)
	go func() { revoked <- big.Revoke(context.Background()) }()
	for over := false; !over; writes++ {
		select {
		case err := <-revoked:
			require.NoError(t, err)
			over = true
		default:
		}
		require.NoError(t, p.Submit(writes, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
			{Len: beside, LocalKey: near.Key(), RemoteKey: key}}}))
		require.NoError(t, await(t, b, writes))
	}
	t.Logf("%d writes", writes)
}

// mappings counts those of this process.
func mappings(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return strings.Count(string(text), "\n")
}

// silentLease registers part of a memory, has a writer be silent in it, revokes it, and lets the
// writer leave.
func silentLease(t *testing.T, owner *Backend, p *peer, seg driver.Segment, n int) {
	t.Helper()
	binary.LittleEndian.PutUint32(seg.Secret[:], uint32(n+1))
	mem, err := owner.Register(seg)
	require.NoError(t, err)
	_, err = mem.AppendToken(nil)
	require.NoError(t, err)
	line := p.announce(mem.Key(), driver.Write, 7)
	require.NoError(t, mem.Revoke(t.Context()), "revoke %d", n)
	line.Store(0)
}

// TestSoakSilentWriterRevokes has 5,000 revokes meet a writer that is silent, and leaves
// afterwards, over each kind of memory; of ranges, 500. Each has its proof, and what the proofs
// take is given back: each block has its turn an even number of times.
func TestSoakSilentWriterRevokes(t *testing.T) {
	const blocks = 5000
	for name, c := range map[string]struct {
		revokes int
		lease   func(whole driver.Segment, i int) driver.Segment
	}{
		"a block": {5000, func(whole driver.Segment, i int) driver.Segment {
			seg, err := whole.Slice(uint64(2*i+1)%blocks*pageBytes, pageBytes, [16]byte{})
			require.NoError(t, err)
			return seg
		}},
		"ranges": {500, func(whole driver.Segment, i int) driver.Segment {
			for j := range uint64(100) {
				at := (uint64(i)%25*100 + j) * 2 * pageBytes
				whole.Only = append(whole.Only, driver.Range{Off: at, Len: pageBytes})
			}
			return whole
		}},
		"memory that is not shareable": {5000, func(whole driver.Segment, i int) driver.Segment {
			return driver.Segment{Kind: driver.DRAM, Len: whole.Len, Mem: whole.Mem}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			owner, b := open(t, Config{}), open(t, Config{})
			owner.cfg.Grace = 10 * time.Microsecond
			buf, err := hostmem.Alloc(blocks*pageBytes, hostmem.Options{Purpose: "test",
				Huge: hostmem.HugeNone})
			require.NoError(t, err)
			t.Cleanup(func() { _ = owner.Close(); require.NoError(t, buf.Close()) })
			whole, err := owner.Register(buf.Segment())
			require.NoError(t, err)
			p := dial(t, b, owner.Addr())
			keys, before := len(owner.freeKeys), mappings(t)
			for i := range c.revokes {
				silentLease(t, owner, p, c.lease(buf.Segment(), i), i)
			}
			require.NoError(t, buf.Lend(func(extents []driver.Extent) error {
				require.Len(t, extents, 1, "pieces")
				return nil
			}))
			require.Len(t, owner.freeKeys, keys, "leases")
			require.Len(t, owner.arenas, 1)
			require.LessOrEqual(t, len(owner.gate.old), 1)
			require.InDelta(t, before, mappings(t), 30, "mappings; the runtime has some")
			require.NoError(t, whole.Revoke(t.Context()))
		})
	}
}
