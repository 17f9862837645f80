// SPDX-License-Identifier: Apache-2.0

package devicetree

import (
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/internal/topology"
)

// builder hangs devices into the tree.
type builder struct {
	kernel topology.Sysfs
	one    bool // there is one NUMA node, which the kernel then does not number
	nodes  []*Branch
	at     map[string]*Branch // by kind and name
	slow   []*Branch
}

// hang puts a device below its node, root complex, root port and switches.
func (b *builder) hang(d *Device) {
	on := b.node(d.Node)
	depth := 0 // ports since the last root
	for _, name := range d.Path[:max(len(d.Path)-1, 0)] {
		switch {
		case topology.IsRoot(name):
			depth, on = 0, b.branch(on, Root, name)
		case depth == 0:
			depth, on = 1, b.branch(on, Port, name)
		case depth%2 == 1: // the port of a switch towards the processor
			depth, on = depth+1, b.branch(on, Switch, name)
		default: // one that leads away from it, to the next of the path alone
			depth++
		}
	}
	on.Devices = append(on.Devices, d)
}

func (b *builder) node(number int) *Branch {
	name := strconv.Itoa(number)
	switch {
	case number < 0 && b.one:
		name = "0"
	case number < 0:
		name = ""
	}
	n := b.at[Node+name]
	if n == nil {
		n = newBranch(Node, name)
		b.at[Node+name] = n
		b.nodes = append(b.nodes, n)
		slices.SortFunc(b.nodes, func(x, y *Branch) int { // that which is not known last
			if (x.Name == "") != (y.Name == "") {
				return len(y.Name) - len(x.Name)
			}
			if len(x.Name) != len(y.Name) {
				return len(x.Name) - len(y.Name)
			}
			return strings.Compare(x.Name, y.Name)
		})
	}
	return n
}

func newBranch(kind, name string) *Branch {
	return &Branch{Kind: kind, Name: name, Warnings: []Warning{}, Branches: []*Branch{},
		Devices: []*Device{}}
}

func (b *builder) branch(on *Branch, kind, name string) *Branch {
	// A root complex that serves devices of two nodes is shown below both.
	key := on.Kind + on.Name + kind + name
	if known := b.at[key]; known != nil {
		return known
	}
	n := newBranch(kind, name)
	n.Link, n.Most = b.kernel.Links(name)
	if kind == Switch {
		if n.Warnings = n.warn(); len(n.Warnings) > 0 {
			b.slow = append(b.slow, n)
		}
	}
	b.at[key] = n
	on.Branches = append(on.Branches, n)
	return n
}
