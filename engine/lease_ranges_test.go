// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

// wires are the backends by which two engines of one process meet here.
var wires = map[string]func() (driver.Backend, error){
	"mem": func() (driver.Backend, error) { return mem.New(mem.Config{}) },
	"shm": func() (driver.Backend, error) { return shm.New(shm.Config{}) },
	"tcp": func() (driver.Backend, error) {
		return tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	},
}

// poolOf returns two engines over a backend, the source of the one and the pool of the other.
func poolOf(t *testing.T, make func() (driver.Backend, error)) (p *Peer, src, pool *Region) {
	t.Helper()
	use := func(c *Config) {
		b, err := make()
		require.NoError(t, err)
		c.Backends = []driver.Backend{b}
	}
	owner, holder := open(t, "owner", use), open(t, "holder", use)
	src, pool = register(t, holder, "src", 1<<16), register(t, owner, "pool", 1<<16)
	fill(src.Bytes(), 9)
	return connect(t, holder, owner), src, pool
}

// TestLeaseRanges leases blocks 1, 3, 4 and 9 of 4 KiB, of which two join.
func TestLeaseRanges(t *testing.T) {
	for name, makeBackend := range wires {
		t.Run(name, func(t *testing.T) {
			leak.Check(t, hostmem.InUse)
			p, src, pool := poolOf(t, makeBackend)
			l, err := pool.LeaseRanges([]Range{{Off: 9 * 4096, Len: 4096},
				{Off: 3 * 4096, Len: 4096}, {Off: 4096, Len: 4096}, {Off: 4 * 4096, Len: 4096}},
				LeaseOptions{})
			require.NoError(t, err)
			m, err := p.Import(l.Token())
			require.NoError(t, err)
			require.Equal(t, pool.Size(), m.Size())
			require.Len(t, m.only, 3)

			tr := transfer(t, p, Write)
			require.NoError(t, tr.Add(src, 4096, m, 4096, 4096))
			require.NoError(t, tr.Add(src, 3*4096, m, 3*4096, 2*4096))
			list := []uint32{9}
			require.NoError(t, tr.AddPages(src, m, Pages{Count: 1, EntryLen: 4096,
				LocalBase: 9 * 4096, LocalStride: 4096, RemoteStride: 4096, Remote: list}))
			list[0] = 8 // the program's own list may not lead it elsewhere
			require.NoError(t, tr.Post())
			require.NoError(t, tr.Wait(within(t)))
			want := make([]byte, pool.Size())
			for _, block := range []int{1, 3, 4, 9} {
				copy(want[block*4096:], src.Bytes()[block*4096:][:4096])
			}
			require.True(t, bytes.Equal(want, pool.Bytes()))

			for _, at := range []Range{{Off: 0, Len: 1}, {Off: 4095, Len: 2},
				{Off: 2 * 4096, Len: 4096}, {Off: 0, Len: 1 << 16}, {Off: 4096, Len: 4097}} {
				require.ErrorIs(t, tr.Add(src, 0, m, at.Off, at.Len), ErrBounds)
			}
			for _, beside := range []Pattern{
				{Count: 2, Run: 64, Remote: Side{Stride: 4096, List: []uint32{9, 8}}},
				{Count: 1, Run: 64, Loops: []Loop{{N: 2, Local: 64, Remote: 4096}},
					Remote: Side{Base: 4096}},
			} {
				beside.Local.Stride = 4096
				require.ErrorIs(t, tr.AddPattern(src, m, beside), ErrBounds)
			}
			nest := Pattern{Count: 1, Run: 64, Loops: []Loop{{N: 2, Local: 64, Remote: 2 * 4096}},
				Remote: Side{Base: 4096}}
			require.NoError(t, tr.AddPattern(src, m, nest))

			require.NoError(t, l.Revoke(within(t)))
			require.NoError(t, tr.Post())
			require.ErrorIs(t, tr.Wait(within(t)), ErrRevoked)
			if !bytes.Equal(want, pool.Bytes()) {
				promise.Broken(t, "bytes landed after Revoke")
			}
			require.NoError(t, tr.Reset())
			require.NoError(t, m.Close())
		})
	}
}

// TestLeaseRangesOfNone are leases that cannot be.
func TestLeaseRangesOfNone(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	pool := register(t, open(t, "owner"), "pool", 1<<16)
	for name, ranges := range map[string][]Range{
		"none": nil, "empty": {{Off: 5}}, "past the end": {{Len: 1}, {Off: 1 << 16, Len: 1}},
		"past the numbers": {{Off: 1, Len: ^uint64(0)}},
	} {
		_, err := pool.LeaseRanges(ranges, LeaseOptions{})
		require.ErrorIs(t, err, ErrBounds, name)
	}
	many := make([]Range, 0, driver.RangesMax+1)
	for i := range cap(many) {
		many = append(many, Range{Off: uint64(i) * 2 % (1 << 16), Len: 1})
	}
	l, err := pool.LeaseRanges(many, LeaseOptions{}) // the same bytes again and again
	require.NoError(t, err)
	require.NoError(t, l.Revoke(within(t)))
	require.NoError(t, pool.Close())
}

// TestLeaseRangesOfALiar has an engine that does not look ask for what is beside the ranges: where
// the owner's side places the bytes, none lands there.
func TestLeaseRangesOfALiar(t *testing.T) {
	for _, name := range []string{"mem", "tcp"} {
		t.Run(name, func(t *testing.T) {
			leak.Check(t, hostmem.InUse)
			p, src, pool := poolOf(t, wires[name])
			l, err := pool.LeaseRanges([]Range{{Off: 4096, Len: 4096}}, LeaseOptions{})
			require.NoError(t, err)
			m, err := p.Import(l.Token())
			require.NoError(t, err)
			m.only = nil
			for _, op := range []Op{Write, Read} {
				before := bytes.Clone(src.Bytes())
				tr := transfer(t, p, op)
				require.NoError(t, tr.Add(src, 0, m, 8192, 4096))
				require.NoError(t, tr.Post())
				require.ErrorIs(t, tr.Wait(within(t)), ErrBounds)
				require.Equal(t, before, src.Bytes())
				require.NoError(t, tr.Close())
			}
			require.Equal(t, make([]byte, pool.Size()), pool.Bytes())

			require.NoError(t, m.Close())
			require.NoError(t, l.Revoke(within(t)))
		})
	}
}

// TestLeaseRangesStaged is that for memory of a kind which chains reach.
func TestLeaseRangesStaged(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	fill(a.mem, 3)
	l, err := b.hbm.LeaseRanges([]Range{{Off: 100, Len: 5000}, {Off: hostBytes - 7, Len: 7}},
		LeaseOptions{})
	require.NoError(t, err)
	m, err := p.Import(l.Token())
	require.NoError(t, err)
	tr := transfer(t, p, Write)
	require.NoError(t, tr.Add(a.hbm, 100, m, 100, 5000))
	require.NoError(t, tr.Add(a.hbm, hostBytes-7, m, hostBytes-7, 7))
	require.NoError(t, tr.Post())
	require.NoError(t, tr.Wait(within(t)))
	want := make([]byte, hostBytes)
	copy(want[100:5100], a.mem[100:])
	copy(want[hostBytes-7:], a.mem[hostBytes-7:])
	require.True(t, bytes.Equal(want, b.mem))
	require.ErrorIs(t, tr.Add(a.hbm, 0, m, 99, 2), ErrBounds)
	require.NoError(t, tr.Reset())

	m.only = nil
	require.NoError(t, tr.Add(a.hbm, 99, m, 99, 2))
	require.NoError(t, tr.Post())
	require.ErrorIs(t, tr.Wait(within(t)), ErrBounds)
	require.True(t, bytes.Equal(want, b.mem))
	require.NoError(t, tr.Reset())
	require.NoError(t, m.Close())
	require.NoError(t, l.Revoke(within(t)))
}
