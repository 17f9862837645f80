// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
)

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	l, r := p.from.memories.At(localKey), p.remote(remoteKey)
	if l == nil || r == nil {
		return "no such memory"
	}
	if l.dev == nil && r.m.dev == nil {
		return "from dram to dram: another backend does that"
	}
	d := p.from.ours(l, r.m)
	where := d.String()
	if p.far != nil {
		where += ", memory of another process mapped here"
	}
	return fmt.Sprintf("experimental: has met one card, an H100; %s; "+
		"descriptors by the copy engine, %s; small entries %s",
		where, pinning(l, r.m), p.from.entries(d, l, r.m))
}

// pinning says how the copy engine reaches host memory.
func pinning(list ...*memory) string {
	for _, m := range list {
		switch {
		case m.pin == nil:
		case m.pin.pinned():
			return "host memory pinned"
		default:
			return "host memory not pinned (" + m.pin.why + "), so that the driver copies " +
				"it once more"
		}
	}
	return "within devices"
}

// entries says what moves small entries.
func (b *Backend) entries(d *device, l, r *memory) string {
	v := view{local: l, remote: &remote{m: r}, way: (&job{dev: d}).way(l, r)}
	shape := driver.Pattern{Count: 2, Run: 16, Local: driver.Side{Stride: 16},
		Remote: driver.Side{Stride: 16}}
	switch why := v.kernelWhy(b, &shape); {
	case why == "" && b.cfg.Budget.SMs > 0:
		return fmt.Sprintf("by kernel (%v) within %d multiprocessors", d.kernels.Names(),
			b.cfg.Budget.SMs)
	case why == "":
		return fmt.Sprintf("by kernel (%v) with %d bytes under way", d.kernels.Names(),
			b.cfg.Budget.InFlight)
	case v.way == gpu.Any || l.dev != nil && r.dev != nil:
		return "one by one, no kernel: " + why
	default:
		return "gathered by a processor where the device's side is dense, else one by one, " +
			"no kernel: " + why
	}
}
