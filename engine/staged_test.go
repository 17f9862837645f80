// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// host is an engine with DRAM, memory of a device, and a way between hosts that moves DRAM
// alone.
type host struct {
	e    *Engine
	dev  *device
	hbm  *Region
	mem  []byte // of hbm
	dram *Region
}

const hostBytes = 6 << 20

func newHost(t testing.TB, name string, change ...func(*Config)) *host {
	t.Helper()
	return newHostOver(t, newMem(t), name, change...)
}

func newHostOver(t testing.TB, wire driver.Backend, name string, change ...func(*Config)) *host {
	t.Helper()
	h := &host{dev: newDevice(t, "device", driver.HBM)}
	var err error
	h.e = open(t, name, append(change, func(c *Config) {
		c.Backends = []driver.Backend{wire, h.dev}
	})...)
	seg, b := h.dev.alloc(t, hostBytes)
	h.mem = b
	h.hbm, err = h.e.Register("hbm", seg)
	check(t, err)
	h.dram = register(t, h.e, "dram", hostBytes)
	return h
}

func (h *host) region(kind driver.Kind) (*Region, []byte) {
	if kind == driver.HBM {
		return h.hbm, h.mem
	}
	return h.dram, h.dram.Bytes()
}

// run posts and waits.
func run(t testing.TB, tr *Transfer) {
	t.Helper()
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
}

// TestStaged moves every pair of kinds for which no single backend serves, both ways, as
// large pieces, small ones and patterns, and looks at every byte of the far memory.
func TestStaged(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	for _, kinds := range [][2]driver.Kind{{driver.HBM, driver.HBM}, {driver.DRAM, driver.HBM},
		{driver.HBM, driver.DRAM}} {
		for _, op := range []Op{Write, Read} {
			t.Run(fmt.Sprintf("%v/%v-%v", op, kinds[0], kinds[1]), func(t *testing.T) {
				local, near := a.region(kinds[0])
				there, far := b.region(kinds[1])
				m := remote(t, p, there.Name())
				from, to := near, far
				if op == Read {
					from, to = far, near
				}
				for name, list := range lists() {
					fill(from, byte(len(name)))
					fill(to, 99)
					want := bytes.Clone(to)
					list.apply(op, want, from)
					tr := transfer(t, p, op)
					list.add(t, tr, local, m)
					run(t, tr)
					require.True(t, bytes.Equal(to, want),
						"%s: other bytes than those listed have come, or others have changed", name)
					require.EqualValues(t, Staged, tr.groups[0].conn.lane.caps.Name, name)
				}
			})
		}
	}
}

// list is a transfer's, as Descs or as Pages.
type list struct {
	descs []driver.Desc
	pages *Pages
}

func lists() map[string]list {
	r := rand.New(rand.NewPCG(7, 7))
	scattered := list{}
	for i := range uint64(3000) {
		scattered.descs = append(scattered.descs, driver.Desc{Local: 1000 * i,
			Remote: 1000 * (2999 - i), Len: 1 + r.Uint64N(990)})
	}
	pages := &Pages{Count: 4000, EntryLen: 656, LocalBase: 16, LocalStride: 656, RemoteBase: 32,
		RemoteStride: 704}
	for i := range uint32(4000) {
		pages.Local, pages.Remote = append(pages.Local, (i*7)%4001),
			append(pages.Remote, (i*11+3)%4001)
	}
	return map[string]list{
		"a byte":    {descs: []driver.Desc{{Local: 5, Remote: 77, Len: 1}}},
		"large":     {descs: []driver.Desc{{Local: 3, Remote: 1 << 10, Len: 5<<20 + 13}}},
		"scattered": scattered,
		"pages":     {pages: pages},
		"pages in a row": {pages: &Pages{Count: 300, EntryLen: 8192, LocalStride: 8192,
			RemoteStride: 16384}},
		"pages over slots": {pages: &Pages{Count: 2, EntryLen: 2<<20 + 1, LocalStride: 2<<20 + 1,
			RemoteStride: 3 << 20}},
	}
}

func (l *list) add(t *testing.T, tr *Transfer, local *Region, m *Remote) {
	t.Helper()
	for _, d := range l.descs {
		check(t, tr.Add(local, d.Local, m, d.Remote, d.Len))
	}
	if l.pages != nil {
		check(t, tr.AddPages(local, m, *l.pages))
	}
}

// apply does what the transfer is to do.
func (l *list) apply(op Op, to, from []byte) {
	one := func(local, remote, n uint64) {
		if op == Write {
			copy(to[remote:][:n], from[local:])
		} else {
			copy(to[local:][:n], from[remote:])
		}
	}
	for _, d := range l.descs {
		one(d.Local, d.Remote, d.Len)
	}
	for i := 0; l.pages != nil && i < l.pages.Count; i++ {
		d := l.pages.Pattern()
		one(d.Local.At(i), d.Remote.At(i), d.Run)
	}
}

// TestStagedWithinAnEngine goes from one device to another of the same process.
func TestStagedWithinAnEngine(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	hbm, disk := newDevice(t, "device", driver.HBM), newDevice(t, "disk", driver.File)
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{hbm, disk} })
	seg, src := hbm.alloc(t, 3<<20)
	from, err := e.Register("hbm", seg)
	check(t, err)
	seg, dst := disk.alloc(t, 3<<20)
	_, err = e.Register("file", seg)
	check(t, err)
	p, err := e.Self()
	check(t, err)
	fill(src, 3)
	tr := transfer(t, p, Write)
	check(t, tr.Add(from, 0, remote(t, p, "file"), 0, 3<<20))
	run(t, tr)
	require.True(t, bytes.Equal(src, dst), "the file holds other bytes")
	x, err := e.Explain(p, from, remote(t, p, "file"))
	check(t, err)
	if !strings.Contains(x.String(), "* staged") ||
		!strings.Contains(x.String(), "hbm -device- dram -disk- file") {
		t.Errorf("explained\n%v", &x)
	}
}

// straight is a way from a device's memory to files. It moves nothing.
type straight struct{ fake }

func (s *straight) Caps() driver.Caps {
	c := s.fake.Caps()
	c.Pairs = driver.Pairs{driver.HBM: driver.KindsOf(driver.File)}
	return c
}

// TestStagedByName: a backend that serves the pair goes before the chain, unless the route names
// that.
func TestStagedByName(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	direct, hbm, disk := &straight{fake{name: "straight"}}, newDevice(t, "device", driver.HBM),
		newDevice(t, "disk", driver.File)
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{direct, hbm, disk} })
	seg, src := hbm.alloc(t, 1<<16)
	from, err := e.Register("hbm", seg)
	check(t, err)
	seg, dst := disk.alloc(t, 1<<16)
	_, err = e.Register("file", seg)
	check(t, err)
	p, err := e.Self()
	check(t, err)
	x, err := e.Explain(p, from, remote(t, p, "file"))
	check(t, err)
	require.Equal(t, "straight", x.Chosen, x.String())
	fill(src, 5)
	for only, moves := range map[string]bool{"": true, "straight": true, Staged: false} {
		before := len(direct.seen())
		tr, err := e.NewTransfer(p, Write, Route{Only: only})
		check(t, err)
		check(t, tr.Add(from, 0, remote(t, p, "file"), 0, 1<<16))
		run(t, tr)
		require.Equal(t, moves, len(direct.seen()) > before, only)
		check(t, tr.Close())
	}
	require.Equal(t, src, dst)
}

// TestStagedIsExplained has the chain shown, asked for, and forbidden.
func TestStagedIsExplained(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	hbm, dram := remote(t, p, "hbm"), remote(t, p, "dram")
	x, err := a.e.Explain(p, a.hbm, hbm)
	check(t, err)
	require.Equal(t, Staged, x.Chosen)
	require.Contains(t, x.String(),
		"hbm -device- dram -mem- dram of the peer -its engine- hbm, 8 pieces of 1024 KiB")
	if x, err = a.e.Explain(p, a.dram, dram); err != nil || strings.Contains(x.String(), Staged) {
		t.Errorf("a chain where one backend serves, %v:\n%v", err, &x)
	}
	tr, err := a.e.NewTransfer(p, Write, Route{Only: "mem"})
	check(t, err)
	wantErr(t, tr.Add(a.hbm, 0, hbm, 0, 1), ErrNoRoute, "staged: the route names only mem")
	check(t, tr.Close())
	tr, err = a.e.NewTransfer(p, Write, Route{Only: Staged})
	check(t, err)
	check(t, tr.Add(a.hbm, 0, hbm, 0, 100))
	wantErr(t, tr.Add(a.dram, 0, dram, 0, 1), ErrNoRoute, "mem moves dram to and from dram alone")
	run(t, tr)
	check(t, tr.Close())
}

// TestStagedNotification has the message come behind the bytes.
func TestStagedNotification(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	m := remote(t, p, "hbm")
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, m, 0, hostBytes))
	for round := range byte(20) {
		fill(a.mem, round)
		check(t, tr.Notify([]byte{round}))
		check(t, tr.Post())
		select {
		case n := <-b.e.Notifications():
			if len(n.Data) != 1 || n.Data[0] != round || !bytes.Equal(a.mem, b.mem) {
				t.Fatalf("round %d: message %v, bytes there: %v", round, n.Data,
					bytes.Equal(a.mem, b.mem))
			}
		case <-time.After(limit):
			t.Fatal("no message")
		}
		check(t, tr.Wait(within(t)))
	}
	require.Zero(t, len(a.e.Notifications())+len(b.e.Notifications()),
		"the programs have received messages that are not theirs")
}

// TestStagedAbort ends a write whose last hop the peer holds up: nothing lands afterwards.
func TestStagedAbort(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	for _, at := range []string{"the peer's hop", "the own hop"} {
		testkit.RunInVirtualTime(t, at, func(t *testing.T) {
			a, b := newHost(t, "a"), newHost(t, "b")
			p := connect(t, a.e, b.e)
			m := remote(t, p, "hbm")
			warm := transfer(t, p, Write)
			check(t, warm.Add(a.hbm, 0, m, 0, 1))
			run(t, warm)
			fill(a.mem, 1)
			before := bytes.Clone(b.mem)
			held := b.dev
			if at == "the own hop" {
				held = a.dev
			}
			held.keep()
			tr := transfer(t, p, Write)
			check(t, tr.Add(a.hbm, 0, m, 0, hostBytes))
			check(t, tr.Post())
			until(t, "a hop is held", func() bool { return held.kept() > 0 })
			check(t, tr.Abort(within(t)))
			require.ErrorIs(t, tr.Err(), ErrAborted, "outcome")
			held.release()
			time.Sleep(20 * time.Millisecond)
			if !bytes.Equal(b.mem, before) {
				testkit.ErrorBroken(t, "bytes have landed after the abort")
			}
			run(t, warm) // the way is as good as before
			run(t, tr)
			require.True(t, bytes.Equal(b.mem, a.mem), "posted again, other bytes have come")
		})
	}
}

// TestStagedRevoke ends a lease on memory of the device while hops for its holder are held
// up.
func TestStagedRevoke(t *testing.T) { testkit.InVirtualTime(t, stagedRevoke) }

func stagedRevoke(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	l, err := b.hbm.Lease(1<<20, 1<<20, LeaseOptions{})
	check(t, err)
	m, err := p.Import(l.Token())
	check(t, err)
	fill(a.mem, 5)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, m, 0, 1<<20))
	run(t, tr)
	if !bytes.Equal(b.mem[1<<20:2<<20], a.mem[:1<<20]) || b.mem[1<<20-1] != 0 || b.mem[2<<20] != 0 {
		t.Error("the lease's range holds other bytes, or its neighbours do")
	}
	fill(a.mem, 6)
	before := bytes.Clone(b.mem)
	b.dev.keep()
	check(t, tr.Post())
	until(t, "a hop is held", func() bool { return b.dev.kept() > 0 })
	check(t, l.Revoke(within(t)))
	b.dev.release()
	if err := tr.Wait(within(t)); !errors.Is(err, ErrRevoked) && !errors.Is(err, ErrAborted) {
		t.Errorf("outcome %v", err)
	}
	check(t, tr.Post())
	wantErr(t, tr.Wait(within(t)), ErrRevoked, "the peer's hop, dram to hbm")
	if !bytes.Equal(b.mem, before) {
		testkit.ErrorBroken(t, "bytes have landed after the lease ended")
	}
}
