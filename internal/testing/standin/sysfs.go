// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// SysfsTree is a folder that looks like the /sys of a server with GPUs, NICs and NVMe drives.
type SysfsTree struct {
	t    testing.TB
	Root string // in place of "/sys"
}

// NewSysfs makes an empty one.
func NewSysfs(t testing.TB) *SysfsTree {
	t.Helper()
	return &SysfsTree{t, t.TempDir()}
}

// File writes a file of one line.
func (f *SysfsTree) File(name, text string) {
	f.t.Helper()
	if err := os.WriteFile(f.place(name), []byte(text+"\n"), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

// Link makes a link to another name of the tree, relative as the kernel's are.
func (f *SysfsTree) Link(name, to string) {
	f.t.Helper()
	at := f.place(name)
	relative, err := filepath.Rel(filepath.Dir(at), filepath.Join(f.Root, to))
	if err == nil {
		err = os.Symlink(relative, at)
	}
	if err != nil {
		f.t.Fatal(err)
	}
}

// place returns where a name is, in a folder that is there.
func (f *SysfsTree) place(name string) string {
	f.t.Helper()
	at := filepath.Join(f.Root, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		f.t.Fatal(err)
	}
	return at
}

// SysfsFunction is a PCI function.
type SysfsFunction struct {
	Path        string // from the root complex: "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
	Vendor      string // "0x10de"; empty: Intel's
	Class       string // "0x030200"; empty: a bridge
	Node        int
	Speed, Most string // "32.0 GT/s PCIe"; empty: no such file
	Width, Wide int    // lanes as they are, and as they could be
}

// Add makes a function and its link by address.
func (f *SysfsTree) Add(d SysfsFunction) {
	f.t.Helper()
	at := "devices/" + d.Path
	f.File(at+"/numa_node", fmt.Sprint(d.Node))
	f.File(at+"/vendor", or(d.Vendor, "0x8086"))
	f.File(at+"/class", or(d.Class, "0x060400"))
	if d.Speed != "" {
		f.File(at+"/current_link_speed", d.Speed)
		f.File(at+"/current_link_width", fmt.Sprint(d.Width))
		f.File(at+"/max_link_speed", d.Most)
		f.File(at+"/max_link_width", fmt.Sprint(d.Wide))
	}
	f.Link("bus/pci/devices/"+path.Base(d.Path), at)
}

func or(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

// Nodes makes two NUMA nodes.
func (f *SysfsTree) Nodes() {
	f.File("devices/system/node/node0/distance", "10 21")
	f.File("devices/system/node/node1/distance", "21 10")
}

// The speeds as the kernel spells them.
const (
	Gen3 = "8.0 GT/s PCIe"
	Gen4 = "16.0 GT/s PCIe"
	Gen5 = "32.0 GT/s PCIe"
)

// ServerSysfs makes a server of two nodes. On node 0 a switch holds GPU 0000:19:00.0, the NIC
// mlx5_0 (eth2) and the drive nvme0, and another root port of the same root complex the drive
// nvme1. On node 1 are GPU 0000:9b:00.0, which runs at Gen3 x8 in a slot that has Gen5 x16, and, at
// another root complex, the NIC mlx5_1 (ib0), in a slot of Gen4.
func ServerSysfs(t testing.TB) *SysfsTree {
	f := NewSysfs(t)
	f.Nodes()
	const upstream = "pci0000:16/0000:16:01.0/0000:17:00.0"
	for _, d := range []SysfsFunction{
		{Path: "pci0000:16/0000:16:01.0", Speed: Gen5, Most: Gen5, Width: 16, Wide: 16},
		{Path: upstream, Speed: Gen5, Most: Gen5, Width: 16, Wide: 16},
		{Path: upstream + "/0000:18:00.0", Speed: Gen5, Most: Gen5, Width: 16, Wide: 16},
		{Path: upstream + "/0000:18:00.0/0000:19:00.0", Vendor: "0x10de", Class: "0x030200",
			Speed: Gen5, Most: Gen5, Width: 16, Wide: 16},
		{Path: upstream + "/0000:18:01.0", Speed: Gen5, Most: Gen5, Width: 16, Wide: 16},
		{Path: upstream + "/0000:18:01.0/0000:1a:00.0", Vendor: "0x15b3", Class: "0x020000",
			Speed: Gen5, Most: Gen5, Width: 16, Wide: 16},
		{Path: upstream + "/0000:18:02.0", Speed: Gen4, Most: Gen5, Width: 4, Wide: 16},
		{Path: upstream + "/0000:18:02.0/0000:1b:00.0", Vendor: "0x144d", Class: "0x010802",
			Speed: Gen4, Most: Gen4, Width: 4, Wide: 4},
		{Path: "pci0000:16/0000:16:05.0", Speed: Gen4, Most: Gen5, Width: 4, Wide: 4},
		{Path: "pci0000:16/0000:16:05.0/0000:1c:00.0", Vendor: "0x144d", Class: "0x010802",
			Speed: Gen4, Most: Gen4, Width: 4, Wide: 4},
		{Path: "pci0000:9a/0000:9a:01.0", Node: 1, Speed: Gen3, Most: Gen5, Width: 8, Wide: 16},
		{Path: "pci0000:9a/0000:9a:01.0/0000:9b:00.0", Node: 1, Vendor: "0x10de", Class: "0x030200",
			Speed: Gen3, Most: Gen5, Width: 8, Wide: 16},
		{Path: "pci0000:ab/0000:ab:01.0", Node: 1, Speed: Gen4, Most: Gen4, Width: 16, Wide: 16},
		{Path: "pci0000:ab/0000:ab:01.0/0000:ac:00.0", Node: 1, Vendor: "0x15b3", Class: "0x020700",
			Speed: Gen4, Most: Gen5, Width: 16, Wide: 16},
		// of the board, for a screen
		{Path: "pci0000:00/0000:00:02.0", Vendor: "0x1a03", Class: "0x030000"},
	} {
		f.Add(d)
	}
	f.Link("class/infiniband/mlx5_0/device", "bus/pci/devices/0000:1a:00.0")
	f.Link("class/net/eth2/device", "bus/pci/devices/0000:1a:00.0")
	f.Link("class/infiniband/mlx5_1/device", "bus/pci/devices/0000:ac:00.0")
	f.Link("class/net/ib0/device", "bus/pci/devices/0000:ac:00.0")
	for name, address := range map[string]string{"nvme0": "0000:1b:00.0", "nvme1": "0000:1c:00.0"} {
		f.Link("class/nvme/"+name+"/device", "bus/pci/devices/"+address)
		f.File("class/nvme/"+name+"/model", "Made Drive "+strings.TrimPrefix(name, "nvme"))
		f.File("class/nvme/"+name+"/"+name+"n1/size", "0")
	}
	f.File("class/net/lo/address", "00:00:00:00:00:00")
	return f
}
