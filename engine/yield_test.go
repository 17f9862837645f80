// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// yielder is a way from a device's memory to files that yields, if it has a reason. It moves
// nothing.
type yielder struct {
	fake
	why string
}

func (y *yielder) Caps() driver.Caps {
	c := y.fake.Caps()
	c.Name, c.Pairs = "straight", driver.Pairs{driver.HBM: driver.KindsOf(driver.File)}
	return c
}

func (y *yielder) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := y.fake.Connect(ctx, addr)
	return &yieldingPeer{p.(*fakePeer), y.why}, err
}

type yieldingPeer struct {
	*fakePeer
	why string
}

func (p *yieldingPeer) Yields(uint32, uint32) string { return p.why }

// TestYields has a backend leave a pair to the chain, where there is one and nobody asks for the
// backend by name.
func TestYields(t *testing.T) {
	leak.Check(t, hostmem.InUse)
	for _, c := range []struct {
		why    string
		disk   bool
		chosen string
		says   string
	}{
		{"", true, "straight", "straight is the cheapest of 1"},
		{"0.7 of the chain, measured", true, Staged, "staged, since straight yields to it: 0.7 " +
			"of the chain, measured"},
		{"0.7 of the chain, measured", false, "straight", "straight is the cheapest of 1"},
	} {
		straight, hbm := &yielder{fake{name: "straight"}, c.why}, newDevice(t, "device", driver.HBM)
		list := []driver.Backend{straight, hbm}
		seg := driver.Segment{Kind: driver.File, Len: 1 << 16}
		if c.disk {
			disk := newDevice(t, "disk", driver.File)
			list = append(list, disk)
			seg, _ = disk.alloc(t, 1<<16)
		}
		e := open(t, "e", func(cfg *Config) { cfg.Backends = list })
		device, _ := hbm.alloc(t, 1<<16)
		from, err := e.Register("hbm", device)
		check(t, err)
		_, err = e.Register("file", seg)
		check(t, err)
		p, err := e.Self()
		check(t, err)
		file := remote(t, p, "file")
		x, err := e.Explain(p, from, file)
		check(t, err)
		if x.Chosen != c.chosen || !strings.Contains(x.Why, c.says) {
			t.Errorf("%q yields, with a chain: %v: chosen is\n%v", c.why, c.disk, &x)
		}
		before := len(straight.seen())
		tr := transfer(t, p, Write)
		check(t, tr.Add(from, 0, file, 0, 100))
		run(t, tr)
		if used := len(straight.seen()) > before; used != (c.chosen == "straight") {
			t.Errorf("%q yields, with a chain: %v: it moved bytes: %v", c.why, c.disk, used)
		}
		before = len(straight.seen())
		tr, err = e.NewTransfer(p, Write, Route{Only: "straight"})
		check(t, err)
		check(t, tr.Add(from, 0, file, 0, 100))
		run(t, tr)
		if len(straight.seen()) == before {
			t.Errorf("%q: named by the route, it moved nothing", c.why)
		}
		check(t, tr.Close())
	}
}
