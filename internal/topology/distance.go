// SPDX-License-Identifier: Apache-2.0

package topology

import "cmp"

// Nearness is where the ways of two devices meet, from near to far.
type Nearness int

// The places where they may meet. What passes between two devices stays off all that is
// further than that.
const (
	SameDevice Nearness = iota + 1 // two functions of one card
	SameSwitch                     // a PCI switch: past the processor altogether
	SameRoot                       // a root complex of the processor
	SameNode                       // a NUMA node: through the processor's mesh
	OtherNode                      // the link between processors
	NotKnown                       // the kernel does not say
)

var nearnessText = map[Nearness]string{
	SameDevice: "same device", SameSwitch: "same switch", SameRoot: "same root complex",
	SameNode: "same NUMA node", OtherNode: "across NUMA nodes", NotKnown: "not known",
}

// String says it in words.
func (n Nearness) String() string { return nearnessText[n] }

// MarshalText is String, for JSON.
func (n Nearness) MarshalText() ([]byte, error) { return []byte(n.String()), nil }

// Place is where a device lies.
type Place struct {
	Node int // of NUMA; -1: not known
	Path Path
}

// Distance is how far two devices are from each other.
type Distance struct {
	Nearness Nearness `json:"nearness"`
	// ports between devices of one switch, or of several in a row; 0 for all others
	Bridges int `json:"bridges"`
	Nodes   int `json:"nodes"` // as the firmware rates it, 10 within one; 0: not known
}

// Compare orders distances, the nearest first.
func (d Distance) Compare(other Distance) int {
	return cmp.Or(cmp.Compare(d.Nearness, other.Nearness), cmp.Compare(d.Nodes, other.Nodes),
		cmp.Compare(d.Bridges, other.Bridges))
}

// Distance measures two devices of a machine with these nodes.
func (n Nodes) Distance(a, b Place) Distance {
	shared := a.Path.common(b.Path)
	var d Distance
	switch {
	case shared > 0 && sameDevice(a.Path, b.Path):
		d.Nearness = SameDevice
	case shared > 1 && IsAddress(a.Path[shared-1]):
		d.Nearness, d.Bridges = SameSwitch, max(len(a.Path)+len(b.Path)-2*shared-2, 0)
	case shared > 0:
		d.Nearness = SameRoot
	case len(n) < 2:
		d.Nearness = SameNode
	case a.Node < 0 || b.Node < 0:
		d.Nearness = NotKnown
	case a.Node == b.Node:
		d.Nearness = SameNode
	default:
		d.Nearness, d.Nodes = OtherNode, n.Between(a.Node, b.Node)
	}
	return d
}

// sameDevice reports whether two addresses differ in their function at most.
func sameDevice(a, b Path) bool {
	x, y := a.Address(), b.Address()
	return IsAddress(x) && len(x) == len(y) && x[:len(x)-1] == y[:len(y)-1]
}
