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

// peer is a wrapped connection. Backend.mu guards the fields from messages on.
type peer struct {
	driver.Peer // the one inside
	b           *Backend
	addr        string
	shutCh      chan struct{} // closed by end

	messages   []*flight // queued flights that have a message, in order of submission
	queued     int       // flights that have not been submitted
	laterDrops []uint32  // keys to be dropped once no flight is queued
	stalled    time.Time // Submit returns ErrFull until then
	closed     bool
	lost       bool // flap has closed it
	dead       bool // the other side has died, and watch has seen it
}

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, x *driver.Batch) error {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := p.endError(); err != nil {
		return err
	}
	if err := x.Check(p.Can()); err != nil {
		return err // the program's error, which no rule may turn into another
	}
	if p.stalled.After(time.Now()) {
		return driver.ErrFull
	}
	if b.taken >= flightsMax {
		b.refusedFull = true
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
		y := halved(x)
		x = &y
	}
	if v.early && v.ending == 0 {
		b.taken++
		b.deliver(tag, nil)
		p.startInternal(copyBatch(x), v.earlyBy)
		return nil
	}
	f := &flight{p: p, tag: tag, verdict: v, completeAfter: time.Now().Add(v.start + v.hold)}
	mustQueue := x.Tail != driver.NoTail && len(p.messages) > 0 // behind the messages before it
	begins := v.start == 0 && !mustQueue && v.ending != swallow && v.ending != fail
	if !begins || v.lateWrite {
		f.batch = copyBatch(x)
	}
	b.taken++
	b.flights[tag] = f
	switch {
	case v.ending == swallow:
		f.state = swallowed
	case v.ending == fail:
		f.err = v.err
		f.completeWhenDue()
	case begins:
		f.state = submitted
		b.mu.Unlock()
		err := p.Peer.Submit(tag, x)
		b.mu.Lock()
		if err != nil {
			f.remove()
			b.freePlaces(1)
			return err
		}
	default:
		p.enqueue(f, v.start)
	}
	return nil
}

// endError says why a connection accepts no batches any more; nil: it does.
// Preconditions: b.mu is held.
func (p *peer) endError() error {
	switch {
	case p.closed:
		return driver.ErrClosed
	case p.lost || p.dead:
		return driver.ErrPeerLost
	}
	return nil
}

// enqueue has a flight submitted after a time, and behind the messages before its own.
// Preconditions: b.mu is held.
func (p *peer) enqueue(f *flight, after time.Duration) {
	f.queued = true
	p.queued++
	if f.batch.Tail != driver.NoTail {
		p.messages = append(p.messages, f)
	}
	f.startAfter(after)
}

// startInternal moves a batch later, without telling the program. Preconditions: b.mu is held.
func (p *peer) startInternal(x driver.Batch, after time.Duration) {
	b := p.b
	f := &flight{p: p, internal: true, batch: x}
	for f.tag == 0 || b.flights[f.tag] != nil {
		b.internalTags++
		f.tag = b.internalTags ^ 0xfa17_0000_0000_0000
	}
	b.flights[f.tag] = f
	p.enqueue(f, after)
}

// submitDue submits a flight that is due, and then those behind it in messages that are. A flight
// whose message is not the first one waits. Preconditions: b.mu is held; submit releases it
// meanwhile.
func (p *peer) submitDue(f *flight) {
	for f != nil && f.state == waiting && f.startDue {
		hasMessage := f.batch.Tail != driver.NoTail
		if hasMessage && p.messages[0] != f || !f.submit() {
			return
		}
		p.dequeue(f)
		f = nil
		if hasMessage && len(p.messages) > 0 {
			f = p.messages[0]
		}
	}
}

// dequeue takes a flight off the queued ones, if it is one, and does what waited for that.
// Preconditions: b.mu is held.
func (p *peer) dequeue(f *flight) {
	if !f.queued {
		return
	}
	f.queued = false
	if i := slices.Index(p.messages, f); i >= 0 {
		p.messages = slices.Delete(p.messages, i, i+1)
		if i == 0 && len(p.messages) > 0 && p.messages[0].startDue {
			p.messages[0].startAfter(0)
		}
	}
	if p.queued--; p.queued == 0 {
		for _, key := range p.laterDrops {
			p.Peer.Drop(key)
		}
		p.laterDrops = nil
	}
}

// Drop implements driver.Peer. Queued batches may need the key, so the wrapped backend keeps it
// until none is queued.
func (p *peer) Drop(key uint32) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if p.queued > 0 {
		p.laterDrops = append(p.laterDrops, key)
		return
	}
	p.Peer.Drop(key)
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	p.b.mu.Lock()
	f := p.b.flights[tag]
	passOn := f != nil && f.p == p && f.state == submitted
	if f != nil && f.p == p {
		f.release(driver.ErrAborted)
	}
	p.b.mu.Unlock()
	if passOn {
		p.Peer.Cancel(tag)
	}
}

// watch releases the flights that nothing else completes when the other side dies.
func (p *peer) watch(lost <-chan struct{}) {
	select {
	case <-p.shutCh:
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

// end stops the connection from accepting batches, and releases its flights.
// Preconditions: b.mu is held.
func (p *peer) end(why error) {
	if !p.closed && !p.lost {
		close(p.shutCh)
	}
	p.closed = p.closed || why == driver.ErrClosed
	p.lost = p.lost || why == driver.ErrPeerLost
	for _, f := range p.flights() {
		f.release(why)
	}
}

// flap loses the connection: no other is made to the address for a while. A task closes the wrapped
// connection, since Submit must not wait for that. Preconditions: b.mu is held.
func (p *peer) flap(d time.Duration) {
	b, now := p.b, time.Now()
	maps.DeleteFunc(b.flapped, func(_ string, until time.Time) bool { return until.Before(now) })
	b.flapped[p.addr] = now.Add(d)
	p.end(driver.ErrPeerLost)
	b.tasks.Go(func() { _ = p.Peer.Close() })
}

// Close implements driver.Peer.
func (p *peer) Close() error {
	b := p.b
	b.mu.Lock()
	p.end(driver.ErrClosed)
	b.mu.Unlock()
	err := p.Peer.Close()
	p.awaitSubmits()
	b.mu.Lock()
	delete(b.peers, p)
	b.mu.Unlock()
	return err
}

// awaitSubmits waits until no flight of an ended connection is submitting.
func (p *peer) awaitSubmits() {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for slices.ContainsFunc(p.flights(), func(f *flight) bool { return f.state == submitting }) {
		b.submitEnded.Wait()
	}
}

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	return fmt.Sprintf("%s; behind %d fault rules", p.Peer.Explain(localKey, remoteKey),
		len(p.b.rules))
}
