// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// named is a backend under another name and cost.
type named struct {
	*mem.Backend
	name string
	rate float64
}

func (n named) Caps() driver.Caps {
	c := n.Backend.Caps()
	c.Name, c.Cost.Rate = n.name, n.rate
	return c
}

func twoLanes(c *Config) {
	for _, n := range []named{{name: "slow", rate: 1e9}, {name: "fast", rate: 50e9}} {
		n.Backend, _ = mem.New(mem.Config{})
		c.Backends = append(c.Backends, n)
	}
}

func TestRoutes(t *testing.T) {
	a, b := open(t, "a", twoLanes), open(t, "b", twoLanes)
	src := register(t, a, "src", 4096)
	register(t, b, "dst", 4096)
	p := connect(t, a, b)
	m := remote(t, p, "dst")
	x, err := a.Explain(p, src, m)
	check(t, err)
	if x.Chosen != "fast" || len(x.Candidates) != 2 || !x.Candidates[0].Usable || !x.SameHost {
		t.Errorf("explained %+v", x)
	}
	for _, want := range []string{"* fast", "declared", "one copy within the process",
		"dram -> dram"} {
		if !strings.Contains(x.String(), want) {
			t.Errorf("%q does not say %q", x.String(), want)
		}
	}
	for only, want := range map[string]string{"": "fast", "slow": "slow", "fast": "fast"} {
		tr, err := a.NewTransfer(p, Write, Route{Only: only})
		check(t, err)
		check(t, tr.Add(src, 0, m, 0, 4096))
		check(t, tr.Post())
		check(t, tr.Wait(within(t)))
		if got := tr.groups[0].conn.lane.caps.Name; got != want {
			t.Errorf("only %q went by %s", only, got)
		}
		check(t, tr.Close())
	}
	if _, err := a.NewTransfer(p, Write, Route{Only: "rdma"}); !errors.Is(err, ErrNoRoute) ||
		!strings.Contains(err.Error(), "slow, fast") {
		t.Errorf("a backend that is not there: %v", err)
	}
}

// TestOnlyIsNeverBypassed has a peer that lacks the one backend that may serve.
func TestOnlyIsNeverBypassed(t *testing.T) {
	a, b := open(t, "a", twoLanes), open(t, "b", func(c *Config) {
		twoLanes(c)
		c.Backends = c.Backends[:1]
	})
	src := register(t, a, "src", 4096)
	register(t, b, "dst", 4096)
	p := connect(t, a, b)
	tr, err := a.NewTransfer(p, Write, Route{Only: "fast"})
	check(t, err)
	if err := tr.Add(src, 0, remote(t, p, "dst"), 0, 1); !errors.Is(err, ErrNoRoute) ||
		!strings.Contains(err.Error(), "no backend of this name") {
		t.Errorf("got %v", err)
	}
	require.NoError(t, tr.Notify([]byte("x")))
	if err := tr.Post(); !errors.Is(err, ErrNoRoute) {
		t.Errorf("a message by a backend that is not there: %v", err)
	}
	check(t, tr.Close())
}

func TestMeasuredRateReplacesTheDeclared(t *testing.T) {
	p, src, m, _ := pair(t, 4<<20)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 4<<20))
	for range rateSamplesMin {
		check(t, tr.Post())
		check(t, tr.Wait(within(t)))
	}
	x, err := p.e.Explain(p, src, m)
	check(t, err)
	if c := x.Candidates[0]; !c.Measured || c.Rate <= 0 {
		t.Errorf("after %d large transfers: %+v", rateSamplesMin, c)
	}
	s := p.e.Stats().Routes[0]
	if s.Transfers != rateSamplesMin || s.Bytes != rateSamplesMin*4<<20 ||
		s.Latency.Quantile(0.5) <= 0 {
		t.Errorf("counted %+v", s)
	}
}

// TestRouteIsChosenAnew measures a backend as slow: new lists of a pair of memories go by another
// one soon, and by the first again once what was measured has lost its weight.
func TestRouteIsChosenAnew(t *testing.T) {
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{&fake{name: "one"}, &fake{name: "two"}}
	})
	src := register(t, e, "src", 64<<10)
	register(t, e, "dst", 64<<10)
	p, err := e.Self()
	require.NoError(t, err)
	m := remote(t, p, "dst")
	by := func() string {
		tr := transfer(t, p, Write)
		check(t, tr.Add(src, 0, m, 0, 8))
		return tr.groups[0].conn.lane.caps.Name
	}
	before := e.now()
	require.Equal(t, "one", by())
	require.GreaterOrEqual(t, m.until, before+time.Second, "for how long the choice stands")
	m.until = math.MaxInt64
	meter := &p.conns[0].counters.meter
	at := e.now() - rateSamplesMin*time.Second
	for range rateSamplesMin {
		meter.enter(at)
		at += time.Second
		meter.leave(at, 1<<20, true)
	}
	require.Equal(t, "one", by(), "chosen just now")
	m.until = 0
	require.Equal(t, "two", by())
	meter.last -= 2 * rateLives * rateHalfLife
	m.until = 0
	require.Equal(t, "one", by())
}

func TestPages(t *testing.T) {
	p, src, m, dst := pair(t, 1<<20)
	fill(src.Bytes(), 2)
	pages := Pages{Count: 300, EntryLen: 656, LocalStride: 656, RemoteStride: 700, RemoteBase: 10}
	for i := range uint32(300) {
		pages.Local = append(pages.Local, (i*37)%1000)
		pages.Remote = append(pages.Remote, 299-i)
	}
	at := pages.Pattern()
	tr := transfer(t, p, Write)
	check(t, tr.AddPages(src, m, pages))
	check(t, tr.Post())
	check(t, tr.Wait(within(t)))
	for i := range 300 {
		want, got := src.Bytes()[at.Local.At(i):][:656], dst.Bytes()[at.Remote.At(i):][:656]
		if !bytes.Equal(got, want) {
			t.Fatalf("entry %d holds other bytes", i)
		}
	}
	pages.Remote[7] = 1 << 30
	if err := tr.AddPages(src, m, pages); !errors.Is(err, ErrBusy) && !errors.Is(err, ErrBounds) {
		t.Errorf("an index past the region: %v", err)
	}
}

func TestReadersAndWriters(t *testing.T) {
	_, src, m, dst := pair(t, 3<<20)
	fill(dst.Bytes(), 4)
	got, err := io.ReadAll(io.NewSectionReader(m, 5, 2<<20))
	check(t, err)
	if !bytes.Equal(got, dst.Bytes()[5:5+2<<20]) {
		t.Error("ReadAt brought other bytes")
	}
	fill(src.Bytes(), 8)
	n, err := io.Copy(io.NewOffsetWriter(m, 3), io.NewSectionReader(src, 0, 2<<20))
	check(t, err)
	if n != 2<<20 || !bytes.Equal(dst.Bytes()[3:3+2<<20], src.Bytes()[:2<<20]) {
		t.Error("WriteAt placed other bytes")
	}
	buf := make([]byte, 10)
	if n, err := m.ReadAt(buf, 3<<20-4); n != 4 || err != io.EOF {
		t.Errorf("read across the end: %d, %v", n, err)
	}
	for _, f := range []func([]byte, int64) (int, error){m.WriteAt, src.WriteAt} {
		if _, err := f(buf, 3<<20-4); !errors.Is(err, ErrBounds) {
			t.Errorf("write across the end: %v", err)
		}
		if _, err := f(buf, -1); !errors.Is(err, ErrBounds) {
			t.Errorf("write before the start: %v", err)
		}
	}
	if n, err := src.ReadAt(buf, 3<<20); n != 0 || err != io.EOF {
		t.Errorf("read past the end: %d, %v", n, err)
	}
}

func TestManyRegions(t *testing.T) {
	const count = 2048
	a, b := open(t, "a"), open(t, "b")
	whole := register(t, b, "whole", count*64)
	src := register(t, a, "src", 64)
	fill(src.Bytes(), 1)
	for i := range uint64(count) {
		seg, err := whole.seg.Slice(i*64, 64, [16]byte{})
		check(t, err)
		_, err = b.Register(fmt.Sprintf("kv.%04d", i), seg)
		check(t, err)
	}
	d, err := b.Describe()
	check(t, err)
	if len(d) > 64<<10 {
		t.Errorf("a description of %d regions takes %d bytes, want at most 64 KiB", count, len(d))
	}
	p, err := a.Connect(within(t), d)
	check(t, err)
	if n := len(p.Remotes()); n != count+1 {
		t.Errorf("%d regions are known", n)
	}
	if _, err := remote(t, p, "kv.2047").WriteAt(src.Bytes(), 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(whole.Bytes()[2047*64:], src.Bytes()) {
		t.Error("the last region did not receive the bytes")
	}
	if _, err := p.Remote("kv.9999"); !errors.Is(err, ErrNoRoute) {
		t.Errorf("a name nobody has: %v", err)
	}
}

func TestRefresh(t *testing.T) {
	a, b := open(t, "a"), open(t, "b")
	first := register(t, b, "first", 64)
	p := connect(t, a, b)
	m := remote(t, p, "first")
	register(t, b, "second", 64)
	check(t, first.Close())
	d, err := b.Describe()
	check(t, err)
	check(t, p.Refresh(d))
	remote(t, p, "second")
	if _, err := p.Remote("first"); !errors.Is(err, ErrNoRoute) {
		t.Errorf("a region that is gone is still known: %v", err)
	}
	if _, err := m.WriteAt(make([]byte, 8), 0); err == nil {
		t.Error("wrote to a region that is closed")
	}
	other, err := a.Describe()
	check(t, err)
	if err := p.Refresh(other); !errors.Is(err, driver.ErrBadToken) {
		t.Errorf("the description of another engine: %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	one, _ := mem.New(mem.Config{})
	two, _ := mem.New(mem.Config{})
	for name, cfg := range map[string]Config{
		"no backend":  {},
		"name twice":  {Backends: []driver.Backend{one, two}},
		"negative":    {Backends: []driver.Backend{one}, TransferTimeout: -time.Second},
		"too many":    {Backends: []driver.Backend{one}, TransfersMax: 1<<20 + 1},
		"name length": {Backends: []driver.Backend{one}, Name: strings.Repeat("n", 300)},
	} {
		if e, err := Open(cfg); err == nil {
			t.Errorf("%s was accepted", name)
			_ = e.Close()
		}
	}
}

func TestLimits(t *testing.T) {
	e := open(t, "small", func(c *Config) {
		c.TransfersMax, c.RegionsMax, c.PeersMax, c.LeasesMax = 1, 1, 1, 1
	})
	r := register(t, e, "r", 64)
	l, err := r.Lease(0, 8, LeaseOptions{})
	check(t, err)
	if _, err := r.Lease(8, 8, LeaseOptions{}); !errors.Is(err, ErrFull) ||
		!strings.Contains(err.Error(), "LeasesMax") {
		t.Errorf("one lease too many: %v", err)
	}
	check(t, l.Revoke(within(t)))
	if _, err := e.Register("s", r.seg); !errors.Is(err, ErrFull) {
		t.Errorf("one region too many: %v", err)
	}
	p, err := e.Self()
	check(t, err)
	transfer(t, p, Write)
	if _, err := e.NewTransfer(p, Write, Route{}); !errors.Is(err, ErrFull) ||
		!strings.Contains(err.Error(), "TransfersMax") {
		t.Errorf("one transfer too many: %v", err)
	}
	d, err := open(t, "other").Describe()
	check(t, err)
	if _, err := e.Connect(within(t), d); !errors.Is(err, ErrFull) {
		t.Errorf("one peer too many: %v", err)
	}
}

// TestDurationsAreBounded has times so long that they would wrap round.
func TestDurationsAreBounded(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"transfer": func(c *Config) { c.TransferTimeout = math.MaxInt64 },
		"grace":    func(c *Config) { c.AbortGrace = math.MaxInt64 },
		"spin":     func(c *Config) { c.Spin = math.MaxInt64 },
	} {
		cfg := Config{Backends: []driver.Backend{&fake{}}}
		change(&cfg)
		if e, err := Open(cfg); !errors.Is(err, ErrBounds) {
			t.Errorf("%s: %v", name, err)
			_ = e.Close()
		}
	}
}

// resort is a backend whose Peers are the last resort.
type resort struct{ driver.Backend }

func (r resort) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := r.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return limitedPeer{p, p.Can() | driver.LastResort}, nil
}

// TestLastResort: neither a better rate nor a nearer message makes up for it, but it is there where
// nothing else is, and by name.
func TestLastResort(t *testing.T) {
	lanes := func(c *Config) {
		twoLanes(c)
		c.Backends[1] = resort{c.Backends[1]} // the fast one
	}
	a, b := open(t, "a", lanes), open(t, "b", lanes)
	src := register(t, a, "src", 4096)
	register(t, b, "dst", 4096)
	p := connect(t, a, b)
	m := remote(t, p, "dst")
	x, err := a.Explain(p, src, m)
	check(t, err)
	require.Equal(t, "slow", x.Chosen, x.String())
	require.Equal(t, "slow is the cheapest of 2 that can; fast only where no other can", x.Why)
	require.Equal(t, "slow", p.messenger(Route{}).lane.caps.Name)
	require.Equal(t, "fast", p.messenger(Route{Only: "fast"}).lane.caps.Name)

	c := cheapest([]Candidate{{Backend: "last", Usable: true, LastResort: true, Estimate: 1},
		{Backend: "unusable"}})
	require.Equal(t, "last", c.Backend)
}
