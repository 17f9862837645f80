// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"time"

	"github.com/sluicehq/sluice/internal/clock"
)

// lead is which goroutine reads express at our end: its reader, or one that waits for a small
// batch, which saves waking the reader, the goroutine that polls, and then the one that waits.
// Both cannot sleep on one socket. So once a run of batches was waited for, the reader steps
// aside when nothing is under way, and comes back when a waiting goroutine leaves with more under
// way, or none takes its place. p.mu guards it.
type lead struct {
	aside  bool          // the reader stands aside
	back   chan struct{} // one place: the reader is to come back
	taken  bool          // a waiting goroutine reads in its place
	tag    uint64        // for which batch: its tag,
	id     uint64        // and its number, since tags come again
	nudged bool          // that one is to look again
	last   verdict       // of its reading

	helps int // batches in a row that a goroutine waited for
	need  int // of them, for the reader to step aside
	leads uint64

	watch    clock.Timer
	watching bool
	seen     uint64 // leads when watch looked last
}

const (
	needMin = 16
	needMax = 1 << 20
	// How long the reader may be missed, and the goroutine in its place be held up.
	watchTime = time.Millisecond
)

// setUp is for a peer whose express carries nothing but small batches, in plain text.
func (l *lead) setUp(p *peer) {
	if len(p.conns) > bulk && !p.conns[express].tls {
		l.back, l.need = make(chan struct{}, 1), needMin
		l.watch = p.b.clock.AfterFunc(time.Hour, p.look)
		l.watch.Stop()
	}
}

// busy reports whether something on express is under way, or will be.
func (p *peer) busy() bool {
	k := &p.flight[express]
	return len(k.parts) > len(k.free) || p.small.first != nil
}

// stepAside reports whether the reader of express is to do so.
func (p *peer) stepAside() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &p.lead
	if l.watch == nil || l.helps < l.need || p.failed || p.busy() {
		return false
	}
	l.aside = true
	return true
}

// comeBack has the reader read again; p.mu is held.
func (l *lead) comeBack() {
	l.aside, l.helps = false, 0
	select {
	case l.back <- struct{}{}:
	default:
	}
}

// awaitReturn reports false when the connection is over instead.
func (c *conn) awaitReturn() bool {
	p, _ := c.end.(*peer) // only a peer has a reader that steps aside
	select {
	case <-p.lead.back:
		return !c.over.Load()
	case <-c.gone:
		return false
	}
}

// expect is called when something goes out on express of which the end will be read there; p.mu is
// held.
func (p *peer) expect() {
	l := &p.lead
	if l.aside && !l.watching {
		l.watching, l.seen = true, l.leads
		l.watch.Reset(watchTime)
	}
}

// look sends for the reader where no goroutine has read in its place since the last look, and
// lets one that reads for one batch all the while go and sleep.
func (p *peer) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &p.lead
	if p.failed || !l.aside || !l.taken && !p.busy() {
		l.watching = false
		return
	}
	switch {
	case l.leads != l.seen:
	case l.taken:
		p.nudge()
	default:
		l.comeBack()
		l.need = min(2*l.need, needMax)
		l.watching = false
		return
	}
	l.seen = l.leads
	l.watch.Reset(watchTime)
}

// nudge has the goroutine that reads look whether its batch is over; p.mu is held.
func (p *peer) nudge() {
	p.lead.nudged = true
	_ = p.conns[express].tcp.SetReadDeadline(time.Unix(1, 0)) // fails only where it is closed
}

// leads reports whether a goroutine that waits for a batch reads; p.mu is held.
func (p *peer) leads(x *batch) bool { return p.lead.taken && p.lead.id == x.id }

// Help implements driver.Peer. It may go on for some milliseconds after stop is closed.
func (p *peer) Help(tag uint64, stop <-chan struct{}) bool {
	select {
	case <-stop:
		return false
	default:
	}
	p.mu.Lock()
	l, x := &p.lead, p.byTag[tag]
	if x == nil || x.bytes > inlineMax || l.watch == nil || l.taken || p.failed {
		p.mu.Unlock()
		return false
	}
	if !l.aside {
		l.helps++ // the reader may step aside for the next
		p.mu.Unlock()
		return false
	}
	l.taken, l.tag, l.id, l.nudged = true, tag, x.id, false
	l.leads++
	p.mu.Unlock()
	err := p.conns[express].raw.Read(p.readLed)
	p.mu.Lock()
	defer p.mu.Unlock()
	over := !p.awaited()
	l.taken = false
	if l.nudged {
		_ = p.conns[express].tcp.SetReadDeadline(time.Time{}) // fails only where it is closed
	}
	if err != nil || l.last != dry || p.busy() {
		l.comeBack()
	}
	return over
}

// awaited reports whether the batch for which a goroutine reads is under way; p.mu is held.
func (p *peer) awaited() bool {
	x := p.byTag[p.lead.tag]
	return x != nil && x.id == p.lead.id
}

// takeLead is what the poller calls for the goroutine in the reader's place: until its batch is
// over.
func (p *peer) takeLead(fd uintptr) bool {
	v := p.conns[express].readAll(int(fd))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lead.last = v
	return v != dry || !p.awaited()
}
