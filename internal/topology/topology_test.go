// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"math"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/standin"
)

func server(t *testing.T) (Sysfs, map[string]*Device) {
	t.Helper()
	s := Sysfs(standin.ServerSysfs(t).Root)
	return s, byAddress(s.Devices())
}

func byAddress(list []Device) map[string]*Device {
	all := map[string]*Device{}
	for i := range list {
		all[list[i].Address] = &list[i]
	}
	return all
}

func TestDevices(t *testing.T) {
	s, all := server(t)
	var order []string
	for _, d := range s.Devices() {
		order = append(order, d.Address)
	}
	if want := []string{"0000:19:00.0", "0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0",
		"0000:9b:00.0", "0000:ac:00.0"}; !slices.Equal(order, want) {
		t.Fatalf("devices %v, want %v", order, want)
	}
	gpu, nic, drive := all["0000:19:00.0"], all["0000:1a:00.0"], all["0000:1b:00.0"]
	if gpu.Kind != GPU || gpu.Node != 0 || gpu.Link != (Link{5, 16}) || gpu.Most != (Link{5, 16}) ||
		gpu.Slot != (Link{5, 16}) {
		t.Errorf("GPU %+v", gpu)
	}
	if want := (Path{"pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0",
		"0000:19:00.0"}); !slices.Equal(gpu.Path, want) {
		t.Errorf("the GPU is at %v, want %v", gpu.Path, want)
	}
	if nic.Kind != NIC || !slices.Equal(nic.RDMA, []string{"mlx5_0"}) ||
		!slices.Equal(nic.NetDevs, []string{"eth2"}) {
		t.Errorf("NIC %+v", nic)
	}
	if drive.Kind != Drive || !slices.Equal(drive.Names, []string{"nvme0", "nvme0n1"}) ||
		drive.Model != "Made Drive 0" ||
		drive.Link != (Link{4, 4}) || drive.Slot != (Link{5, 16}) {
		t.Errorf("drive %+v", drive)
	}
	slow := all["0000:9b:00.0"]
	if slow.Node != 1 || slow.Link != (Link{3, 8}) || slow.Most != (Link{5, 16}) ||
		slow.Path.Parent() != "0000:9a:01.0" {
		t.Errorf("GPU of node 1: %+v", slow)
	}
	if none := Sysfs(filepath.Join(t.TempDir(), "nothing")).Devices(); len(none) != 0 {
		t.Errorf("a machine without devices has %+v", none)
	}
}

// TestDistance goes from each to each: distances are the same both ways.
func TestDistance(t *testing.T) {
	s, all := server(t)
	nodes := s.Nodes()
	for _, c := range []struct {
		a, b string
		want Distance
	}{
		{"0000:19:00.0", "0000:19:00.0", Distance{SameDevice, 0, 0}},
		{"0000:19:00.0", "0000:1a:00.0", Distance{SameSwitch, 2, 0}},
		{"0000:19:00.0", "0000:1b:00.0", Distance{SameSwitch, 2, 0}},
		{"0000:19:00.0", "0000:1c:00.0", Distance{SameRoot, 0, 0}},
		{"0000:9b:00.0", "0000:ac:00.0", Distance{SameNode, 0, 0}},
		{"0000:19:00.0", "0000:ac:00.0", Distance{OtherNode, 0, 21}},
	} {
		a, b := all[c.a].Place, all[c.b].Place
		got := nodes.Distance(a, b)
		if got != c.want || nodes.Distance(b, a) != nodes.Distance(a, b) {
			t.Errorf("%s to %s: %+v and back %+v, want %+v", c.a, c.b, got, nodes.Distance(b, a),
				c.want)
		}
	}
}

func TestDistanceOfUnknown(t *testing.T) {
	two := Nodes{0: {10, 21}, 1: {21, 10}}
	here, there := Place{Node: 0}, Place{Node: 1}
	lost := Place{Node: -1}
	for _, c := range []struct {
		name  string
		nodes Nodes
		a, b  Place
		want  Nearness
	}{
		{"no path, one node", nil, lost, lost, SameNode},
		{"no path, equal nodes", two, here, here, SameNode},
		{"no path, other nodes", two, here, there, OtherNode},
		{"no node of two", two, here, lost, NotKnown},
		{"functions of one card", two,
			Place{Path: Path{"pci0000:3a", "0000:3a:00.0", "0000:3b:00.0"}},
			Place{Path: Path{"pci0000:3a", "0000:3a:00.0", "0000:3b:00.1"}}, SameDevice},
		{"on the root complex itself", two, Place{Path: Path{"pci0000:00", "0000:00:03.0"}},
			Place{Path: Path{"pci0000:00", "0000:00:04.0"}}, SameRoot},
		{"behind one controller that hides drives", two,
			Place{Path: Path{"pci0000:5d", "0000:5d:05.5", "pci10000:00", "10000:00:02.0",
				"10000:01:00.0"}},
			Place{Path: Path{"pci0000:5d", "0000:5d:05.5", "pci10000:00", "10000:00:03.0",
				"10000:02:00.0"}}, SameRoot},
	} {
		if got := c.nodes.Distance(c.a, c.b); got.Nearness != c.want || got.Bridges < 0 {
			t.Errorf("%s: %+v, want %v", c.name, got, c.want)
		}
	}
}

// TestNearer puts distances in order: the class first, then the firmware's figure, then the
// bridges.
func TestNearer(t *testing.T) {
	order := []Distance{
		{SameDevice, 0, 0}, {SameSwitch, 2, 0}, {SameSwitch, 4, 0}, {SameRoot, 0, 0},
		{SameNode, 0, 0},
		{OtherNode, 0, 12}, {OtherNode, 0, 21}, {NotKnown, 0, 0},
	}
	for i := 1; i < len(order); i++ {
		if order[i-1].Compare(order[i]) >= 0 || order[i].Compare(order[i-1]) <= 0 ||
			order[i].Compare(order[i]) != 0 {
			t.Errorf("%+v is not nearer than %+v", order[i-1], order[i])
		}
	}
	for n := SameDevice; n <= NotKnown; n++ {
		if text, err := n.MarshalText(); err != nil || len(text) == 0 {
			t.Errorf("nearness %d has no words", n)
		}
	}
}

func TestLink(t *testing.T) {
	for text, want := range map[string]int{
		"2.5 GT/s PCIe": 1, "5.0 GT/s PCIe": 2, "8.0 GT/s PCIe": 3, "16.0 GT/s PCIe": 4,
		"32.0 GT/s PCIe": 5, "64.0 GT/s PCIe": 6, "128.0 GT/s PCIe": 7,
		"8 GT/s": 3, "Unknown": 0, "": 0, "0 GT/s": 0, "7.0 GT/s PCIe": 0, "32.0": 0,
		"NaN GT/s PCIe": 0,
	} {
		require.EqualValues(t, want, generation(text), "%q is generation", text)
	}
	for text, want := range map[string]int{"16": 16, "1": 1, "32": 32, "63": 0, "255": 0, "0": 0,
		"-1": 0, "": 0} {
		require.EqualValues(t, want, lanes(text), "%q is lanes", text)
	}
	for link, want := range map[Link]float64{
		{5, 16}: 63.0e9, {3, 8}: 7.88e9, {1, 4}: 1e9, {6, 16}: 121e9, {0, 16}: 0, {5, 0}: 0,
		{8, 1}: 0,
	} {
		if got := link.Rate(); math.Abs(got-want) > want/100 {
			t.Errorf("%v carries %g bytes a second, want about %g", link, got, want)
		}
	}
	if (Link{}).Below(Link{5, 16}) || !(Link{3, 16}).Below(Link{5, 16}) ||
		!(Link{5, 8}).Below(Link{5, 16}) || (Link{5, 16}).Below(Link{}) {
		t.Error("a link is below what it could be only when both are known")
	}
	require.EqualValues(t, (Link{4, 16}), (Link{5, 16}).Min(Link{4, 0}), "the ends agree on")
	for link, want := range map[Link]string{{5, 16}: "Gen5 x16", {0, 8}: "x8", {3, 0}: "Gen3",
		{}: "link not known"} {
		require.EqualValues(t, want, link.String(), "%+v reads", link)
	}
}

// TestOddDevices has those that share, hide or lack a place.
func TestOddDevices(t *testing.T) {
	f := standin.NewSysfs(t)
	const card, port = "pci0000:3a/0000:3a:00.0/0000:3b:00.0", "pci0000:3a/0000:3a:00.0"
	f.Add(standin.SysfsFunction{Path: port})
	f.Add(standin.SysfsFunction{Path: card, Class: "0x020000", Node: -1, Speed: "Unknown",
		Most: "Unknown", Width: 0, Wide: 255})
	f.Link("class/net/eth0/device", "devices/"+card)
	for _, vf := range []string{"0000:3b:00.2", "0000:3b:00.3"} {
		f.Add(standin.SysfsFunction{Path: port + "/" + vf, Class: "0x020000"})
		f.Link("devices/"+port+"/"+vf+"/physfn", "devices/"+card)
		f.Link("class/net/vf"+vf[11:]+"/device", "devices/"+port+"/"+vf)
	}
	f.Add(standin.SysfsFunction{Path: "pci0000:00/0000:00:03.0", Class: "0x020000"})
	f.File("devices/pci0000:00/0000:00:03.0/virtio2/status", "0x7")
	f.Link("class/net/eth1/device", "devices/pci0000:00/0000:00:03.0/virtio2")
	f.File("class/infiniband/rxe0/parent", "eth1")
	f.File("class/nvme/nvme7/transport", "tcp")
	f.File("devices/virtual/nvme-fabrics/ctl/uevent", "")
	f.Link("class/nvme/nvme7/device", "devices/virtual/nvme-fabrics/ctl")

	all := byAddress(Sysfs(f.Root).Devices())
	require.Len(t, all, 2, "devices: %v", all)
	if d := all["0000:3b:00.0"]; d.Functions != 2 || d.Node != -1 || d.Link != (Link{}) ||
		d.Most != (Link{}) || !slices.Equal(d.NetDevs, []string{"eth0"}) {
		t.Errorf("the card with virtual functions is %+v", d)
	}
	if d := all["0000:00:03.0"]; !slices.Equal(d.RDMA, []string{"rxe0"}) ||
		!slices.Equal(d.NetDevs, []string{"eth1"}) || d.Path.Parent() != "" {
		t.Errorf("the NIC of a virtual machine, with soft-RoCE on it, is %+v", d)
	}
}

func TestNamesOfTheKernel(t *testing.T) {
	for name, want := range map[string]bool{"0000:3b:00.0": true, "10000:e1:00.1": true,
		"3b:00.0": false, "0000:3b:00.8": false, "0000:3B:00.0": false, "000:3b:00.0": false} {
		require.EqualValues(t, want, IsAddress(name), "%q is an address: %v", name, !want)
	}
	if IsRoot("pci0000:3a:00.0") || IsRoot("0000:3a") || !IsRoot("pci10000:00") {
		t.Error("roots are told apart wrongly")
	}
}
