// SPDX-License-Identifier: Apache-2.0

package devicetree

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/topology"
)

// Print writes the tree: a line for each branch and device, then what is near to each GPU.
func (r *Report) Print(w io.Writer) {
	if len(r.GPUs)+len(r.Rest) == 0 {
		fmt.Fprintln(w, "DEVICES: no GPU, NIC or NVMe drive is on a PCI bus here.")
		return
	}
	fmt.Fprintln(w, "DEVICES"+r.NVIDIA.text(len(r.GPUs)))
	for _, n := range r.Nodes {
		n.print(w, 0)
	}
	for _, g := range r.GPUs {
		fmt.Fprintf(w, "near %s: %s; %s\n", g.Name, near("NIC", g.NICs), near("drive", g.Drives))
	}
}

// text says which driver there is, where there are cards for it.
func (n *NVIDIA) text(gpus int) string {
	switch {
	case gpus == 0:
		return ""
	case n.Unavailable != "" && n.Fix != "":
		return fmt.Sprintf(" (NVML: %s; %s)", n.Unavailable, n.Fix)
	case n.Unavailable != "":
		return fmt.Sprintf(" (NVML: %s)", n.Unavailable)
	}
	return fmt.Sprintf(" (NVIDIA driver %s, CUDA %s)", cmp.Or(n.Driver, "not known"),
		cmp.Or(n.CUDA, "not known"))
}

var branchNames = map[string]string{Node: "NUMA node", Root: "root complex", Port: "root port",
	Switch: "switch"}

func (b *Branch) print(w io.Writer, depth int) {
	indent := strings.Repeat("  ", depth)
	name := b.Name
	if name == "" {
		name = "not known"
	}
	facts := []string{branchNames[b.Kind] + " " + name}
	switch {
	case b.Kind == Switch && b.Link != topology.Link{}:
		facts = append(facts, linkText(b.Link, b.Most))
	case b.Kind == Port && b.Most != topology.Link{}:
		facts = append(facts, b.Most.String())
	}
	fmt.Fprintln(w, indent+strings.Join(facts, ", "))
	printWarnings(w, indent, b.Warnings)
	for _, d := range b.Devices {
		d.print(w, indent+"  ")
	}
	for _, below := range b.Branches {
		below.print(w, depth+1)
	}
}

func (d *Device) print(w io.Writer, indent string) {
	fmt.Fprintln(w, indent+strings.Join(d.facts(), ", "))
	printWarnings(w, indent, d.Warnings)
}

func printWarnings(w io.Writer, indent string, list []Warning) {
	for _, warning := range list {
		fmt.Fprintf(w, "%s  ! %s: %s\n", indent, warning.Text, warning.Fix)
	}
}

func (d *Device) facts() []string {
	facts := []string{d.title()}
	if g := d.GPU; g != nil {
		if g.Name != "" {
			facts = append(facts, g.Name)
		}
		if g.MemoryTotal > 0 {
			facts = append(facts, figures.RoundSize(g.MemoryTotal))
		}
		if g.Compute != "" {
			facts = append(facts, "compute "+g.Compute)
		}
		if g.MIG != "" && g.MIG != "disabled" {
			facts = append(facts, "MIG "+g.MIG)
		}
	}
	if d.Address != "" && !strings.Contains(facts[0], d.Address) {
		facts = append(facts, d.Address)
	}
	if d.Functions > 0 {
		facts = append(facts, fmt.Sprintf("%d virtual functions", d.Functions))
	}
	if d.Model != "" {
		facts = append(facts, d.Model)
	}
	return append(facts, linkText(d.Link, d.Most))
}

// title names a device as its tools do.
func (d *Device) title() string {
	switch d.Kind {
	case topology.NIC:
		if len(d.RDMA) > 0 && len(d.NetDevs) > 0 {
			return fmt.Sprintf("NIC %s (%s)", strings.Join(d.RDMA, ", "),
				strings.Join(d.NetDevs, ", "))
		}
		return "NIC " + strings.Join(append(d.RDMA, d.NetDevs...), ", ")
	case topology.Drive:
		return "drive " + d.Name
	}
	if d.GPU == nil && strings.HasSuffix(d.Name, d.Address) {
		return d.Name + " (not shown by the driver)"
	}
	return d.Name
}

func linkText(now, most topology.Link) string {
	if now.Below(most) {
		return fmt.Sprintf("%v of %v", now, most)
	}
	return now.String()
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
