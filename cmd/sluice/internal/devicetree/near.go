// SPDX-License-Identifier: Apache-2.0

package devicetree

import "github.com/sluicehq/sluice/internal/topology"

// acquaint finds the NICs and drives that are near each GPU. Where there are RDMA devices, other
// NICs do not count: bytes of a GPU would pass through the processor's memory anyway.
func (r *Report) acquaint(nodes topology.Nodes) {
	var nics, plain, drives []*Device
	for _, d := range r.Rest {
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

// nearest lists those of which none is nearer.
func (d *Device) nearest(nodes topology.Nodes, of []*Device) []Neighbour {
	list := []Neighbour{}
	for _, other := range of {
		n := Neighbour{other.Name, other.Address, nodes.Distance(d.place(), other.place())}
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

func (d *Device) place() topology.Place { return topology.Place{Node: d.Node, Path: d.Path} }
