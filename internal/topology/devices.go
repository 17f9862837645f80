// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"slices"
	"strings"
)

// Kind is the purpose of a Device.
type Kind string

// The kinds that bytes are moved by.
const (
	GPU   Kind = "gpu"
	NIC   Kind = "nic"
	Drive Kind = "drive"
)

// Device is a PCI function that moves bytes: a GPU, a NIC or a drive.
type Device struct {
	Kind      Kind
	Address   string   // of PCI, as the kernel spells it
	RDMA      []string // of a NIC: mlx5_0
	NetDevs   []string // of a NIC: eth2
	Names     []string // of a drive: nvme0, and its namespaces nvme0n1
	Model     string   // of a drive, as it says itself
	Functions int      // virtual ones of a NIC that have names of their own and are not listed
	Place
	Link  Link   // as it is
	Most  Link   // as the device could have it
	Slot  Link   // as the port that it is plugged into could have it
	owner string // of a virtual function: the address of its card; empty: it is none
}

const devices = "bus/pci/devices"

// nvidia is the vendor whose display controllers and 3D controllers are GPUs to us.
const nvidia = "0x10de"

// display is the class of PCI that GPUs are of.
const display = "0x03"

// Devices lists GPUs, NICs and NVMe drives in the order of their addresses. A virtual function
// whose card is listed, too, is counted there.
func (s Sysfs) Devices() []Device {
	found := map[string]*Device{}
	s.gpus(found)
	for _, name := range s.List("class/infiniband") {
		d := s.find(found, NIC, "class/infiniband", name, "device")
		if parent := s.Text("class/infiniband", name, "parent"); d == nil && parent != "" {
			// soft-RoCE lies where its network device does
			d = s.find(found, NIC, "class/net", parent, "device")
		}
		if d != nil {
			d.RDMA = append(d.RDMA, name)
		}
	}
	for _, name := range s.List("class/net") {
		if d := s.find(found, NIC, "class/net", name, "device"); d != nil {
			d.NetDevs = append(d.NetDevs, name)
		}
	}
	s.drives(found)
	var all []Device
	for _, d := range found {
		if card := found[d.owner]; card != nil {
			card.Functions++
		}
	}
	for _, d := range found {
		if found[d.owner] == nil {
			all = append(all, *d)
		}
	}
	slices.SortFunc(all, func(a, b Device) int {
		if len(a.Address) != len(b.Address) {
			return len(a.Address) - len(b.Address)
		}
		return strings.Compare(a.Address, b.Address)
	})
	return all
}

func (s Sysfs) gpus(found map[string]*Device) {
	for _, address := range s.List(devices) {
		if s.Text(devices, address, "vendor") == nvidia &&
			strings.HasPrefix(s.Text(devices, address, "class"), display) {
			s.find(found, GPU, devices, address)
		}
	}
}

// drives lists those on PCI; others are reached over a network.
func (s Sysfs) drives(found map[string]*Device) {
	const class = "class/nvme"
	for _, name := range s.List(class) {
		d := s.find(found, Drive, class, name, "device")
		if d == nil {
			continue
		}
		d.Model = s.Text(class, name, "model")
		d.Names = append(d.Names, name)
		for _, namespace := range s.List(class, name) {
			if strings.HasPrefix(namespace, name+"n") {
				d.Names = append(d.Names, namespace)
			}
		}
	}
}

// find returns the device that a link leads to, which several names may share; nil: it is
// not on PCI.
func (s Sysfs) find(all map[string]*Device, kind Kind, link ...string) *Device {
	path := s.Path(link...)
	address := path.Address()
	if !IsAddress(address) {
		return nil
	}
	if d := all[address]; d != nil {
		return d
	}
	d := &Device{Kind: kind, Address: address, Place: Place{Node: s.Node(devices, address),
		Path: path}}
	d.Link, d.Most = s.Links(address)
	if port := path.Parent(); port != "" {
		_, d.Slot = s.Links(port)
	}
	d.owner = s.Path(devices, address, "physfn").Address()
	all[address] = d
	return d
}
