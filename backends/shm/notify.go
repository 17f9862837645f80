// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// A ring of a connection page carries messages in the order of submission. An
// entry is a head word and the bytes, in multiples of 8. The head word is zero
// until the data that the message belongs to is placed; the receiver stops there,
// which gives the order. It zeroes what it has read, so that no head word of an
// earlier lap is ever taken for one.
const (
	entryData = 1 + iota // a message
	entrySkip            // its data failed: it is not delivered
	entryPad             // the rest of the ring is too short: go on at its start
)

const entryHead = 8

func entryWord(state, n uint64) uint64 { return state<<56 | n }

func entryBytes(n int) uint64 { return entryHead + (uint64(n)+7)&^7 }

// ring is one of the two of a connection page, seen from either end.
type ring struct {
	mem                  []byte
	armed, waiting, head *atomic.Uint64
}

// ringOf returns ring 0, to the owner, or ring 1, from it.
func ringOf(page []byte, n uint64) ring {
	size := (uint64(len(page)) - ringAt) / 2
	at := n * ringWords
	return ring{mem: page[ringAt+n*size:][:size:size], armed: word(page, pageArmedAt+at),
		waiting: word(page, pageWaitingAt+at), head: word(page, pageHeadAt+at)}
}

// entry is room that was reserved; the zero value is none.
type entry struct {
	at  uint64 // in the ring
	n   uint64 // bytes of the message
	set bool
}

// sender is the end of a ring that writes. Nothing that it reads there is believed.
type sender struct {
	ring
	mu   sync.Mutex
	tail uint64
}

// reserve takes room for a message and puts the bytes there, unseen yet.
func (s *sender) reserve(msg []byte) (entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size, need := uint64(len(s.mem)), entryBytes(len(msg))
	at := s.tail % size
	pad := uint64(0)
	if at+need > size {
		pad = size - at
	}
	if !s.fits(pad + need) {
		s.waiting.Swap(1) // pairs with the exchange in receiver.receive
		if !s.fits(pad + need) {
			return entry{}, driver.ErrFull
		}
	}
	if pad > 0 {
		word(s.mem, at).Store(entryWord(entryPad, pad))
		at = 0
	}
	copy(s.mem[at+entryHead:], msg)
	s.tail += pad + need
	return entry{at: at, n: uint64(len(msg)), set: true}, nil
}

func (s *sender) fits(need uint64) bool {
	used := s.tail - s.head.Load()
	size := uint64(len(s.mem))
	return used <= size && need <= size-used // a wild head reads as a full ring
}

// show lets the receiver see a message, or skip its place. The data before it is out by
// then. It reports whether the receiver is to be woken.
func (s *sender) show(e entry, ok bool) (wake bool) {
	state := uint64(entrySkip)
	if ok {
		state = entryData
	}
	word(s.mem, e.at).Swap(entryWord(state, e.n)) // pairs with the look in arm
	return s.sleeps()
}

// sleeps reports, once for each arm, whether the receiver is to be woken.
func (s *sender) sleeps() bool { return s.armed.Load() != 0 && s.armed.Swap(0) != 0 }

// receiver is the end of a ring that reads. Everything there is the peer's to write, so
// nothing is believed before it is checked. Its owner has a lock for it.
type receiver struct {
	ring
	at      uint64 // what was read of the ring
	corrupt bool
}

// receive takes messages, of at most one lap: places that carry nothing are no reason to go on for
// ever. It reports whether the sender waits for the room.
func (r *receiver) receive(conn uint64, msgs []driver.Message) (n int, wake bool) {
	before := r.at
	for n < len(msgs) && r.at-before < uint64(len(r.mem)) && !r.corrupt {
		data, ok := r.next()
		if !ok {
			break
		}
		if data != nil {
			msgs[n] = driver.Message{Conn: conn, Data: data}
			n++
		}
	}
	if r.at != before {
		r.head.Swap(r.at) // pairs with the look in sender.reserve
		wake = r.waiting.Load() != 0 && r.waiting.Swap(0) != 0
	}
	return n, wake
}

// next reads the next entry. ok is false when none is there; data is nil for a
// place that carries nothing.
func (r *receiver) next() (data []byte, ok bool) {
	size := uint64(len(r.mem))
	at := r.at % size
	w := word(r.mem, at).Load()
	if w == 0 {
		return nil, false
	}
	state, n := w>>56, w&(1<<56-1)
	room := entryBytes(int(min(n, size)))
	switch {
	case state == entryPad && n == size-at:
		clear(r.mem[at:])
		r.at += n
		return nil, true
	case (state == entryData || state == entrySkip) && n <= messageMax && at+room <= size:
	default:
		r.corrupt = true
		return nil, false
	}
	if state == entryData {
		data = make([]byte, n)
		copy(data, r.mem[at+entryHead:])
	}
	clear(r.mem[at : at+room])
	r.at += room
	return data, true
}

// arm asks the sender for a wake-up, and reports whether something is there already.
func (r *receiver) arm() bool {
	r.armed.Swap(1) // pairs with the load in sleeps, after the head word
	return !r.corrupt && word(r.mem, r.at%uint64(len(r.mem))).Load() != 0
}

// Receive implements driver.Backend. It takes from each connection in turn, and
// begins with another one each time.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.closed.Load() {
		return 0, driver.ErrClosed
	}
	accepted, dialled := *b.inbound.Load(), *b.peers.Load()
	all, n := len(accepted)+len(dialled), 0
	for i := range all {
		if n == len(msgs) {
			break
		}
		at := (b.turn + i) % all
		if at >= len(accepted) {
			n += dialled[at-len(accepted)].receive(msgs[n:])
			continue
		}
		c := accepted[at]
		n += c.receive(msgs[n:])
		if c.finished() {
			b.forget(c)
		}
	}
	b.turn++
	return n, nil
}

// receive takes notifications of one peer, and at the end the news that it is lost.
func (c *inbound) receive(msgs []driver.Message) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return 0
	}
	n, wake := c.in.receive(c.conn, msgs)
	if wake && c.event >= 0 {
		signal(c.event)
	}
	if c.in.corrupt {
		c.drop()
	}
	if n < len(msgs) && c.gone && !c.lossReported {
		c.lossReported = true
		msgs[n] = driver.Message{Conn: c.conn, Err: driver.ErrPeerLost}
		n++
	}
	return n
}

// arm asks the peer for a wake-up, and reports whether something is there already.
func (c *inbound) arm() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return false
	}
	return c.in.arm() || c.gone && !c.lossReported
}

// receive takes answers of the owner.
func (p *peer) receive(msgs []driver.Message) int {
	p.answerMu.Lock()
	defer p.answerMu.Unlock()
	if p.answers.mem == nil {
		return 0
	}
	n, wake := p.answers.receive(p.conn, msgs)
	if wake {
		signal(p.event)
	}
	if p.answers.corrupt {
		_ = p.sock.Close() // the reader ends by it, and the peer is lost
	}
	return n
}

func (p *peer) arm() bool {
	p.answerMu.Lock()
	defer p.answerMu.Unlock()
	return p.answers.mem != nil && p.answers.arm()
}

// Answer implements driver.Backend: it goes by the second ring of the connection.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if b.closed.Load() {
		return driver.ErrClosed
	}
	if len(msg) > messageMax {
		return fmt.Errorf("answer of %d bytes, at most %d: %w", len(msg), messageMax,
			driver.ErrBounds)
	}
	list := *b.inbound.Load() // in the order of their numbers
	i, ok := slices.BinarySearchFunc(list, conn, func(c *inbound, conn uint64) int {
		return int(int64(c.conn - conn))
	})
	if !ok {
		return driver.ErrPeerLost
	}
	return list[i].answer(msg)
}

func (c *inbound) answer(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.gone || c.event < 0 {
		return driver.ErrPeerLost
	}
	e, err := c.out.reserve(msg)
	if err != nil {
		return err
	}
	if c.out.show(e, true) {
		signal(c.event)
	}
	return nil
}
