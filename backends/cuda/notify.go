// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"github.com/sluicehq/sluice/backends"
)

// letter is a message or a count that waits for its data and for the letters before it.
type letter struct {
	data    []byte
	counts  bool
	counter uint32
	done    bool
	err     error
}

// letterOf holds a copy of a message; nil is none.
func letterOf(msg []byte) *letter {
	if msg == nil {
		return nil
	}
	return &letter{data: append([]byte{}, msg...)}
}

// promise takes a place in the receiver and in the order of this peer.
func (p *peer) promise(l *letter) error {
	if l == nil {
		return nil
	}
	for p.to.promised.Add(1) > int64(p.to.cfg.BatchesMax) {
		p.to.promised.Add(-1)
		p.from.starved.Store(true) // and look again: a place may have come free before
		if p.to.promised.Load() >= int64(p.to.cfg.BatchesMax) {
			return backends.ErrFull
		}
	}
	p.lettersMu.Lock()
	p.letters = append(p.letters, l)
	p.lettersMu.Unlock()
	return nil
}

// post marks a letter and delivers all that no longer wait for an earlier one.
func (p *peer) post(l *letter, err error) {
	if l == nil {
		return
	}
	p.lettersMu.Lock()
	defer p.lettersMu.Unlock()
	l.done, l.err = true, err
	for len(p.letters) > 0 && p.letters[0].done {
		head := p.letters[0]
		p.letters = p.letters[1:]
		switch {
		case head.err != nil:
			p.to.forget(1)
		case head.counts:
			p.to.count(head.counter)
			p.to.forget(1) // no message waits
		default:
			p.to.deliver(backends.Message{From: p.from.addr, Data: head.data})
		}
	}
}

func (b *Backend) deliver(m backends.Message) {
	b.inboxMu.Lock()
	b.inbox = append(b.inbox, m)
	b.inboxMu.Unlock()
	b.signal()
}

// Receive implements backends.Receiver.
func (b *Backend) Receive(msgs []backends.Message) (int, error) {
	b.inboxMu.Lock()
	n := copy(msgs, b.inbox)
	b.inbox = b.inbox[:copy(b.inbox, b.inbox[n:])]
	b.inboxMu.Unlock()
	kept := 0
	for _, m := range msgs[:n] {
		if m.Err == nil {
			kept++ // the last word of a peer had no promise
		}
	}
	if kept > 0 {
		b.forget(kept)
	}
	if n == 0 && b.closed.Load() {
		return 0, backends.ErrClosed
	}
	return n, nil
}

// forget gives places back and wakes the senders that found none.
func (b *Backend) forget(n int) {
	b.promised.Add(int64(-n))
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.senders {
		if p.from.starved.CompareAndSwap(true, false) {
			p.from.news.Store(true)
			p.from.signal()
		}
	}
}
