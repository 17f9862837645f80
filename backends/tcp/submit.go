// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return can }

const can = driver.CanPattern | driver.CanNotify

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(can); err != nil {
		return err
	}
	if !p.entry.Enter() {
		return driver.ErrClosed
	}
	defer p.entry.Exit()
	if p.dead.Load() {
		return driver.ErrPeerLost
	}
	if b.Tail == driver.NotifyTail && len(b.Notify) > p.notifMax {
		return fmt.Errorf("notification of %d bytes, at most %d: %w",
			len(b.Notify), p.notifMax, driver.ErrBounds)
	}
	if !p.b.done.Take() {
		return driver.ErrFull
	}
	x := p.b.batches.take()
	x.tag = tag
	err := x.take(p, b)
	if err == nil {
		err = p.begin(x)
	}
	if err != nil {
		p.b.batches.give(x)
		p.b.done.GiveBack()
	}
	return err
}

// begin puts a batch in its queue and has it sent.
func (p *peer) begin(x *batch) error {
	large := x.bytes > inlineMax
	p.mu.Lock()
	if p.failed {
		p.mu.Unlock()
		return driver.ErrPeerLost
	}
	if x.tail == driver.NotifyTail {
		if p.credit == 0 {
			p.starved = true
			p.mu.Unlock()
			return driver.ErrFull
		}
		p.credit--
		p.messages++
		x.number = p.messages
	}
	p.lastID++
	x.id = p.lastID
	p.byTag[x.tag] = x
	if large {
		p.large.push(x)
	} else {
		p.small.push(x)
	}
	p.mu.Unlock()
	if !large {
		p.conns[express].kick(false)
		return nil
	}
	for _, c := range p.carriers() {
		c.kick(true)
	}
	return nil
}

// carriers are the connections for large batches.
func (p *peer) carriers() []*conn {
	if len(p.conns) > bulk {
		return p.conns[bulk:]
	}
	return p.conns[express:]
}

// Cancel implements driver.Peer. What is on its way comes to its end: that it is
// acknowledged proves that nothing more of it lands.
func (p *peer) Cancel(tag uint64) {
	p.mu.Lock()
	x := p.byTag[tag]
	if x == nil {
		p.mu.Unlock()
		return
	}
	if x.op == driver.Read {
		x.dropped.Store(true)
		p.drop(x, driver.ErrAborted)
	} else if x.queue != nil {
		p.drop(x, driver.ErrAborted)
	}
	over := p.settled(x)
	p.mu.Unlock()
	if over {
		p.finishBatch(x)
	}
	p.conns[express].kickAnswers()
}

// drop takes a batch out of its queue for a reason; p.mu is held. The owner is told that no
// notification follows.
func (p *peer) drop(x *batch, why error) {
	if x.err == nil {
		x.err = why
	}
	if x.queue == nil {
		return
	}
	x.queue.remove(x)
	p.voidNotif(x)
}

// voidNotif takes a notification back that was not sent; p.mu is held.
func (p *peer) voidNotif(x *batch) {
	if x.tail == driver.NoTail {
		return
	}
	p.credit++ // no message takes the place that was reserved
	x.tail = driver.NoTail
	h := header{kind: kindVoid, count: x.sent, batch: x.id, ticket: x.number}
	p.conns[express].post(&h, nil)
}

// settled takes a batch that is over out of the in-flight table; p.mu is held.
func (p *peer) settled(x *batch) bool {
	if x.queue != nil || x.flying > 0 {
		return false
	}
	if p.byTag[x.tag] != x {
		return false // another goroutine has
	}
	delete(p.byTag, x.tag)
	return true
}

// finishBatch completes a batch that was settled.
func (p *peer) finishBatch(x *batch) {
	tag, err := x.tag, x.err
	p.b.batches.give(x) // before its place in done comes free
	p.b.done.Push(tag, err)
	p.b.wake()
}
