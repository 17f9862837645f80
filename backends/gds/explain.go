// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"fmt"

	"github.com/sluicehq/sluice/backends"
)

// Explain implements backends.Explainer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	b := p.b
	text := b.facts.Mode + "; cuFile " + b.facts.Version + b.manner()
	if m := b.table.At(localKey); m != nil && m.buffer != nil {
		if m.buffer.registered() {
			text += "; memory registered"
		} else {
			text += "; memory not registered (" + m.buffer.why + "), so that cuFile copies once more"
		}
	}
	p.b.mu.Lock()
	if uint64(remoteKey) < uint64(len(p.imports)) && p.imports[remoteKey].m != nil {
		if f := p.imports[remoteKey].m.file; f.why != "" {
			text += "; the file has no O_DIRECT: " + f.why
		}
	}
	p.b.mu.Unlock()
	if n := b.mover.Lessened(); n > 0 {
		text += fmt.Sprintf("; the library took less at a time than it was given, %d times", n)
	}
	switch {
	case b.cfg.Yield != "":
		return text + "; yields to the staged route: " + b.cfg.Yield
	case b.facts.Compat:
		return text + "; whether the staged route is faster here is measured by sluice bench gds"
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

// Yields implements backends.Yielder.
func (p *peer) Yields(localKey, _ uint32) string {
	if m := p.b.table.At(localKey); m == nil || m.kind != backends.HBM {
		return ""
	}
	return p.b.cfg.Yield
}
