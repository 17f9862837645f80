// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// A ring of a connection page carries messages in the order of submission. An entry is a head word
// and the message, in multiples of 8 bytes. The sender leaves the head word zero until the data
// that the message follows is placed. The receiver stops at such an entry, which gives the order.
// It zeroes each entry that it has read, so that it never takes bytes of an earlier lap for a head
// word.
const (
	entryData = 1 + iota // a message
	entrySkip            // a message whose data failed: the receiver does not deliver it
	entryPad             // the rest of the ring is too short: the next entry is at its start
)

const entryHead = 8

func entryWord(state, n uint64) uint64 { return state<<56 | n }

func entryBytes(n int) uint64 { return entryHead + (uint64(n)+7)&^7 }

// ring is one of the two rings of a connection page, as either end sees it.
type ring struct {
	mem                  []byte
	armed, waiting, head *atomic.Uint64
}

// ringOf returns ring n of a page: 0 carries messages to the owner, 1 from it.
func ringOf(page []byte, n uint64) ring {
	size := (uint64(len(page)) - ringAt) / 2
	at := n * ringWords
	return ring{mem: page[ringAt+n*size:][:size:size], armed: word(page, pageArmedAt+at),
		waiting: word(page, pageWaitingAt+at), head: word(page, pageHeadAt+at)}
}

// entry is the place of a message in a ring. The zero value is none.
type entry struct {
	at    uint64 // offset in the ring
	n     uint64 // bytes of the message
	valid bool
}

// sender is the writing end of a ring. It checks all that it reads there: the peer writes, too.
type sender struct {
	ring
	mu   sync.Mutex
	tail uint64 // bytes that were reserved since the start
}

// reserve makes an entry and copies the message into it. The receiver does not see it before
// publish.
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
	return entry{at: at, n: uint64(len(msg)), valid: true}, nil
}

func (s *sender) fits(need uint64) bool {
	used := s.tail - s.head.Load()
	size := uint64(len(s.mem))
	return used <= size && need <= size-used // an impossible head counts as a full ring
}

// publish makes an entry visible to the receiver, as a message if ok, and else as one to skip. The
// data that the message follows is placed by then. It reports whether the caller must wake the
// receiver.
func (s *sender) publish(e entry, ok bool) (wake bool) {
	state := uint64(entrySkip)
	if ok {
		state = entryData
	}
	word(s.mem, e.at).Swap(entryWord(state, e.n)) // pairs with the load in receiver.arm
	return s.mustWake()
}

// mustWake reports whether the receiver sleeps and must be woken, once for each of its arms.
func (s *sender) mustWake() bool { return s.armed.Load() != 0 && s.armed.Swap(0) != 0 }

// receiver is the reading end of a ring. The peer may write anything there at any time, so all is
// checked. The structure that has the receiver has a lock for it.
type receiver struct {
	ring
	at      uint64 // bytes that were read since the start
	corrupt bool   // the peer broke the format
}

// receive reads messages, from at most one lap of the ring: a peer that keeps adding entries to
// skip must not hold the caller up. wake reports whether the sender waits for the room that is free
// now.
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
		r.head.Swap(r.at) // pairs with the load in sender.fits, behind waiting
		wake = r.waiting.Load() != 0 && r.waiting.Swap(0) != 0
	}
	return n, wake
}

// next reads the next entry. ok is false when none is visible yet; data is nil for an entry without
// a message to deliver.
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

// arm asks the sender for a wake-up, and reports whether an entry is visible already.
func (r *receiver) arm() bool {
	r.armed.Swap(1) // pairs with the load in sender.mustWake, behind the head word
	return !r.corrupt && word(r.mem, r.at%uint64(len(r.mem))).Load() != 0
}

// Receive implements driver.Backend. It goes through the connections once, and each call begins
// with another one.
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
			b.removeInbound(c)
		}
	}
	b.turn++
	return n, nil
}

// receive returns notifications of one peer, and behind the last one the loss of the peer.
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
		c.hangUp()
	}
	if n < len(msgs) && c.gone && !c.lossReported {
		c.lossReported = true
		msgs[n] = driver.Message{Conn: c.conn, Err: driver.ErrPeerLost}
		n++
	}
	return n
}

// arm asks the peer for a wake-up, and reports whether Receive has something to return already.
func (c *inbound) arm() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return false
	}
	return c.in.arm() || c.gone && !c.lossReported
}

// receive returns answers of the owner.
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
		_ = p.sock.Close() // which ends readMessages, and the peer is lost
	}
	return n
}

func (p *peer) arm() bool {
	p.answerMu.Lock()
	defer p.answerMu.Unlock()
	return p.answers.mem != nil && p.answers.arm()
}

// Answer implements driver.Backend. The answer goes over the second ring of the connection.
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
	if c.out.publish(e, true) {
		signal(c.event)
	}
	return nil
}
