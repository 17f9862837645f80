// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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
	all := newFixture(t).devices(nil)
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
	if some := newFixture(t).devices(func(name string) bool {
		return name == "rxe0"
	}); len(some) != 1 || some[0].Name != "rxe0" {
		t.Errorf("only rxe0 is wanted: %+v", some)
	}
	if none := (&sysfs{root: filepath.Join(t.TempDir(), "nothing")}).devices(nil); len(none) != 0 {
		t.Errorf("a machine without devices has %+v", none)
	}
}

func TestRate(t *testing.T) {
	for text, want := range map[string]float64{
		"100 Gb/sec (4X EDR)": 12.5e9, "2.5 Gb/sec (1X SDR)": 2.5e9 / 8, "": 0, "fast": 0,
		"-1 Gb/sec": 0, "10 Mb/sec": 0,
	} {
		if got := rateOf(text); got != want {
			t.Errorf("%q is %g, want %g", text, got, want)
		}
	}
}

func TestDistance(t *testing.T) {
	s := newFixture(t)
	nodes := s.nodes()
	if nodes.between(0, 1) != 21 || nodes.between(1, 1) != 10 || nodes.between(0, 7) != 0 ||
		nodes.between(-1, 0) != 0 {
		t.Errorf("distances %v", nodes)
	}
	var rails []*rail
	for _, d := range s.devices(nil) {
		rails = append(rails, &rail{index: len(rails), device: d})
	}
	for node, want := range map[int]uint32{0: 0b001, 1: 0b110, -1: 0b111, 7: 0b111} {
		if got := nodes.nearest(rails, node); got != want {
			t.Errorf("memory of node %d prefers rails %b, want %b", node, got, want)
		}
	}
	rails[0].device.Node = -1
	if got := nodes.nearest(rails, 1); got != 0b111 {
		t.Errorf("a rail whose place is not known is left out: %b", got)
	}
	if got := numa(nil).nearest(rails, 0); got != 0b111 {
		t.Errorf("with one node: %b", got)
	}
}
