// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"time"

	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/silence"
)

// quiet is for how long a peer's host has acknowledged nothing while something waits for the peer.
// The host of a process that is stopped, or kept off its processors, acknowledges for it.
type quiet struct {
	ch    *channel
	host  silence.Watch
	asked time.Time // for a sign of life
}

// lasts sees to it that there is something to acknowledge, and returns for how long nothing was.
// now is by a Stopwatch.
func (q *quiet) lasts(now time.Time) time.Duration {
	out := q.ch.outbound()
	if !out.Pending && now.Sub(q.asked) >= q.ch.cfg.Failure/2 {
		q.asked = now
		q.ch.send(pingBytes)
	}
	return q.host.Look(out, now.UnixNano(), false)
}

// pulse ends connections to hosts that acknowledge nothing of what they were sent, whether
// something waits for them or not, until the backend closes.
func (b *Backend) pulse() {
	for last := b.cfg.clock.Now(); ; {
		over, timer := clock.After(b.cfg.clock, b.cfg.Failure)
		select {
		case <-over:
		case <-b.closing:
			timer.Stop()
			return
		}
		now := b.cfg.clock.Now()
		stood := now-last > int64(b.cfg.Failure)*3/2
		last = now
		for _, c := range b.channels() {
			silent := c.idle.Look(c.outbound(), now, stood)
			if silent >= silence.IdleFailures*b.cfg.Failure {
				c.close(silence.HostLost(silent))
			}
		}
	}
}

// channels lists the control connections of peers, and of those that have connected to us.
func (b *Backend) channels() (list []*channel) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.peers {
		list = append(list, p.ch)
	}
	for c := range b.accepted {
		list = append(list, c.ch)
	}
	return list
}
