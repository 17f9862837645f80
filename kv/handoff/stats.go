// SPDX-License-Identifier: Apache-2.0

package handoff

import "sync/atomic"

// Stats are running totals of one side.
type Stats struct {
	Begun       uint64            // requests
	Finished    uint64            // of them, handed over
	Ended       map[Reason]uint64 // of them, by why they were not
	Strays      uint64            // messages that no request wanted, late ones for example
	Quarantined uint64            // leases that could not be revoked in time
}

type counters struct {
	begun, finished, strays, quarantined atomic.Uint64

	ends [len(reasons)]atomic.Uint64
}

func (c *counters) ended(r Reason) {
	if r.valid() {
		c.ends[r].Add(1)
	}
}

func (c *counters) stats() Stats {
	s := Stats{Begun: c.begun.Load(), Finished: c.finished.Load(), Ended: map[Reason]uint64{},
		Strays: c.strays.Load(), Quarantined: c.quarantined.Load()}
	for r := range c.ends {
		if n := c.ends[r].Load(); n > 0 {
			s.Ended[Reason(r)] = n
		}
	}
	return s
}
