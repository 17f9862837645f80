// SPDX-License-Identifier: Apache-2.0

package rdma

import "github.com/sluicehq/sluice/internal/topology"

// numa is how far nodes are from each other; empty: there is one node.
type numa topology.Nodes

// nodes reads them.
func (s *sysfs) nodes() numa { return numa(topology.Sysfs(s.root).Nodes()) }

// between returns the distance of two nodes; 0: not known.
func (n numa) between(a, b int) int { return topology.Nodes(n).Between(a, b) }

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
