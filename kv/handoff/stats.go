// SPDX-License-Identifier: Apache-2.0

package handoff

import "sync/atomic"

// Stats has the running totals of one member of a Group: what has happened since it was made. A
// request that has begun and is in neither Finished nor Ended is under way.
type Stats struct {
	Begun       uint64            // requests that have begun
	Finished    uint64            // requests that were handed over
	Ended       map[Reason]uint64 // requests that were not, by reason
	Strays      uint64            // messages that belong to no request, for example late ones
	Quarantined uint64            // leases that could not be revoked in time
}

// counters are Stats as they are counted. Any goroutine may add to them.
type counters struct {
	begun, finished, strays, quarantined atomic.Uint64

	ends [len(reasons)]atomic.Uint64 // by Reason
}

func (c *counters) addEnd(r Reason) {
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
