// SPDX-License-Identifier: Apache-2.0

// Package devicetree puts together what the kernel and the NVIDIA driver tell of a machine's
// GPUs, NICs and NVMe drives: where each is plugged in, by which link, what is slower than
// it could be, and which NIC and drive are near to which GPU.
package devicetree

import (
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/cmd/sluice/internal/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// Report is a machine's tree of devices.
type Report struct {
	NVIDIA NVIDIA    `json:"nvidia"`
	Nodes  []*Branch `json:"nodes"` // of NUMA, with what is below each
	GPUs   []*Device `json:"-"`     // of the tree, in order
	Rest   []*Device `json:"-"`     // of the tree: NICs and drives
	Slow   []*Branch `json:"-"`     // of the tree: switches that warn
}

// NVIDIA is the driver.
type NVIDIA struct {
	Driver      string   `json:"driver"`
	NVML        string   `json:"nvml"`
	CUDA        string   `json:"cuda"`
	Unavailable string   `json:"unavailable"` // why nothing is known of it; empty: it is there
	Fix         string   `json:"fix"`
	Missing     []string `json:"missing"` // what it did not say
}

// The kinds of Branch.
const (
	Node   = "node"   // of NUMA
	Root   = "root"   // a root complex
	Port   = "port"   // a root port
	Switch = "switch" // of PCI
)

// Branch is what devices hang on.
type Branch struct {
	Kind string `json:"kind"`
	// a PCI address, or the number of the node; empty: not known
	Name     string        `json:"name"`
	Link     topology.Link `json:"link"`     // of a switch or port, towards the processor
	Most     topology.Link `json:"link_max"` // as it could be
	Warnings []Warning     `json:"warnings"`
	Branches []*Branch     `json:"branches"`
	Devices  []*Device     `json:"devices"`
}

// Device is a GPU, a NIC or a drive.
type Device struct {
	Kind      topology.Kind `json:"kind"`
	Name      string        `json:"name"` // "GPU 0", "mlx5_0", "nvme0"
	Address   string        `json:"address"`
	Node      int           `json:"node"` // of NUMA; -1: not known
	Path      topology.Path `json:"path"`
	Link      topology.Link `json:"link"`
	Most      topology.Link `json:"link_max"`
	Slot      topology.Link `json:"link_max_of_slot"`
	RDMA      []string      `json:"rdma"`
	NetDevs   []string      `json:"netdevs"`
	Functions int           `json:"virtual_functions"` // that are not listed
	Names     []string      `json:"names"`             // of a drive
	Model     string        `json:"model"`             // of a drive
	GPU       *nvml.GPU     `json:"gpu"`               // what the driver says
	Warnings  []Warning     `json:"warnings"`
	NICs      []Neighbour   `json:"nearest_nics"`   // of a GPU: those that are as near as any
	Drives    []Neighbour   `json:"nearest_drives"` // likewise
}

// Neighbour is a device near a GPU.
type Neighbour struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	topology.Distance
}

// Examine reads the kernel's tree and asks the driver. It opens no device but the driver's.
func Examine(kernel topology.Sysfs, ask func() (nvml.Findings, error)) Report {
	var r Report
	r.NVIDIA.Missing = []string{}
	found, err := ask()
	if err != nil {
		r.NVIDIA.without(err)
	} else {
		r.NVIDIA = NVIDIA{Driver: found.Driver, NVML: found.NVML, CUDA: found.CUDA,
			Missing: append([]string{}, found.Absent...)}
	}
	nodes := kernel.Nodes()
	devices := r.join(kernel.Devices(), found.GPUs, err == nil)
	b := builder{kernel: kernel, one: len(nodes) == 0, nodes: []*Branch{}, at: map[string]*Branch{}}
	for _, d := range devices {
		d.Warnings = d.warn()
		b.hang(d)
	}
	r.Nodes, r.Slow = b.nodes, b.slow
	r.acquaint(nodes)
	return r
}

// without says why the driver is not there.
func (n *NVIDIA) without(err error) {
	n.Unavailable = err.Error()
	var missing *driver.UnavailableError
	if errors.As(err, &missing) {
		n.Unavailable, n.Fix = missing.Reason, missing.Fix
	}
}

// join lists the devices of the kernel, GPUs with what the driver says of them, and those GPUs of
// the driver that are on no bus here.
func (r *Report) join(devices []topology.Device, cards []nvml.GPU, driver bool) (all []*Device) {
	at := map[string]*nvml.GPU{}
	for i := range cards {
		at[cards[i].Bus] = &cards[i]
	}
	shown := map[*nvml.GPU]bool{}
	var others, gpus []*Device
	for i := range devices {
		d := newDevice(&devices[i])
		if d.Kind != topology.GPU {
			others = append(others, d)
			continue
		}
		d.Name = "GPU " + d.Address // one that the driver does not show has no number
		if card := at[d.Address]; card != nil {
			d.describe(card)
			shown[card] = true
		} else if !driver {
			d.Name = fmt.Sprintf("GPU %d", len(gpus))
		}
		gpus = append(gpus, d)
	}
	for i := range cards {
		if card := &cards[i]; !shown[card] {
			d := newDevice(&topology.Device{Kind: topology.GPU, Address: card.Bus,
				Place: topology.Place{Node: card.Node}})
			d.describe(card)
			gpus = append(gpus, d)
		}
	}
	r.GPUs, r.Rest = gpus, others
	return append(append(all, gpus...), others...)
}

func newDevice(from *topology.Device) *Device {
	d := &Device{
		Kind: from.Kind, Name: from.Address, Address: from.Address, Node: from.Node,
		Path: append(topology.Path{}, from.Path...), Link: from.Link, Most: from.Most,
		Slot: from.Slot,
		RDMA: append([]string{}, from.RDMA...), NetDevs: append([]string{}, from.NetDevs...),
		Functions: from.Functions,
		Names:     append([]string{}, from.Names...), Model: from.Model, NICs: []Neighbour{},
		Drives: []Neighbour{},
	}
	for _, names := range [][]string{from.Names, from.NetDevs, from.RDMA} {
		if len(names) > 0 {
			d.Name = names[0]
		}
	}
	return d
}

// describe adds what the driver says. It knows the link as it is while the card is awake;
// what the card could have, the kernel reads from the card itself.
func (d *Device) describe(card *nvml.GPU) {
	d.GPU = card
	d.Name = fmt.Sprintf("GPU %d", card.Index)
	d.Link, d.Most = merge(card.Link, d.Link), merge(d.Most, card.Most)
	if d.Node < 0 {
		d.Node = card.Node
	}
}

// merge takes of the second what the first does not say.
func merge(first, second topology.Link) topology.Link {
	if first.Gen == 0 {
		first.Gen = second.Gen
	}
	if first.Width == 0 {
		first.Width = second.Width
	}
	return first
}
