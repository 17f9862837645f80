// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"fmt"
)

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	b := p.b
	text := "experimental: has met compat mode alone; " + b.facts.Mode + "; cuFile " +
		b.facts.Version + b.manner()
	if m := b.flights.At(localKey); m != nil && m.Extent.buffer != nil {
		if m.Extent.buffer.registered() {
			text += "; memory registered"
		} else {
			text += "; memory not registered (" + m.Extent.buffer.why +
				"), so that cuFile copies once more"
		}
	}
	b.flights.Mu.Lock()
	if m := p.Imported(remoteKey); m != nil && m.Extent.file.why != "" {
		text += "; the file has no O_DIRECT: " + m.Extent.file.why
	}
	b.flights.Mu.Unlock()
	if n := b.mover.Lessened(); n > 0 {
		text += fmt.Sprintf("; the library took less at a time than it was given, %d times", n)
	}
	if b.facts.Compat {
		text += "; whether the staged route is faster here is measured by sluice bench " +
			"--lane gpufile"
	}
	return text
}

// manner says how requests are handed over.
func (b *Backend) manner() string {
	switch b.cfg.Way {
	case WayBatch:
		return fmt.Sprintf(" by %d threads with batches of %d", b.cfg.Threads, b.cfg.BatchMax)
	case WayStream:
		return fmt.Sprintf(" on streams of %d threads", b.cfg.Threads)
	}
	return fmt.Sprintf(" by %d threads, one request each", b.cfg.Threads)
}
