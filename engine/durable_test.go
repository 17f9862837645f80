// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// newDisk makes a device of files that says when their bytes would survive a loss of power.
func newDisk(t testing.TB) *device {
	d := newDevice(t, "disk", driver.File)
	d.says = true
	return d
}

// wrote fails the test unless so many bytes were written durably, and none otherwise.
func (d *device) wrote(t testing.TB, what string, n int64) {
	t.Helper()
	if got, plain := d.durable.Swap(0), d.plain.Swap(0); got != n || plain != 0 {
		t.Errorf("%s: %d bytes were written durably, want %d, and %d batches otherwise", what, got,
			n, plain)
	}
}

func durable(t testing.TB, p *Peer) *Transfer {
	t.Helper()
	tr, err := p.e.NewTransfer(p, Write, Route{Durable: true})
	check(t, err)
	t.Cleanup(func() {
		_ = tr.Abort(context.Background())
		_ = tr.Close()
	})
	return tr
}

// TestDurable writes to a file of the own engine, of descriptors and of patterns, and with a
// message behind.
func TestDurable(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	d, hbm := newDisk(t), newDevice(t, "device", driver.HBM)
	wire := newMem(t)
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{wire, hbm, d} })
	src := register(t, e, "src", 3<<20)
	seg, file := d.alloc(t, 3<<20)
	_, err := e.Register("file", seg)
	check(t, err)
	seg, there := hbm.alloc(t, 3<<20)
	fromHBM, err := e.Register("hbm", seg)
	check(t, err)
	p, err := e.Self()
	check(t, err)
	m := remote(t, p, "file")
	fill(src.Bytes(), 1)
	fill(there, 7)

	tr := durable(t, p)
	check(t, tr.Add(src, 0, m, 100, 1<<20))
	check(t, tr.AddPages(src, m, Pages{Count: 5, EntryLen: 10, LocalStride: 10, RemoteBase: 2 << 20,
		RemoteStride: 100}))
	check(t, tr.Notify([]byte("there")))
	run(t, tr)
	d.wrote(t, "from DRAM", 1<<20+50)
	require.True(t, bytes.Equal(file[100:][:1<<20], src.Bytes()[:1<<20]), "other bytes have come")
	if n := <-e.Notifications(); string(n.Data) != "there" {
		t.Errorf("the message reads %q", n.Data)
	}

	tr = durable(t, p)
	check(t, tr.Add(fromHBM, 5, m, 0, 2<<20)) // a chain within the engine
	run(t, tr)
	d.wrote(t, "from a device", 2<<20)
	require.True(t, bytes.Equal(file[:2<<20], there[5:][:2<<20]),
		"other bytes have come from the device")

	tr = transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 77))
	run(t, tr)
	if d.durable.Load() != 0 || d.plain.Load() != 1 {
		t.Error("a write that nobody wanted to be durable is")
	}
}

// TestDurableFar writes to a file of a peer: the peer's engine makes the last hop, and makes it
// durable.
func TestDurableFar(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	d := newDisk(t)
	a := open(t, "a", func(c *Config) { c.Backends = []driver.Backend{newMem(t)} })
	b := open(t, "b", func(c *Config) { c.Backends = []driver.Backend{newMem(t), d} })
	src := register(t, a, "src", 5<<20)
	seg, file := d.alloc(t, 5<<20)
	_, err := b.Register("file", seg)
	check(t, err)
	p := connect(t, a, b)
	m := remote(t, p, "file")
	fill(src.Bytes(), 1)
	tr := durable(t, p)
	check(t, tr.Add(src, 0, m, 3, 4<<20))
	check(t, tr.AddPages(src, m, Pages{Count: 9, EntryLen: 100, LocalStride: 100,
		RemoteBase: 4<<20 + 3, RemoteStride: 100}))
	run(t, tr)
	d.wrote(t, "to a file of a peer", 4<<20+900)
	require.True(t, bytes.Equal(file[3:][:4<<20], src.Bytes()[:4<<20]), "other bytes have come")
	tr = transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 1000))
	run(t, tr)
	if d.durable.Load() != 0 || d.plain.Load() == 0 {
		t.Error("a write that nobody wanted to be durable is")
	}
}

// TestDurableRefused: nobody is told that bytes are safe by what cannot know.
func TestDurableRefused(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	plain := newDevice(t, "disk", driver.File) // a peer's, that does not say when
	a := open(t, "a", func(c *Config) { c.Backends = []driver.Backend{newMem(t)} })
	b := open(t, "b", func(c *Config) { c.Backends = []driver.Backend{newMem(t), plain} })
	src, _ := register(t, a, "src", 1<<20), register(t, b, "dram", 1<<20)
	own := register(t, b, "own", 1<<20)
	seg, file := plain.alloc(t, 1<<20)
	_, err := b.Register("file", seg)
	check(t, err)
	fill(src.Bytes(), 3)
	p := connect(t, a, b)

	require.ErrorIs(t, second(a.NewTransfer(p, Read, Route{Durable: true})), ErrNotSupported,
		"a durable read")
	tr := durable(t, p)
	err = tr.Add(src, 0, remote(t, p, "dram"), 0, 10)
	if !errors.Is(err, ErrNoRoute) || !strings.Contains(err.Error(), "mem: "+notDurable) ||
		!strings.Contains(err.Error(), "dram of region dram") {
		t.Errorf("memory of a peer: %v", err)
	}
	staged, err := a.NewTransfer(p, Write, Route{Only: Staged, Durable: true})
	check(t, err)
	wantErr(t, staged.Add(src, 0, remote(t, p, "dram"), 0, 10), ErrNoRoute, "dram does not survive")
	check(t, staged.Close())

	// what the peer has is seen when it is asked
	check(t, tr.Add(src, 0, remote(t, p, "file"), 0, 10))
	check(t, tr.Post())
	wantErr(t, tr.Wait(within(t)), ErrNoRoute, "no backend there says when")
	require.True(t, bytes.Equal(file[:10], make([]byte, 10)), "bytes have come all the same")

	self, err := b.Self()
	check(t, err)
	tr = durable(t, self)
	wantErr(t, tr.Add(own, 0, remote(t, self, "file"), 0, 10), ErrNoRoute, "disk: "+notDurable)
}
