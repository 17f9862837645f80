// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"net/netip"
	"time"

	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// pulses is how many there are in a Failure.
const pulses = 12

// pulse looks at peers that say nothing, until the backend closes.
func (b *Backend) pulse() {
	ticker, now := time.NewTicker(b.cfg.Failure/pulses), clock.Host().Now
	defer ticker.Stop()
	watches := map[uint64]*session.SilenceWatch{}
	for last := now(); ; {
		select {
		case <-ticker.C:
		case <-b.closing:
			return
		}
		at := now()
		watches = b.giveUpGone(watches, at, at-last > int64(b.cfg.Failure)/2)
		last = at
	}
}

// giveUpGone gives up peers whose host is gone: for Config.Failure it has acknowledged nothing
// of what our kernel sends it, by whatever connection. Where nothing waits for the peer that is six
// times as long, and so it is where there is no connection of TCP that could tell: UCX's other
// transports see for themselves that a host is gone. watches are those of the look before, by end;
// stood: this process stood still since.
func (b *Backend) giveUpGone(watches map[uint64]*session.SilenceWatch, now int64, stood bool) (
	kept map[uint64]*session.SilenceWatch) {
	failure := b.cfg.Failure
	kept = make(map[uint64]*session.SilenceWatch)
	var hosts map[netip.Addr]session.Outbound
	for id, e := range b.allEnds() {
		var heard, waited time.Duration
		e.withLink(func(l link) { heard, waited = l.Silence() })
		there := e.remote()
		if heard < 2*failure/pulses || there.host == b.address.host {
			continue // it speaks, or its kernel is ours
		}
		if hosts == nil {
			hosts = b.kernel()
		}
		out := session.NoOutbound
		for _, a := range there.hosts {
			if o, known := hosts[a]; known {
				out = out.Join(o)
			}
		}
		w := watches[id]
		if w == nil {
			w = &session.SilenceWatch{}
		}
		kept[id] = w
		silent := w.Look(out, now, stood)
		// After a standstill nothing that came has been read yet.
		if out == session.NoOutbound && !stood {
			silent, waited = min(heard, waited), 0
		}
		if silent >= session.IdleFailures*failure || min(silent, waited) > failure {
			e.withLink(link.GiveUp)
		}
	}
	return kept
}
