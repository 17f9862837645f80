// SPDX-License-Identifier: Apache-2.0

package devicetree

import (
	"fmt"

	"github.com/sluicehq/sluice/internal/topology"
)

// Warning is something that is slower than it could be.
type Warning struct {
	Text string `json:"text"`
	Fix  string `json:"fix"`
	// Idle: it may be so only while nothing is asked of it.
	Idle bool `json:"idle"`
}

// warn compares the link with what the device could have.
func (d *Device) warn() []Warning {
	if !d.Link.Below(d.Most) {
		return []Warning{}
	}
	w := Warning{Text: fmt.Sprintf("%s runs at %v of %v", d.Name, d.Link, d.Most),
		Fix: "check the slot: seat the card anew, look at risers and at how the firmware " +
			"splits the slot"}
	switch reach := d.Most.Min(d.Slot); {
	case reach.Below(d.Most) && !d.Link.Below(reach):
		w.Fix = fmt.Sprintf("move it to a slot of %v: this one, %s, has %v", d.Most,
			d.Path.Parent(), d.Slot)
	case d.idles() && !d.Link.Narrower(d.Most):
		w.Fix, w.Idle = "look again under load: an idle GPU slows its link down", true
	}
	return []Warning{w}
}

// idles reports whether a device may have slowed its link down by itself: GPUs do, unless
// they run at full clocks.
func (d *Device) idles() bool {
	return d.Kind == topology.GPU && (d.GPU == nil || d.GPU.State != 0)
}

// warn compares the link of a switch towards the processor with what it could be.
func (b *Branch) warn() []Warning {
	if !b.Link.Below(b.Most) {
		return []Warning{}
	}
	return []Warning{{
		Text: fmt.Sprintf("switch %s runs at %v of %v towards the processor", b.Name, b.Link,
			b.Most),
		Fix: "all below it share that: check its slot and cable, and what the firmware allows",
	}}
}
