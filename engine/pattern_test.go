// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// limits are what a Peer takes.
type limits struct {
	runs   int
	lenMax uint64
	can    driver.Can
}

// TestPatterns moves nests of loops and slots of several entries over peers that take them,
// cut where the backend has a limit, and over peers that do not, run by run. The pages take more
// batches than a backend has at once.
func TestPatterns(t *testing.T) {
	const all = driver.CanPattern | driver.CanNotify
	lists := Side{Base: 100, Stride: 4096, Step: 300, First: 1, Per: 4, List: []uint32{5, 2, 7, 0,
		9, 4}}
	count := Side{Base: 8, Stride: 1300, Per: 1}
	const many, entry = 1000, 24
	forward, backward := make([]uint32, many), make([]uint32, many)
	for i := range uint32(many) {
		forward[i], backward[i] = i*7%many, many-1-i
	}
	pages := func(p Pages) Pattern {
		p.Count, p.EntryLen = many, entry
		return p.Pattern()
	}
	for name, p := range map[string]Pattern{
		"plain": {Run: 64, Count: 20, Local: Side{Stride: 64}, Remote: Side{Base: 3, Stride: 100}},
		"slots": {Run: 200, Count: 21, Local: count, Remote: lists},
		"both": {Run: 50, Count: 21, Local: lists, Remote: Side{Stride: 400, Step: 60, Per: 3,
			First: 2}},
		"a nest": {Run: 16, Count: 21, Loops: []Loop{{N: 2, Local: 64, Remote: 128},
			{N: 3, Local: 16, Remote: 32}}, Local: count, Remote: lists},
		"deep": {Run: 8, Count: 5, Loops: []Loop{{N: 2, Local: 100, Remote: 400},
			{N: 2, Local: 40, Remote: 150}, {N: 2, Local: 8, Remote: 60}}, Local: count,
			Remote: count},
		"pages of two lists": pages(Pages{LocalStride: entry, RemoteStride: 40, RemoteBase: 3,
			Local: forward, Remote: backward}),
		"pages of no list": pages(Pages{LocalBase: 5, LocalStride: 32, RemoteStride: 30,
			RemoteBase: 1}),
		"pages of one list": pages(Pages{LocalStride: entry, RemoteStride: entry,
			Remote: backward}),
		"pages of one source": pages(Pages{LocalBase: 9, RemoteStride: 25, Remote: forward}),
	} {
		for _, b := range []limits{{runs: 1 << 16, can: all}, {runs: 13, can: all},
			{runs: 2, can: all},
			{can: driver.CanNotify},
			{runs: 100, lenMax: 7, can: all}} {
			t.Run(fmt.Sprintf("%s, %d runs of %d, %b", name, b.runs, b.lenMax, b.can),
				func(t *testing.T) {
					movePattern(t, b, p)
				})
		}
	}
}

func movePattern(t *testing.T, most limits, p Pattern) {
	limited := func() func(*Config) {
		return over(rigged(t, mem.Config{BatchesMax: 16}, rig{caps: func(c *driver.Caps) {
			c.RunsMax, c.LenMax, c.DescsMax = most.runs, most.lenMax, 5
		}, can: func(driver.Can) driver.Can { return most.can }}))
	}
	a, b := open(t, "a", limited()), open(t, "b", limited())
	src, dst := register(t, a, "src", 1<<16), register(t, b, "dst", 1<<16)
	fill(src.Bytes(), 7)
	peer := connect(t, a, b)
	want := make([]byte, dst.Size())
	var runs []driver.Desc
	for i := range p.Count {
		for _, d := range p.AppendDescs(runs[:0], i) {
			copy(want[d.Remote:][:d.Len], src.Bytes()[d.Local:])
		}
	}
	tr := transfer(t, peer, Write)
	check(t, tr.AddPattern(src, remote(t, peer, "dst"), p))
	check(t, tr.Notify([]byte("all")))
	for range 2 {
		clear(dst.Bytes())
		run(t, tr)
		next(t, b)
		require.True(t, bytes.Equal(want, dst.Bytes()))
	}
	for i := range tr.batches {
		if g := tr.batches[i].Pattern; g != nil && most.lenMax > 0 && g.Run > most.lenMax {
			t.Fatalf("entries of %d bytes to a backend of at most %d", g.Run, most.lenMax)
		}
	}
	p.Remote.Base = 1 << 16
	check(t, tr.Reset())
	require.ErrorIs(t, tr.AddPattern(src, remote(t, peer, "dst"), p), ErrBounds)
}

// TestSixteenThousand has as many regions, leases and imports as a model of many
// layers and requests.
func TestSixteenThousand(t *testing.T) {
	const count = 16000
	a, b := open(t, "a"), open(t, "b")
	whole := register(t, b, "whole", count*64)
	src := register(t, a, "src", 64)
	fill(src.Bytes(), 1)
	for i := range uint64(count) {
		seg, err := whole.seg.Slice(i*64, 64, [16]byte{})
		check(t, err)
		_, err = b.Register(fmt.Sprintf("kv.%05d", i), seg)
		check(t, err)
	}
	d, err := b.Describe()
	check(t, err)
	if len(d) > 32*(count+1) {
		t.Errorf("a description of %d regions takes %d bytes, want 32 for each", count, len(d))
	}
	p, err := a.Connect(within(t), d)
	check(t, err)
	for range 2 {
		check(t, p.Refresh(d))
	}
	tr := transfer(t, p, Write)
	for i := range count {
		check(t, tr.Add(src, 0, remote(t, p, fmt.Sprintf("kv.%05d", i)), 0, 64))
	}
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	require.True(t, bytes.Equal(whole.Bytes(), bytes.Repeat(src.Bytes(), count)),
		"not every region holds the bytes")
	leases := make([]*Lease, count/8)
	for i := range leases {
		leases[i], err = whole.Lease(uint64(i)*64, 64, LeaseOptions{})
		check(t, err)
		m, err := p.Import(leases[i].Token())
		check(t, err)
		check(t, m.Close())
	}
	check(t, b.Close())
	for _, l := range leases {
		select {
		case <-l.Revoked():
		default:
			t.Fatal("the engine is closed and a lease is not revoked")
		}
	}
	if s := b.Stats(); s.Regions != 0 || s.Leases != 0 {
		t.Errorf("left: %+v", s)
	}
}
