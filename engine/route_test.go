// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

func twoLanes(c *Config) {
	for i, name := range []string{"slow", "fast"} {
		b, _ := mem.New(mem.Config{})
		c.Backends = append(c.Backends, &rig{Backend: b, caps: func(c *driver.Caps) {
			c.Name, c.Cost.Rate = name, []float64{1e9, 50e9}[i]
		}})
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
		require.Contains(t, x.String(), want)
	}
	for only, want := range map[string]string{"": "fast", "slow": "slow", "fast": "fast"} {
		tr, err := a.NewTransfer(p, Write, Route{Only: only})
		check(t, err)
		check(t, tr.Add(src, 0, m, 0, 4096))
		check(t, tr.Post())
		check(t, tr.Wait(within(t)))
		require.EqualValues(t, want, tr.groups[0].conn.lane.caps.Name, "only %q", only)
		check(t, tr.Close())
	}
	wantErr(t, second(a.NewTransfer(p, Write, Route{Only: "rdma"})), ErrNoRoute, "slow, fast")
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
	wantErr(t, tr.Add(src, 0, remote(t, p, "dst"), 0, 1), ErrNoRoute, "no backend of this name")
	require.NoError(t, tr.Notify([]byte("x")))
	require.ErrorIs(t, tr.Post(), ErrNoRoute, "a message by a backend that is not there")
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

// Transfers of small pieces say nothing of the rate: their backend would look slower than another
// that takes as long for them.
func TestSmallPiecesMeasureNoRate(t *testing.T) {
	p, src, m, _ := pair(t, 8<<20)
	tr := transfer(t, p, Write)
	for i := range uint64(rateBytesMin / (32 << 10)) {
		check(t, tr.Add(src, i*(64<<10), m, i*(64<<10), 32<<10))
	}
	pages := transfer(t, p, Write)
	check(t, pages.AddPages(src, m, Pages{Count: 2048, EntryLen: 656, LocalStride: 1024,
		RemoteStride: 1024}))
	for range 2 * rateSamplesMin {
		for _, x := range []*Transfer{tr, pages} {
			check(t, x.Post())
			check(t, x.Wait(within(t)))
		}
	}
	require.Zero(t, p.e.Stats().Routes[0].Rate)
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
	require.ErrorIs(t, second(p.Remote("first")), ErrNoRoute,
		"a region that is gone is still known")
	require.Error(t, put(p, register(t, a, "src", 64), m, 8), "wrote to a region that is closed")
	other, err := a.Describe()
	check(t, err)
	require.ErrorIs(t, p.Refresh(other), driver.ErrBadToken, "the description of another engine")
}

func TestConfigIsChecked(t *testing.T) {
	one, _ := mem.New(mem.Config{})
	two, _ := mem.New(mem.Config{})
	for name, change := range map[string]func(*Config){
		"no backend":  func(c *Config) { c.Backends = nil },
		"name twice":  func(c *Config) { c.Backends = append(c.Backends, two) },
		"negative":    func(c *Config) { c.TransferTimeout = -time.Second },
		"too many":    func(c *Config) { c.TransfersMax = 1<<20 + 1 },
		"name length": func(c *Config) { c.Name = strings.Repeat("n", 300) },
		// so long that they would wrap round
		"timeout": func(c *Config) { c.TransferTimeout = math.MaxInt64 },
		"grace":   func(c *Config) { c.AbortGrace = math.MaxInt64 },
		"spin":    func(c *Config) { c.Spin = math.MaxInt64 },
	} {
		cfg := Config{Backends: []driver.Backend{one}}
		change(&cfg)
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
	wantErr(t, second(r.Lease(8, 8, LeaseOptions{})), ErrFull, "LeasesMax")
	check(t, l.Revoke(within(t)))
	require.ErrorIs(t, second(e.Register("s", r.seg)), ErrFull, "one region too many")
	p, err := e.Self()
	check(t, err)
	transfer(t, p, Write)
	wantErr(t, second(e.NewTransfer(p, Write, Route{})), ErrFull, "TransfersMax")
	require.ErrorIs(t, p.Notify(within(t), nil), ErrFull, "a notification beside it")
	d, err := open(t, "other").Describe()
	check(t, err)
	wantErr(t, second(e.Connect(within(t), d)), ErrFull, "PeersMax")
}

// TestLastResort: neither a better rate nor a nearer message makes up for it, but it is there where
// nothing else is, and by name.
func TestLastResort(t *testing.T) {
	lanes := func() func(*Config) {
		slow := rigged(t, mem.Config{}, rig{caps: func(c *driver.Caps) {
			c.Name, c.Cost.Rate = "slow", 1e9
		}})
		fast := rigged(t, mem.Config{}, rig{caps: func(c *driver.Caps) {
			c.Name, c.Cost.Rate = "fast", 50e9
		}, can: func(can driver.Can) driver.Can { return can | driver.LastResort }})
		return over(slow, fast)
	}
	a, b := open(t, "a", lanes()), open(t, "b", lanes())
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
