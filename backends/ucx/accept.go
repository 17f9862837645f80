// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"os"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/control"
	"github.com/sluicehq/sluice/internal/keys"
)

// inboundID is how a hello names a connection: whose it is, and which.
type inboundID struct {
	from keys.Owner
	conn uint64
}

// refusalsMax bounds the connections over Config.ConnsMax that are told so; more
// than these get no answer.
const refusalsMax = 64

func (l *side) inboundOf(id inboundID) *inbound {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.inbounds[id]
}

// greet begins our end of a connection. To connect back takes time, so it happens
// beside: the peer sends nothing to this end before it was welcomed, but for a bye.
func (l *side) greet(worker int, m *hello) {
	from, err := decodeAddress(m.from)
	if err != nil {
		return // there is no address to answer to
	}
	workers := l.workersOf(&from)
	if int(m.worker) >= len(workers) || l.near && from.host != l.b.address.host {
		return
	}
	c := &inbound{
		b: l.b, l: l, id: inboundID{from.owner, m.conn}, conn: l.b.conns.Add(1), from: from,
		worker: worker, reply: workers[m.worker], gate: m.gate, grace: m.grace,
	}
	if m.to != l.b.address.owner || l.b.gate.IsShut() {
		c.refusal = driver.ErrPeerLost // the backend that it means is gone, and we have its place
	}
	if !l.admit(c) {
		return
	}
	if !l.b.tasks.Start(c.accept) {
		c.withdraw()
	}
}

// admit puts a connection on the list, unless it is there or there are too many.
func (l *side) admit(c *inbound) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	most := l.b.cfg.ConnsMax
	if len(l.inbounds) >= most && c.refusal == nil {
		c.refusal = fmt.Errorf("%d peers, raise Config.ConnsMax: %w", len(l.inbounds),
			driver.ErrFull)
	}
	if n, whose := l.alike(c); n >= max(1, most/2) && c.refusal == nil {
		c.refusal = fmt.Errorf("%d connections of one %s, raise Config.ConnsMax: %w", n, whose,
			driver.ErrFull)
	}
	if l.inbounds[c.id] != nil || len(l.inbounds) >= most+refusalsMax {
		return false
	}
	l.inbounds[c.id] = c
	l.b.acceptedMu.Lock()
	l.b.accepted[c.conn] = c
	l.b.acceptedMu.Unlock()
	return true
}

// alike counts the connections of the same process, near, or of the same host, far, as their hellos
// say, which has half of the places at most: near ones that broke without a proof stay for as long
// as the process lives. Our own process has all.
// Preconditions: l.mu is held.
func (l *side) alike(c *inbound) (n int, whose string) {
	if c.from.host == l.b.address.host && int(c.from.process.PID) == os.Getpid() {
		return 0, ""
	}
	for _, other := range l.inbounds {
		if other.from.host == c.from.host && (!l.near || other.from.process == c.from.process) {
			n++
		}
	}
	if l.near {
		return n, "process"
	}
	return n, "host"
}

// accept connects back and welcomes the peer, or tells it why not.
func (c *inbound) accept() {
	if err := c.watch(); err != nil {
		c.withdraw()
		return
	}
	link, err := c.l.net.connect(c.worker, c.reply)
	if err != nil {
		c.unwatch()
		c.withdraw()
		return
	}
	c.l.add(link.ID(), c)
	// of whose memory we map nothing
	there := ucp.Peer{ID: c.id.conn, Gate: c.gate, Grace: c.grace}
	if c.l.near {
		there.PID = int(c.from.process.PID)
	}
	err = link.Bind(there)
	if c.open(link, err) {
		return
	}
	c.giveBack()
}

// open makes the connection usable and says so, in one step, beside a Close at
// the same time. It reports false when it is not to be used.
func (c *inbound) open(link link, err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link, c.linked = link, link.ID()
	switch {
	case c.left && c.parted: // its bye came before the welcome
		_ = link.Control(farewell{}.encode())
		return false
	case c.left || err != nil:
		return false
	}
	w := welcome{conn: link.ID(), status: control.StatusOf(c.refusal), grace: uint64(c.b.cfg.Grace)}
	if c.refusal == nil {
		w.pulls, w.gate, w.words = link.Pulls() == nil, link.Gate(), c.l.net.Words()
	}
	c.left = c.refusal != nil
	c.welcomed = c.refusal == nil
	return link.Control(w.encode()) == nil && c.welcomed
}
