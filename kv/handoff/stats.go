// SPDX-License-Identifier: Apache-2.0

package handoff

import "sync/atomic"

// Stats are running totals of one side.
type Stats struct {
	Begun        uint64            // requests
	Finished     uint64            // of them, handed over
	Ended        map[Reason]uint64 // of them, by why they were not
	BlocksMoved  uint64            // of finished requests
	BlocksReused uint64            // that the receiver had already
	Bytes        uint64            // written (Sender), or taken over (Receiver)
	Layers       uint64            // written (Sender), or announced (Receiver)
	Strays       uint64            // messages that no request wanted, late ones for example
	// blocks lost to the pool, at least for a while: their lease could not be revoked (Receiver)
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

// Stats returns the totals.
func (s *Sender) Stats() Stats { return s.count.stats() }
