// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/sluicehq/sluice/csrc/nvml"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/topology"
)

// Devices are the GPUs, NICs and NVMe drives of a machine: where each is plugged in, by which link,
// what is slower than it could be, and which NIC and drive are near which GPU.
type Devices struct {
	NVIDIA NVIDIA    `json:"nvidia"`
	GPUs   []*Device `json:"gpus"`
	Others []*Device `json:"others"` // NICs and drives
}

// NVIDIA is the driver.
type NVIDIA struct {
	Driver      string `json:"driver"`
	CUDA        string `json:"cuda"`
	Unavailable string `json:"unavailable"` // why nothing is known of it; empty: it is there
	Fix         string `json:"fix"`
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
	Model     string        `json:"model"`             // of a drive
	GPU       *nvml.GPU     `json:"gpu"`               // what the driver says
	Warnings  []Warning     `json:"warnings"`
	NICs      []Neighbour   `json:"nearest_nics"`   // of a GPU: those that are as near as any
	Drives    []Neighbour   `json:"nearest_drives"` // likewise
}

// Warning is something that is slower than it could be: the device's own link, or that of a switch
// above it.
type Warning struct {
	Of   string `json:"of"`
	Text string `json:"text"`
	Fix  string `json:"fix"`
	// Idle: it may be so only while nothing is asked of it.
	Idle bool `json:"idle"`
}

// Neighbour is a device near a GPU.
type Neighbour struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	topology.Distance
}

// ExamineDevices reads the kernel's tree and asks the driver. It opens no device but the driver's.
func ExamineDevices(kernel topology.Sysfs, ask func() (nvml.Findings, error)) Devices {
	r := Devices{GPUs: []*Device{}, Others: []*Device{}}
	found, err := ask()
	if missing, ok := errors.AsType[*driver.UnavailableError](err); ok {
		r.NVIDIA = NVIDIA{Unavailable: missing.Reason, Fix: missing.Fix}
	} else if err != nil {
		r.NVIDIA.Unavailable = err.Error()
	} else {
		r.NVIDIA = NVIDIA{Driver: found.Driver, CUDA: found.CUDA}
	}
	cards := map[string]*nvml.GPU{}
	for i := range found.GPUs {
		cards[found.GPUs[i].Bus] = &found.GPUs[i]
	}
	for _, d := range kernel.Devices() {
		if d.Kind != topology.GPU {
			r.Others = append(r.Others, newDevice(&d, nil))
			continue
		}
		g := newDevice(&d, cards[d.Address])
		if g.GPU == nil {
			g.Name = "GPU " + d.Address // one that the driver does not show has no number
			if err != nil {
				g.Name = fmt.Sprintf("GPU %d", len(r.GPUs))
			}
		}
		r.GPUs = append(r.GPUs, g)
		delete(cards, d.Address)
	}
	for i := range found.GPUs {
		g := &found.GPUs[i]
		if g.Bus == "" || cards[g.Bus] != nil { // the kernel does not list it
			r.GPUs = append(r.GPUs, newDevice(&topology.Device{Kind: topology.GPU,
				Address: g.Bus, Place: topology.Place{Node: -1}}, g))
		}
	}
	warned := map[string]bool{}
	for _, list := range [][]*Device{r.GPUs, r.Others} {
		for _, d := range list {
			d.warn(kernel, warned)
		}
	}
	r.findNeighbours(kernel.Nodes())
	return r
}

func newDevice(from *topology.Device, card *nvml.GPU) *Device {
	d := &Device{
		Kind: from.Kind, Name: from.Address, Address: from.Address, Node: from.Node,
		Path: append(topology.Path{}, from.Path...), Link: from.Link, Most: from.Most,
		Slot: from.Slot,
		RDMA: append([]string{}, from.RDMA...), NetDevs: append([]string{}, from.NetDevs...),
		Functions: from.Functions, Model: from.Model, GPU: card, Warnings: []Warning{},
		NICs: []Neighbour{}, Drives: []Neighbour{},
	}
	for _, names := range [][]string{from.Names, from.NetDevs, from.RDMA} {
		if len(names) > 0 {
			d.Name = names[0]
		}
	}
	if card != nil {
		d.Name = fmt.Sprintf("GPU %d", card.Index)
	}
	return d
}

// warn compares links with what they could be: the device's, and those of the switches between it
// and the processor, each once.
func (d *Device) warn(kernel topology.Sysfs, warned map[string]bool) {
	depth := 0 // ports since the last root: a root port, then two of each switch
	for _, name := range d.Path[:max(len(d.Path)-1, 0)] {
		if topology.IsRoot(name) {
			depth = 0
			continue
		}
		depth++
		now, most := kernel.Links(name)
		if towardsProcessor := depth%2 == 0; !towardsProcessor || warned[name] ||
			!now.Below(most) {
			continue
		}
		warned[name] = true
		d.Warnings = append(d.Warnings, Warning{
			Of: name,
			Text: fmt.Sprintf("switch %s runs at %v of %v towards the processor", name, now,
				most),
			Fix: "all below it share that: check its slot and cable, and what the firmware allows",
		})
	}
	if !d.Link.Below(d.Most) {
		return
	}
	w := Warning{Of: d.Name, Text: fmt.Sprintf("%s runs at %v of %v", d.Name, d.Link, d.Most),
		Fix: "check the slot: seat the card anew, look at risers and at how the firmware " +
			"splits the slot"}
	// A GPU slows its link down by itself, unless it runs at full clocks.
	idles := d.Kind == topology.GPU && (d.GPU == nil || d.GPU.State != 0)
	switch reach := d.Most.Min(d.Slot); {
	case reach.Below(d.Most) && !d.Link.Below(reach):
		w.Fix = fmt.Sprintf("move it to a slot of %v: this one, %s, has %v", d.Most,
			d.Path.Parent(), d.Slot)
	case idles && !d.Link.Narrower(d.Most):
		w.Fix, w.Idle = "look again under load: an idle GPU slows its link down", true
	}
	d.Warnings = append(d.Warnings, w)
}

// findNeighbours finds the NICs and drives that are near each GPU. Where there are RDMA devices,
// other NICs do not count: bytes of a GPU would pass through the processor's memory anyway.
func (r *Devices) findNeighbours(nodes topology.Nodes) {
	var nics, plain, drives []*Device
	for _, d := range r.Others {
		switch {
		case d.Kind == topology.Drive:
			drives = append(drives, d)
		case len(d.RDMA) > 0:
			nics = append(nics, d)
		default:
			plain = append(plain, d)
		}
	}
	if len(nics) == 0 {
		nics = plain
	}
	for _, g := range r.GPUs {
		g.NICs, g.Drives = g.nearest(nodes, nics), g.nearest(nodes, drives)
	}
}

// nearest lists the devices at the least distance from d.
func (d *Device) nearest(nodes topology.Nodes, of []*Device) []Neighbour {
	list := []Neighbour{}
	for _, other := range of {
		n := Neighbour{other.Name, other.Address, nodes.Distance(
			topology.Place{Node: d.Node, Path: d.Path},
			topology.Place{Node: other.Node, Path: other.Path})}
		if len(list) > 0 {
			switch c := n.Compare(list[0].Distance); {
			case c > 0:
				continue
			case c < 0:
				list = list[:0]
			}
		}
		list = append(list, n)
	}
	return list
}

// Print writes a line for each device, and what is near each GPU.
func (r *Devices) Print(w io.Writer) {
	if len(r.GPUs)+len(r.Others) == 0 {
		fmt.Fprintln(w, "DEVICES: no GPU, NIC or NVMe drive is on a PCI bus here.")
		return
	}
	fmt.Fprint(w, "DEVICES")
	switch n := &r.NVIDIA; {
	case len(r.GPUs) == 0:
	case n.Unavailable == "":
		fmt.Fprintf(w, " (NVIDIA driver %s, CUDA %s)", cmp.Or(n.Driver, "not known"),
			cmp.Or(n.CUDA, "not known"))
	case n.Fix != "":
		fmt.Fprintf(w, " (NVML: %s; %s)", n.Unavailable, n.Fix)
	default:
		fmt.Fprintf(w, " (NVML: %s)", n.Unavailable)
	}
	fmt.Fprintln(w)
	for _, list := range [][]*Device{r.GPUs, r.Others} {
		for _, d := range list {
			fmt.Fprintln(w, strings.Join(d.facts(), ", "))
			if d.Kind == topology.GPU {
				fmt.Fprintf(w, "  near: %s; %s\n", near("NIC", d.NICs), near("drive", d.Drives))
			}
			for _, warning := range d.Warnings {
				fmt.Fprintf(w, "  ! %s: %s\n", warning.Text, warning.Fix)
			}
		}
	}
}

func (d *Device) facts() []string {
	facts := []string{d.Name} // as its tools name it
	switch {
	case d.Kind == topology.NIC && len(d.RDMA) > 0 && len(d.NetDevs) > 0:
		facts[0] = fmt.Sprintf("NIC %s (%s)", strings.Join(d.RDMA, ", "),
			strings.Join(d.NetDevs, ", "))
	case d.Kind == topology.NIC:
		facts[0] = "NIC " + strings.Join(append(d.RDMA, d.NetDevs...), ", ")
	case d.Kind == topology.Drive:
		facts[0] = "drive " + d.Name
	case d.GPU == nil && strings.HasSuffix(d.Name, d.Address):
		facts[0] = d.Name + " (not shown by the driver)"
	}
	add := func(there bool, format string, args ...any) {
		if there {
			facts = append(facts, fmt.Sprintf(format, args...))
		}
	}
	if g := d.GPU; g != nil {
		add(g.Name != "", "%s", g.Name)
		add(g.Memory > 0, "%s", figures.RoundSize(g.Memory))
		add(g.Compute != "", "compute %s", g.Compute)
		add(g.MIG != "" && g.MIG != "disabled", "MIG %s", g.MIG)
	}
	add(d.Address != "" && !strings.Contains(facts[0], d.Address), "%s", d.Address)
	add(d.Node >= 0, "NUMA node %d", d.Node)
	add(d.Functions > 0, "%d virtual functions", d.Functions)
	add(d.Model != "", "%s", d.Model)
	add(d.Link.Below(d.Most), "%v of %v", d.Link, d.Most)
	add(!d.Link.Below(d.Most), "%v", d.Link)
	return facts
}

// near lists neighbours that are equally near.
func near(kind string, list []Neighbour) string {
	if len(list) == 0 {
		return "no " + kind
	}
	var names []string
	for _, n := range list {
		names = append(names, n.Name)
	}
	return fmt.Sprintf("%s %s (%v)", kind, strings.Join(names, ", "), list[0].Nearness)
}
