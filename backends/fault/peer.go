// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// peer is a wrapped connection. backend.mu guards what stands below over.
type peer struct {
	driver.Peer // the one inside
	b           *Backend
	addr        string
	over        chan struct{} // closed when it is shut

	line    []*flight // with messages, in order of submission, that have not begun
	pending int       // flights that have not begun
	drops   []uint32  // keys to be dropped once all flights have begun
	stalled time.Time // Submit says full until then
	closed  bool
	lost    bool // it flaps
	dead    bool // watch has ended what waits: Submit holds nothing any more
}

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, x *driver.Batch) error {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := p.gone(); err != nil {
		return err
	}
	if err := x.Check(p.Can()); err != nil {
		return err // no rule hits what is not to be tried again
	}
	if p.stalled.After(time.Now()) {
		return driver.ErrFull
	}
	if b.places >= flightsMax {
		b.starved = true
		return driver.ErrFull
	}
	v := b.judge(x)
	switch v.ending {
	case refuse:
		return v.err
	case stall:
		p.stalled = time.Now().Add(v.time)
		time.AfterFunc(v.time, b.wakeUp)
		return driver.ErrFull
	case flap:
		p.flap(v.time)
		return driver.ErrPeerLost
	}
	if v.corrupt {
		y := corrupted(x)
		x = &y
	}
	if v.early && v.ending == 0 {
		b.places++
		b.deliver(tag, nil)
		p.launch(keep(x), v.earlyBy)
		return nil
	}
	f := &flight{p: p, tag: tag, verdict: v, due: time.Now().Add(v.start + v.hold)}
	mustLine := x.Tail != driver.NoTail && len(p.line) > 0 // its message must not overtake others
	begins := v.start == 0 && !mustLine && v.ending != swallow && v.ending != fail
	if !begins || v.lateWrite {
		f.batch = keep(x)
	}
	b.places++
	b.flights[tag] = f
	switch {
	case v.ending == swallow:
		f.state = swallowed
	case v.ending == fail:
		f.err = v.err
		f.settle()
	case begins:
		f.state = flying
		b.mu.Unlock()
		err := p.Peer.Submit(tag, x)
		b.mu.Lock()
		if err != nil {
			f.leave()
			b.vacate(1)
			return err
		}
	default:
		p.begin(f, v.start)
	}
	return nil
}

// gone says why a connection takes nothing any more. Preconditions: b.mu is held.
func (p *peer) gone() error {
	switch {
	case p.closed:
		return driver.ErrClosed
	case p.lost || p.dead:
		return driver.ErrPeerLost
	}
	return nil
}

// begin has a flight begin after a time, and behind the messages before its own.
// Preconditions: b.mu is held.
func (p *peer) begin(f *flight, after time.Duration) {
	f.pending = true
	p.pending++
	if f.batch.Tail != driver.NoTail {
		p.line = append(p.line, f)
	}
	f.wait(after)
}

// launch has a batch move later, of which the program is not told. Preconditions: b.mu is held.
func (p *peer) launch(x driver.Batch, after time.Duration) {
	b := p.b
	f := &flight{p: p, hidden: true, batch: x}
	for f.tag == 0 || b.flights[f.tag] != nil {
		b.hidden++
		f.tag = b.hidden ^ 0xfa17_0000_0000_0000
	}
	b.flights[f.tag] = f
	p.begin(f, after)
}

// advance hands a flight on that is ripe, and those behind it in the line, unless it must wait for
// a message before its own. Preconditions: b.mu is held; it is let go of meanwhile.
func (p *peer) advance(f *flight) {
	for f != nil && f.state == waiting && f.ripe {
		lined := f.batch.Tail != driver.NoTail
		if lined && p.line[0] != f || !f.handOn() {
			return
		}
		p.begun(f)
		f = nil
		if lined && len(p.line) > 0 {
			f = p.line[0]
		}
	}
}

// begun takes a flight off those that have not begun, if it is there, and does what waited for
// that. Preconditions: b.mu is held.
func (p *peer) begun(f *flight) {
	if !f.pending {
		return
	}
	f.pending = false
	if i := slices.Index(p.line, f); i >= 0 {
		p.line = slices.Delete(p.line, i, i+1)
		if i == 0 && len(p.line) > 0 && p.line[0].ripe {
			p.line[0].wait(0)
		}
	}
	if p.pending--; p.pending == 0 {
		for _, key := range p.drops {
			p.Peer.Drop(key)
		}
		p.drops = nil
	}
}

// Drop implements driver.Peer. While batches have not begun, which may need the key, it stays with
// the wrapped backend.
func (p *peer) Drop(key uint32) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if p.pending > 0 {
		p.drops = append(p.drops, key)
		return
	}
	p.Peer.Drop(key)
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	p.b.mu.Lock()
	f := p.b.flights[tag]
	flown := f != nil && f.p == p && f.state == flying
	if f != nil && f.p == p {
		f.release(driver.ErrAborted)
	}
	p.b.mu.Unlock()
	if flown {
		p.Peer.Cancel(tag)
	}
}

// watch ends what waits for the end of a connection when the other side dies.
func (p *peer) watch(lost <-chan struct{}) {
	select {
	case <-p.over:
		return
	case <-lost:
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	p.dead = true
	for _, f := range p.flights() {
		if f.state == swallowed || f.verdict.ending == drop {
			f.release(driver.ErrPeerLost)
		}
	}
}

// flights lists the flights of a peer, in the order of their tags. Preconditions: b.mu is held.
func (p *peer) flights() []*flight {
	return slices.SortedFunc(func(yield func(*flight) bool) {
		for _, f := range p.b.flights {
			if f.p == p && !yield(f) {
				return
			}
		}
	}, func(x, y *flight) int { return cmp.Compare(x.tag, y.tag) })
}

// shut has the connection take no more, and ends what is held up. Preconditions: b.mu is held.
func (p *peer) shut(why error) {
	if !p.closed && !p.lost {
		close(p.over)
	}
	p.closed = p.closed || why == driver.ErrClosed
	p.lost = p.lost || why == driver.ErrPeerLost
	for _, f := range p.flights() {
		f.release(why)
	}
}

// flap loses the connection: no other is made to the address for a while. The wrapped connection
// is closed beside, since Submit must not wait for it. Preconditions: b.mu is held.
func (p *peer) flap(d time.Duration) {
	b, now := p.b, time.Now()
	maps.DeleteFunc(b.flapped, func(_ string, until time.Time) bool { return until.Before(now) })
	b.flapped[p.addr] = now.Add(d)
	p.shut(driver.ErrPeerLost)
	b.tasks.Go(func() { _ = p.Peer.Close() })
}

// Close implements driver.Peer.
func (p *peer) Close() error {
	b := p.b
	b.mu.Lock()
	p.shut(driver.ErrClosed)
	b.mu.Unlock()
	err := p.Peer.Close()
	p.awaitHanded()
	b.mu.Lock()
	delete(b.peers, p)
	b.mu.Unlock()
	return err
}

// awaitHanded waits until no flight of a connection that takes no more is being handed on.
func (p *peer) awaitHanded() {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for slices.ContainsFunc(p.flights(), func(f *flight) bool { return f.state == handing }) {
		b.handed.Wait()
	}
}

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	return fmt.Sprintf("%s; behind %d fault rules", p.Peer.Explain(localKey, remoteKey),
		len(p.b.rules))
}
