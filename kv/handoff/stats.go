// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"sync/atomic"

	"github.com/sluicehq/sluice/kv/layout"
)

// Stats are running totals of one side.
type Stats struct {
	Begun        uint64            // requests
	Finished     uint64            // of them, handed over
	Ended        map[Reason]uint64 // of them, by why they were not
	BlocksMoved  uint64            // of finished requests; not of groups
	BlocksReused uint64            // of those, that the receiver had already
	Bytes        uint64            // of BlocksMoved
	Layers       uint64            // handed over, by edge on the receiving side
	Strays       uint64            // messages that no request wanted, late ones for example
	// leases that could not be revoked in time: their blocks are lost, at least for a while
	Quarantined uint64
}

type counters struct {
	begun, finished, moved, reused, bytes, layers, strays, quarantined atomic.Uint64

	ends [len(reasons)]atomic.Uint64
}

func (c *counters) ended(r Reason) {
	if r.valid() {
		c.ends[r].Add(1)
	}
}

// handed counts the blocks of a request that was handed over.
func (c *counters) handed(g *layout.Geometry, missing, blocks int) {
	c.moved.Add(uint64(missing))
	c.reused.Add(uint64(blocks - missing))
	c.bytes.Add(uint64(missing) * g.BlockBytes())
}

func (c *counters) stats() Stats {
	s := Stats{
		Begun: c.begun.Load(), Finished: c.finished.Load(), Ended: map[Reason]uint64{},
		BlocksMoved: c.moved.Load(), BlocksReused: c.reused.Load(), Bytes: c.bytes.Load(),
		Layers: c.layers.Load(),
		Strays: c.strays.Load(), Quarantined: c.quarantined.Load(),
	}
	for r := Aborted; r.valid(); r++ {
		if n := c.ends[r].Load(); n > 0 {
			s.Ended[r] = n
		}
	}
	return s
}
