// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"slices"
	"strconv"
	"strings"
)

// Nodes is how far NUMA nodes are from each other, as the firmware says: 10 is the same
// node. Nil: there is one node, or it is not known.
type Nodes map[int][]int

// Nodes reads them.
func (s Sysfs) Nodes() Nodes {
	n := Nodes{}
	for _, name := range s.List("devices/system/node") {
		digits, ok := strings.CutPrefix(name, "node")
		node, err := strconv.Atoi(digits)
		if !ok || err != nil {
			continue
		}
		var row []int
		for text := range strings.FieldsSeq(s.Text("devices/system/node", name, "distance")) {
			distance, err := strconv.Atoi(text)
			if err != nil {
				break
			}
			row = append(row, distance)
		}
		n[node] = row
	}
	if len(n) < 2 {
		return nil
	}
	return n
}

// order lists the nodes as the kernel numbers the columns of its distances.
func (n Nodes) order() (list []int) {
	for node := range n {
		list = append(list, node)
	}
	slices.Sort(list)
	return list
}

// Between returns the distance of two nodes; 0: not known.
func (n Nodes) Between(a, b int) int {
	row := n[a]
	at := slices.Index(n.order(), b)
	if at < 0 || at >= len(row) {
		return 0
	}
	return row[at]
}
