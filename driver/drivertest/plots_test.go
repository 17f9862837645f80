// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// changed returns a batch with a change to each descriptor.
func changed(b *driver.Batch, f func(*driver.Desc)) *driver.Batch {
	c := copied(b)
	for i := range c.Descs {
		f(&c.Descs[i])
	}
	return &c
}

// tailOf is a batch of the tail alone.
func tailOf(b *driver.Batch) *driver.Batch {
	c := copied(b)
	c.Descs, c.Pattern = nil, nil
	return &c
}

// bytesOf is a batch without its tail.
func bytesOf(b *driver.Batch) *driver.Batch {
	c := copied(b)
	c.Tail, c.Notify = driver.NoTail, nil
	return &c
}

// empty is a message without bytes, which moves nothing.
func empty() *driver.Batch { return &driver.Batch{Op: driver.Write, Tail: driver.NotifyTail} }

// pollStash delivers what was put aside, and then what is real.
func pollStash(b *saboteur, done []driver.Completion) (int, error) {
	b.mu.Lock()
	n := copy(done, b.stash)
	b.stash = b.stash[n:]
	b.mu.Unlock()
	if n > 0 {
		return n, nil
	}
	return b.Backend.Poll(done)
}

// put adds to the stash.
func (b *saboteur) put(c driver.Completion) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stash = append(b.stash, c)
}

// unpolled is true while work of some saboteur waits to be polled.
var unpolled atomic.Bool

// repeat and repeated keep a message to be received once more.
func (b *saboteur) repeat(m driver.Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.again = append(b.again, m)
}

func (b *saboteur) repeated() (m driver.Message, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.again) == 0 {
		return m, false
	}
	m, b.again = b.again[0], b.again[1:]
	return m, true
}

// atPoll keeps what is to be done in the next Poll.
func (b *saboteur) atPoll(f func() error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lazy = append(b.lazy, f)
}

// pollLazily begins what was put off.
func pollLazily(b *saboteur, done []driver.Completion) (int, error) {
	b.mu.Lock()
	lazy := b.lazy
	b.lazy = nil
	b.mu.Unlock()
	for _, f := range lazy {
		_ = f()
	}
	return b.Backend.Poll(done)
}

// stuck reports whether the count of every has come past 100 once.
func (b *saboteur) stuck() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count > 100
}

func remembered(p *saboteurPeer, tag uint64, b *driver.Batch) error {
	p.remember(tag, b)
	return p.Peer.Submit(tag, b)
}

// kept never begins a batch, and cancelKept ends it: a batch that is under way may end well before
// it is cancelled, and a misdeed that follows an abort would have nothing to do.
func kept(p *saboteurPeer, tag uint64, b *driver.Batch) error {
	p.remember(tag, b)
	return nil
}

func cancelKept(p *saboteurPeer, tag uint64) {
	p.b.put(driver.Completion{Tag: tag, Err: driver.ErrAborted})
}

// landAborted lets bytes of aborted and closed batches land a little later.
func landAborted(b *saboteur, done []driver.Completion) (int, error) {
	return pollAnd(b, done, func(c driver.Completion, f flight) {
		if errors.Is(c.Err, driver.ErrAborted) || errors.Is(c.Err, driver.ErrClosed) {
			b.later(8*time.Millisecond, f.land)
		}
	})
}

// landFailed does it with every batch that failed.
func landFailed(b *saboteur, done []driver.Completion) (int, error) {
	return pollAnd(b, done, func(c driver.Completion, f flight) {
		if c.Err != nil {
			b.later(3*time.Millisecond, f.land)
		}
	})
}

// pass notes a stage of a batch and reports whether it is news.
func (b *saboteur) pass(tag uint64, at stages) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	f, ok := b.flights[tag]
	if !ok || f.stages&at != 0 {
		return false
	}
	f.stages |= at
	b.flights[tag] = f
	return true
}

// tags lists the batches that a peer remembers.
func (p *saboteurPeer) tags() (list []uint64) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	for tag, f := range p.b.flights {
		if f.p == p {
			list = append(list, tag)
		}
	}
	return list
}

// landIfBoth lets a batch land a little after both stages, whichever comes last.
func (b *saboteur) landIfBoth(tag uint64, at stages) {
	if !b.pass(tag, at) {
		return
	}
	if f, _ := b.recall(tag); f.stages == helped|ended {
		b.later(8*time.Millisecond, f.land)
	}
}

// notifyFailed sends the messages of batches that failed.
func notifyFailed(b *saboteur, done []driver.Completion) (int, error) {
	return pollAnd(b, done, func(c driver.Completion, f flight) {
		if c.Err != nil && f.Tail == driver.NotifyTail {
			_ = f.p.Peer.Submit(1, tailOf(&f.Batch))
		}
	}, 1)
}

// pollAnd polls, the stash first, and looks at each completion; those of hidden tags are kept back.
func pollAnd(b *saboteur, done []driver.Completion, look func(driver.Completion, flight),
	hide ...uint64) (int, error) {
	n, err := pollStash(b, done)
	kept := 0
	for _, c := range done[:n] {
		if len(hide) > 0 && c.Tag == hide[0] {
			continue
		}
		if f, ok := b.recall(c.Tag); ok {
			look(c, f)
		}
		done[kept] = c
		kept++
	}
	return kept, err
}

// hiddenBit marks tags of a saboteur's own.
const hiddenBit = 1 << 40

// messageFirst sends the message, and the data half a millisecond later.
func messageFirst(p *saboteurPeer, tag uint64, b *driver.Batch) error {
	if len(b.Descs) == 0 {
		return p.Peer.Submit(tag, b)
	}
	if err := p.Peer.Submit(tag^hiddenBit, tailOf(b)); err != nil {
		return err
	}
	data := bytesOf(b)
	p.b.later(500*time.Microsecond, func() {
		for errors.Is(p.Peer.Submit(tag, data), driver.ErrFull) {
			time.Sleep(time.Millisecond)
		}
	})
	return nil
}

// hidden keeps back completions of messageFirst's own tags.
func hidden(b *saboteur, done []driver.Completion) (int, error) {
	n, err := b.Backend.Poll(done)
	kept := 0
	for _, c := range done[:n] {
		if (c.Tag^firstTag)&hiddenBit == 0 {
			done[kept] = c
			kept++
		}
	}
	return kept, err
}

// reuseBytes hands out the same bytes for each message.
func reuseBytes(b *saboteur, msgs []driver.Message) (int, error) {
	n, err := b.Backend.Receive(msgs)
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range n {
		if b.buf == nil {
			b.buf = make([]byte, 1<<16)
		}
		msgs[i].Data = b.buf[:copy(b.buf, msgs[i].Data)]
	}
	return n, err
}
