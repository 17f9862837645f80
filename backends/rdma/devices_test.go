// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

func TestExamine(t *testing.T) {
	f, err := Examine(Config{sysfs: newFixture(t)})
	require.NoError(t, err)
	require.Len(t, f.Devices, 3)
	require.Equal(t, 2, f.Nodes)
	ib, roce, soft := f.Devices[0], f.Devices[1], f.Devices[2]
	if ib.Bus != "0000:3b:00.0" || !ib.Ports[0].Chosen || !ib.Ports[0].GIDs[0].Chosen ||
		len(ib.Ports[0].Problems) > 0 {
		t.Errorf("%+v", ib)
	}
	if down := ib.Ports[1]; down.Chosen || len(down.Problems) == 0 ||
		!strings.Contains(down.Problems[0].Fix, "subnet manager") {
		t.Errorf("a port that is down: %+v", down)
	}
	chosen := 0
	for _, g := range roce.Ports[0].GIDs {
		if g.Chosen {
			chosen = g.Index
		}
	}
	if chosen != 10 || roce.Ports[0].MTU != 4096 {
		t.Errorf("GID %d, MTU %d, want 10 and 4096", chosen, roce.Ports[0].MTU)
	}
	if soft.Ports[0].Chosen || len(soft.Ports[0].Problems) == 0 {
		t.Errorf("a port without a GID: %+v", soft.Ports[0])
	}
	f, err = Examine(Config{Devices: "mlx5_10:1#2,nowhere", sysfs: newFixture(t)})
	if err != nil || f.Devices[0].Ports[0].Chosen || !f.Devices[1].Ports[0].Chosen ||
		!f.Devices[1].Ports[0].GIDs[2].Chosen {
		t.Errorf("one of two: %+v, %v", f, err)
	}
	if _, err := Examine(Config{Devices: "a b"}); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("no list of devices: %v", err)
	}
}

// TestUnavailable is this machine as it is: either it has devices, or it says what mends that.
func TestUnavailable(t *testing.T) {
	b, err := New(Config{})
	var u *driver.UnavailableError
	switch {
	case err == nil:
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	case !errors.As(err, &u) || u.Backend != "rdma" || u.Reason == "" || u.Fix == "":
		t.Errorf("%#v", err)
	}
}

// gid makes one of RoCE; a subnet is that of its network device.
func gid(index int, address, kind string, bits int) GID {
	a := netip.MustParseAddr(address)
	g := GID{Index: index, Address: netip.AddrFrom16(a.As16()), Type: kind, NetDev: "eth0"}
	if bits > 0 {
		g.Subnet = netip.PrefixFrom(a, bits)
	}
	return g
}

func TestGIDRule(t *testing.T) {
	const v1, v2 = "IB/RoCE v1", "RoCE v2"
	for name, c := range map[string]struct {
		gids []GID
		want int // -1: none
		why  string
	}{
		"as a NIC has them": {[]GID{gid(0, "fe80::1", v1, 0), gid(1, "fe80::1", v2, 64),
			gid(2, "10.0.0.1", v1, 24), gid(3, "10.0.0.1", v2, 24)}, 3, "RoCE v2"},
		"as rxe has them": {[]GID{gid(0, "fe80::1", v2, 64), gid(1, "10.0.0.1", v2, 24)}, 1,
			"RoCE v2"},
		"IPv6 alone": {[]GID{gid(0, "fe80::1", v2, 64), gid(4, "fd00::1", v2, 64)}, 4,
			"RoCE v2"},
		"IPv4 before IPv6": {[]GID{gid(2, "fd00::1", v2, 64), gid(5, "10.0.0.1", v2, 24)}, 5,
			"RoCE v2"},
		"the lowest": {[]GID{gid(7, "10.1.0.1", v2, 24), gid(5, "10.0.0.1", v2, 24)}, 5, "RoCE v2"},
		"one that routes before one that is left over": {[]GID{gid(1, "10.9.9.9", v2, 0),
			gid(6, "10.0.0.1", v2, 24)}, 6, "on the network"},
		"one that is left over before link-local": {[]GID{gid(1, "fe80::1", v2, 64),
			gid(6, "10.0.0.1", v2, 0)}, 6, "no such address"},
		"link-local before v1": {[]GID{gid(0, "10.0.0.1", v1, 24), gid(1, "fe80::1", v2, 64)},
			1, "nothing better"},
		"v1 when it is all there is": {[]GID{gid(0, "fe80::1", v1, 64)}, 0, "nothing better"},
		"none of RoCE":               {[]GID{gid(0, "fe80::1", "something", 64)}, -1, ""},
		"none":                       {nil, -1, ""},
	} {
		p := Port{Number: 1, LinkLayer: "Ethernet", GIDs: c.gids}
		got, choices, err := chooseGID(&p, -1)
		if c.want < 0 {
			if !errors.Is(err, driver.ErrNoRoute) {
				t.Errorf("%s: %+v, %v", name, got, err)
			}
			continue
		}
		if err != nil || got.Index != c.want || len(choices) != len(c.gids) {
			t.Errorf("%s: index %d, %v, want %d", name, got.Index, err, c.want)
		}
		for _, choice := range choices {
			if choice.Why == "" || choice.Chosen != (choice.Index == c.want) || choice.Chosen &&
				!strings.Contains(choice.Why, c.why) {
				t.Errorf("%s: index %d, chosen %v: %q", name, choice.Index, choice.Chosen,
					choice.Why)
			}
		}
	}
}

func TestGIDOfInfiniBand(t *testing.T) {
	p := Port{Number: 1, LinkLayer: "InfiniBand", GIDs: []GID{gid(0, "fe80::1", "IB/RoCE v1", 0),
		gid(1, "fd00::1", "IB/RoCE v1", 0)}}
	if got, _, err := chooseGID(&p, -1); err != nil || got.Index != 0 {
		t.Errorf("index %d, %v", got.Index, err)
	}
	if got, choices, err := chooseGID(&p, 1); err != nil || got.Index != 1 || !choices[1].Chosen {
		t.Errorf("by name: index %d, %v", got.Index, err)
	}
	if _, _, err := chooseGID(&p, 9); !errors.Is(err, driver.ErrNoRoute) {
		t.Errorf("one that is not there: %v", err)
	}
	p.GIDs = p.GIDs[1:]
	if _, _, err := chooseGID(&p, -1); !errors.Is(err, driver.ErrNoRoute) {
		t.Errorf("without index 0: %v", err)
	}
}

func railIn(address string, bits uint8, ethernet bool) railAddress {
	return railAddress{gid: netip.MustParseAddr(address).As16(), bits: bits, ethernet: ethernet,
		rate: 100000}
}

func TestMatch(t *testing.T) {
	a0, a1 := railIn("10.0.0.1", 24, true), railIn("10.0.1.1", 24, true)
	b0, b1 := railIn("10.0.0.2", 24, true), railIn("10.0.1.2", 24, true)
	fast := railIn("10.0.0.3", 24, true)
	fast.rate = 400000
	fastA := a0
	fastA.rate = 400000
	ib0, ib1, other := railIn("fe80::1", 0, false), railIn("fe80::2", 0, false),
		railIn("fe80:0:0:1::1", 0, false)
	far, local6, global6 := railIn("10.9.0.1", 24, true), railIn("fe80::7", 0, true),
		railIn("fd00::7", 64, true)
	for name, c := range map[string]struct {
		ours, theirs []railAddress
		want         []pairing
	}{
		"one each": {[]railAddress{a0}, []railAddress{b0}, []pairing{{0, 0}}},
		"by subnet": {[]railAddress{a0, a1}, []railAddress{b1, b0},
			[]pairing{{0, 1}, {1, 0}}},
		"ours with itself": {[]railAddress{a0, b0}, []railAddress{a0, b0},
			[]pairing{{0, 0}, {1, 1}}},
		"the peer's rails in turn": {[]railAddress{a0, fast},
			[]railAddress{b0, railIn("10.0.0.9", 24, true)}, []pairing{{0, 0}, {1, 1}}},
		"as fast as ours": {[]railAddress{fastA}, []railAddress{b0, fast},
			[]pairing{{0, 1}}},
		"more of ours": {[]railAddress{a0, fast}, []railAddress{b0},
			[]pairing{{0, 0}, {1, 0}}},
		"no route beside a subnet": {[]railAddress{a0, far}, []railAddress{b0}, []pairing{{0, 0}}},
		"routed when it is all":    {[]railAddress{a0}, []railAddress{far}, []pairing{{0, 0}}},
		"InfiniBand": {[]railAddress{ib0}, []railAddress{other, ib1},
			[]pairing{{0, 1}}},
		"another InfiniBand subnet": {[]railAddress{ib0}, []railAddress{other}, nil},
		"another kind":              {[]railAddress{ib0}, []railAddress{local6}, nil},
		"another family":            {[]railAddress{a0}, []railAddress{global6}, nil},
		"link-local to global":      {[]railAddress{local6}, []railAddress{global6}, nil},
	} {
		got, err := match(c.ours, c.theirs)
		same := len(got) == len(c.want)
		for i := range got {
			same = same && got[i] == c.want[i]
		}
		if !same || (err == nil) != (c.want != nil) || err != nil &&
			!errors.Is(err, driver.ErrNoRoute) {
			t.Errorf("%s: %v, %v, want %v", name, got, err, c.want)
		}
	}
}

// fixture is a /sys of two NICs on two nodes, and a soft-RoCE device on a third network device.
// Lines are a file and its text; "a -> b" is a link.
const fixture = `
devices/system/node/node0/distance 10 21
devices/system/node/node1/distance 21 10
devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/numa_node 0
devices/pci0000:d7/0000:d7:00.0/0000:d8:00.0/numa_node 1
devices/pci0000:d7/0000:d7:02.0/0000:d9:00.0/numa_node 1
class/infiniband/mlx5_0/device -> devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0
class/infiniband/mlx5_0/ports/1/state 4: ACTIVE
class/infiniband/mlx5_0/ports/1/phys_state 5: LinkUp
class/infiniband/mlx5_0/ports/1/link_layer InfiniBand
class/infiniband/mlx5_0/ports/1/rate 200 Gb/sec (4X HDR)
class/infiniband/mlx5_0/ports/1/lid 0x2a
class/infiniband/mlx5_0/ports/1/gids/0 fe80:0000:0000:0001:b859:9f03:0012:3456
class/infiniband/mlx5_0/ports/1/gids/1 0000:0000:0000:0000:0000:0000:0000:0000
class/infiniband/mlx5_0/ports/2/state 1: DOWN
class/infiniband/mlx5_0/ports/2/phys_state 3: Disabled
class/infiniband/mlx5_0/ports/2/link_layer InfiniBand
class/infiniband/mlx5_0/ports/2/rate 2.5 Gb/sec (1X SDR)
class/infiniband/mlx5_10/device -> devices/pci0000:d7/0000:d7:00.0/0000:d8:00.0
class/infiniband/mlx5_10/ports/1/state 4: ACTIVE
class/infiniband/mlx5_10/ports/1/phys_state 5: LinkUp
class/infiniband/mlx5_10/ports/1/link_layer Ethernet
class/infiniband/mlx5_10/ports/1/rate 100 Gb/sec (4X EDR)
class/infiniband/mlx5_10/ports/1/lid 0x0
class/infiniband/mlx5_10/ports/1/gids/0 fe80:0000:0000:0000:ba59:9fff:fe12:3456
class/infiniband/mlx5_10/ports/1/gid_attrs/types/0 IB/RoCE v1
class/infiniband/mlx5_10/ports/1/gid_attrs/ndevs/0 eth2
class/infiniband/mlx5_10/ports/1/gids/1 fe80:0000:0000:0000:ba59:9fff:fe12:3456
class/infiniband/mlx5_10/ports/1/gid_attrs/types/1 RoCE v2
class/infiniband/mlx5_10/ports/1/gid_attrs/ndevs/1 eth2
class/infiniband/mlx5_10/ports/1/gids/2 0000:0000:0000:0000:0000:ffff:0a00:0207
class/infiniband/mlx5_10/ports/1/gid_attrs/types/2 IB/RoCE v1
class/infiniband/mlx5_10/ports/1/gid_attrs/ndevs/2 eth2
class/infiniband/mlx5_10/ports/1/gids/10 0000:0000:0000:0000:0000:ffff:0a00:0207
class/infiniband/mlx5_10/ports/1/gid_attrs/types/10 RoCE v2
class/infiniband/mlx5_10/ports/1/gid_attrs/ndevs/10 eth2
class/net/eth3/device -> devices/pci0000:d7/0000:d7:02.0/0000:d9:00.0
class/infiniband/rxe0/parent eth3
class/infiniband/rxe0/ports/1/state 4: ACTIVE
class/infiniband/rxe0/ports/1/link_layer Ethernet
`

func newFixture(t *testing.T) *sysfs {
	t.Helper()
	root := t.TempDir()
	for line := range strings.Lines(strings.TrimSpace(fixture)) {
		name, text, _ := strings.Cut(strings.TrimSpace(line), " ")
		at := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(at), 0o755))
		var err error
		if to, isLink := strings.CutPrefix(text, "-> "); isLink {
			err = os.Symlink(filepath.Join(root, to), at)
		} else {
			err = os.WriteFile(at, []byte(text+"\n"), 0o600)
		}
		require.NoError(t, err)
	}
	return &sysfs{root: root, state: func(string) (bool, int) {
		return true, 9000
	}, prefixes: func(netdev string) []netip.Prefix {
		if netdev == "eth2" {
			return []netip.Prefix{netip.MustParsePrefix("fe80::ba59:9fff:fe12:3456/64"),
				netip.MustParsePrefix("10.0.2.7/24")}
		}
		return nil
	}}
}

func TestSysfs(t *testing.T) {
	all := newFixture(t).devices()
	if len(all) != 3 || all[0].Name != "mlx5_0" || all[1].Name != "mlx5_10" ||
		all[2].Name != "rxe0" {
		t.Fatalf("devices %+v", all)
	}
	ib, roce, soft := &all[0], &all[1], &all[2]
	if ib.Node != 0 || roce.Node != 1 || soft.Node != 1 {
		t.Errorf("nodes %d, %d, %d", ib.Node, roce.Node, soft.Node)
	}
	if want := []string{"pci0000:d7", "0000:d7:02.0", "0000:d9:00.0"}; !slices.Equal(soft.Path,
		want) {
		t.Errorf("a device without a place of its own is at %v, want that of its network device %v",
			soft.Path, want)
	}
	up, down := &ib.Ports[0], &ib.Ports[1]
	if !up.Active() || up.LID != 0x2a || up.Rate != 25e9 || up.Ethernet() || len(up.GIDs) != 1 {
		t.Errorf("port 1 is %+v", up)
	}
	if down.Active() || down.State != "DOWN" || down.Physical != "Disabled" ||
		down.Rate != 2.5e9/8 || down.Number != 2 {
		t.Errorf("port 2 is %+v", down)
	}
	gids := roce.Ports[0].GIDs
	if len(gids) != 4 || gids[3].Index != 10 || gids[3].Type != "RoCE v2" ||
		gids[3].NetDev != "eth2" ||
		gids[3].Subnet != netip.MustParsePrefix("10.0.2.7/24") ||
		gids[3].Address.Unmap().String() != "10.0.2.7" {
		t.Errorf("GIDs %+v", gids)
	}
	if none := (&sysfs{root: filepath.Join(t.TempDir(), "nothing")}).devices(); len(none) != 0 {
		t.Errorf("a machine without devices has %+v", none)
	}
}

func TestDistance(t *testing.T) {
	s := newFixture(t)
	nodes := topology.Sysfs(s.root).Nodes()
	var rails []*rail
	for _, d := range s.devices() {
		rails = append(rails, &rail{index: len(rails), device: d})
	}
	for node, want := range map[int]uint32{0: 0b001, 1: 0b110, -1: 0b111, 7: 0b111} {
		if got := nearest(nodes, rails, node); got != want {
			t.Errorf("memory of node %d prefers rails %b, want %b", node, got, want)
		}
	}
	rails[0].device.Node = -1
	if got := nearest(nodes, rails, 1); got != 0b111 {
		t.Errorf("a rail whose place is not known is left out: %b", got)
	}
	if got := nearest(nil, rails, 0); got != 0b111 {
		t.Errorf("with one node: %b", got)
	}
}
