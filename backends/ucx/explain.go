// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/driver"
)

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	if p.enter() != nil {
		return "ucx: the peer is gone"
	}
	defer p.gate.Exit()
	p.mu.Lock()
	offered, known := p.imports[remoteKey]
	p.mu.Unlock()
	if !known || p.b.table.At(localKey) == nil {
		return "ucx: unknown key"
	}
	return fmt.Sprintf("%v (%s), %s%s", p.l, p.where(), p.way(remoteKey, offered),
		lanesOf(p.link.Lanes()))
}

// where says why this context, and not the other one.
func (p *peer) where() string {
	switch {
	case p.l.near:
		return "this host, the same namespaces and user"
	case p.owner.host == p.b.address.host && p.b.near != nil && p.b.near.over.Load():
		return "this host, but " + blockedText
	case p.owner.host == p.b.address.host && p.b.near != nil && len(p.owner.near) > 0:
		return "this host, but the peer did not answer over shared memory: " +
			"it was stopped, or its queue is blocked by a process that was killed while it sent"
	case p.owner.host == p.b.address.host:
		return "this host, but both sides have no transports in common that share memory"
	}
	return "another host, or apart by namespaces or user"
}

// way says whose hand moves the bytes, and why.
func (p *peer) way(key uint32, offered bool) string {
	switch {
	case p.link.Direct(key):
		return "direct: UCX has mapped the peer's memory, one copy"
	case offered:
		return "served by the owner's thread: UCX cannot map this memory here, or its pages were " +
			"renewed under a frozen peer"
	case !p.l.near:
		return "served by the owner's thread, message by message"
	}
	return p.hand() + "; not direct, because the memory is not UCX's own: allocate it with the " +
		"ucx backend's Alloc"
}

// hand says which side moves the bytes of memory that is not mapped, near.
func (p *peer) hand() string {
	const messages = "message by message through UCX's queue"
	if p.pulled.Load() {
		return "served by the owner's thread: what is written by one copy of the kernel, " +
			"what is read " + messages
	}
	text := "served by the owner's thread " + messages
	switch why := p.link.Pulls(); {
	case why == nil:
		return text + ", since the owner may not copy from this process"
	case errors.Is(why, driver.ErrNotSupported):
		return text + ", since Transports of one side leave out cma"
	default:
		return fmt.Sprintf("%s (%v: sysctl kernel.yama.ptrace_scope=0, or allow it in the "+
			"container's seccomp profile)", text, why)
	}
}

// usedLane is a transport of an endpoint with its device, and what UCX uses it for: "am" are
// messages, "rma_bw" is rendezvous.
type usedLane struct {
	name string
	uses []string
}

func (l *usedLane) String() string {
	if len(l.uses) == 0 {
		return l.name
	}
	return l.name + " (" + strings.Join(l.uses, " ") + ")"
}

// lanesOf names the lanes of an endpoint.
func lanesOf(text string) string {
	var names []string
	for _, l := range parseLanes(text) {
		names = append(names, l.String())
	}
	if len(names) == 0 {
		return ""
	}
	return "; lanes " + strings.Join(names, ", ")
}

// parseLanes reads what UCX prints of an endpoint, lines such as
//
//	lane[0]: 1:sysv/memory.0 md[1] -> md[1]/sysv/sysdev[255] am am_bw#0
func parseLanes(text string) (lanes []usedLane) {
	for line := range strings.Lines(text) {
		at, uses, ok := strings.Cut(line, "->")
		from := strings.Fields(strings.TrimLeft(at, "# "))
		to := strings.Fields(uses)
		if !ok || len(from) < 2 || len(to) == 0 || !strings.HasPrefix(from[0], "lane[") {
			continue
		}
		_, name, _ := strings.Cut(from[1], ":")
		if i := strings.LastIndexByte(name, '.'); i > 0 {
			name = name[:i] // which path of the device
		}
		lane := usedLane{name: name}
		if len(to) > 1 {
			lane.uses = to[1:]
		}
		lanes = append(lanes, lane)
	}
	return lanes
}
