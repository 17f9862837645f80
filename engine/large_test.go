// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// narrow is mem with limits so small that lists are cut into hundreds of batches.
type narrow struct {
	*mem.Backend
	pagesMax int
	lenMax   uint64
}

func (n narrow) Caps() driver.Caps {
	c := n.Backend.Caps()
	c.DescsMax, c.RunsMax, c.LenMax = 3, n.pagesMax, n.lenMax
	return c
}

// TestHugeLists moves lists of more batches than a backend has at once.
func TestHugeLists(t *testing.T) {
	const count, entry = 1000, 24
	index := func(f func(i uint32) uint32) []uint32 {
		list := make([]uint32, count)
		for i := range list {
			list[i] = f(uint32(i))
		}
		return list
	}
	forward := index(func(i uint32) uint32 { return i * 7 % count })
	backward := index(func(i uint32) uint32 { return count - 1 - i })
	for name, p := range map[string]Pages{
		"two lists": {Count: count, EntryLen: entry, LocalStride: entry, RemoteStride: 40,
			RemoteBase: 3, Local: forward, Remote: backward},
		"no list": {Count: count, EntryLen: entry, LocalBase: 5, LocalStride: 32,
			RemoteStride: 30, RemoteBase: 1},
		"one list": {Count: count, EntryLen: entry, LocalStride: entry, RemoteStride: entry,
			Remote: backward},
		"one source": {Count: count, EntryLen: entry, LocalBase: 9, RemoteStride: 25,
			Remote: forward},
	} {
		for _, limits := range []narrow{{pagesMax: 2}, {pagesMax: 7}, {lenMax: 5},
			{pagesMax: 4, lenMax: 5}, {pagesMax: 1 << 10}} {
			t.Run(fmt.Sprintf("%s, %d pages, %d bytes", name, limits.pagesMax, limits.lenMax),
				func(t *testing.T) {
					move(t, limits, p)
				})
		}
	}
}

func move(t *testing.T, limits narrow, p Pages) {
	over := func(c *Config) {
		limits.Backend, _ = mem.New(mem.Config{BatchesMax: 16})
		c.Backends = []driver.Backend{limits}
	}
	a, b := open(t, "a", over), open(t, "b", over)
	src, dst := register(t, a, "src", 1<<16), register(t, b, "dst", 1<<16)
	fill(src.Bytes(), 7)
	peer := connect(t, a, b)
	tr := transfer(t, peer, Write)
	want := make([]byte, dst.Size())
	at := p.Pattern()
	for i := range p.Count {
		copy(want[at.Remote.At(i):][:p.EntryLen], src.Bytes()[at.Local.At(i):])
	}
	for range 3 {
		check(t, tr.AddPages(src, remote(t, peer, "dst"), p))
		check(t, tr.Notify([]byte("all")))
		for range 2 {
			clear(dst.Bytes())
			check(t, tr.Post())
			if n := next(t, b); string(n.Data) != "all" || !bytes.Equal(dst.Bytes(), want) {
				t.Fatalf("message %q; bytes differ: %v", n.Data, !bytes.Equal(dst.Bytes(), want))
			}
			check(t, tr.Wait(within(t)))
		}
		for i := range tr.batches {
			if g := tr.batches[i].Pattern; g != nil && limits.lenMax > 0 && g.Run > limits.lenMax {
				t.Fatalf("entries of %d bytes to a backend of at most %d", g.Run, limits.lenMax)
			}
		}
		check(t, tr.Reset())
	}
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
	if !bytes.Equal(whole.Bytes(), bytes.Repeat(src.Bytes(), count)) {
		t.Error("not every region holds the bytes")
	}
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
