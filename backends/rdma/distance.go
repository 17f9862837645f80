// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"slices"
	"strconv"
	"strings"
)

// numa is how far nodes are from each other, as the firmware says: 10 is the same node.
// Empty: there is one node.
type numa map[int][]int

// nodes reads them.
func (s *sysfs) nodes() numa {
	n := numa{}
	for _, name := range s.list("devices/system/node") {
		digits, ok := strings.CutPrefix(name, "node")
		node, err := strconv.Atoi(digits)
		if !ok || err != nil {
			continue
		}
		var row []int
		for text := range strings.FieldsSeq(s.text("devices/system/node", name, "distance")) {
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
func (n numa) order() (list []int) {
	for node := range n {
		list = append(list, node)
	}
	slices.Sort(list)
	return list
}

// between returns the distance of two nodes; 0: not known.
func (n numa) between(a, b int) int {
	row := n[a]
	at := slices.Index(n.order(), b)
	if at < 0 || at >= len(row) {
		return 0
	}
	return row[at]
}

// nearest returns a bit for each rail that is as near to a node as any. Rails whose place
// is not known, and all where there is one node, are as good as the nearest.
func (n numa) nearest(rails []*rail, node int) (bits uint32) {
	least := 0
	far := make([]int, len(rails))
	for i, r := range rails {
		far[i] = n.between(node, r.device.Node)
		if far[i] > 0 && (least == 0 || far[i] < least) {
			least = far[i]
		}
	}
	for i := range rails {
		if far[i] <= least {
			bits |= 1 << i
		}
	}
	return bits
}

// prefers returns a bit for each rail that suits memory.
func (b *Backend) prefers(s *span) uint32 {
	if len(b.numa) > 0 && len(b.rails) > 1 && s.device == onHost {
		if node, ok := nodeOf(s.bytes); ok {
			return b.numa.nearest(b.rails, node)
		}
	}
	return b.numa.nearest(b.rails, -1)
}
