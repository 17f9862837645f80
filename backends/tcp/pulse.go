// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// pulse asks peers that owe us something whether they are there, and gives up those that say
// nothing for Failure. One that owes nothing is not asked: of hosts that die the kernel
// tells.
// The period is lost twice, before the question and after the last moment for an answer: a
// twelfth lets no silent peer be found later than 1.2 times Failure.
func (b *Backend) pulse() {
	if !b.entry.Enter() {
		return
	}
	defer b.entry.Exit()
	now := b.clock.Now()
	slept := now-b.beat > int64(b.cfg.Failure)/2 // we stood still
	for _, p := range b.allPeers() {
		p.check(now, slept)
	}
	b.awaitPulse(now)
}

// awaitPulse has pulse called a period after now, unless the backend is closed by then.
func (b *Backend) awaitPulse(now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed.Load() {
		b.beat = now
		b.pulsing = b.clock.AfterFunc(b.cfg.Failure/12, b.pulse)
	}
}

func (b *Backend) allPeers() []*peer {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := make([]*peer, 0, len(b.peers))
	for p := range b.peers {
		list = append(list, p)
	}
	return list
}

func (p *peer) check(now int64, slept bool) {
	p.mu.Lock()
	owes := len(p.byTag) > 0
	p.mu.Unlock()
	switch {
	case !owes || slept:
		p.pinged.Store(false)
	case !p.pinged.Swap(true):
		p.askedAt = now
		p.conns[ctl].send(header{kind: kindPing})
	case now-max(p.askedAt, p.heard.Load()) > int64(p.b.cfg.Failure):
		p.lose(fmt.Errorf("the peer says nothing for %v: %w", p.b.cfg.Failure, driver.ErrPeerLost))
	}
}
