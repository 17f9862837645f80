// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"slices"
	"strings"
)

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	if p.enter() != nil {
		return "ucx: the peer is gone"
	}
	defer p.calls.Exit()
	p.mu.Lock()
	_, known := p.imports[remoteKey]
	p.mu.Unlock()
	if !known || p.b.table.At(localKey) == nil {
		return "ucx: unknown key"
	}
	where := "another host, or apart by namespaces or user"
	if p.owner.host == p.b.address.host {
		where = "this host, which ucx reaches over the network like any other: the shm backend " +
			"is for peers of one host, add it on both sides"
	}
	return fmt.Sprintf("%s; served by the owner's thread, message by message%s", where,
		lanesOf(p.link.Lanes()))
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

// overTCP reports whether the messages of an endpoint go over TCP.
func overTCP(lanes string) bool {
	return slices.ContainsFunc(parseLanes(lanes), func(l usedLane) bool {
		return strings.HasPrefix(l.name, "tcp/") && slices.Contains(l.uses, "am")
	})
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
