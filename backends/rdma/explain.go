// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"net/netip"
	"strings"
)

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	if p.enter() != nil {
		if why := p.whyLost(); why != nil {
			return fmt.Sprintf("rdma: the peer is lost: %v", why)
		}
		return "rdma: the peer is gone"
	}
	defer p.gate.Exit()
	p.mu.Lock()
	i, known := p.imports[remoteKey]
	p.mu.Unlock()
	m := p.b.table.At(localKey)
	if !known || m == nil {
		return "rdma: unknown key"
	}
	states := p.mender.look()
	preferred := p.b.prefers(&m.span)
	var pairs []string
	for index, pair := range p.pairs {
		r := p.b.rails[pair.ours]
		text := fmt.Sprintf("%v %v -> %v %v", r, netip.AddrFrom16(r.info.GID).Unmap(),
			p.owner.rails[pair.theirs].ip(), states[index])
		if counted, err := p.b.net.Counters(pair.ours); err == nil && counted.Rate > 0 {
			text += fmt.Sprintf(" %.1f GB/s", float64(counted.Rate)/1e9)
		}
		if i.pairs&(1<<index) == 0 {
			text += ", not for this memory of the peer's"
		}
		if why := m.pinned.leftOut(pair.ours); why != "" {
			text += ", not for this memory: " + why
		}
		if preferred&(1<<pair.ours) == 0 {
			text += ", far from this memory"
		}
		pairs = append(pairs, text)
	}
	where := "another host"
	if p.owner.host == p.b.address.host {
		where = "this host"
	}
	return fmt.Sprintf("%s, RC over %d queue pairs: %s; at most %d bytes in a work request, more "+
		"than that is spread", where, len(pairs), strings.Join(pairs, ", "), p.b.cfg.Slice)
}
