// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// The ring of a connection page carries messages in the order of submission. An
// entry is a head word and the bytes, in multiples of 8. The head word is zero
// until the data that the message belongs to is placed; the receiver stops there,
// which gives the order. It zeroes what it has read, so that no head word of an
// earlier lap is ever taken for one.
const (
	noteData = 1 + iota // a message
	noteSkip            // its data failed: nobody sees it
	notePad             // the rest of the ring is too short: go on at its start
)

const noteHead = 8

func noteWord(state, n uint64) uint64 { return state<<56 | n }

func noteBytes(n int) uint64 { return noteHead + (uint64(n)+7)&^7 }

// note is an entry that was reserved; the zero value is none.
type note struct {
	at  uint64 // in the ring
	n   uint64 // bytes of the message
	set bool
}

// noteSender is the initiator's end.
type noteSender struct {
	ring []byte
	head *atomic.Uint64 // the receiver's, not to be believed
	wait *atomic.Uint64
	arm  *atomic.Uint64

	mu   sync.Mutex
	tail uint64
}

func (s *noteSender) init(page []byte) {
	s.ring = page[ringAt:]
	s.head, s.wait, s.arm = word(page, pageHeadAt), word(page, pageWaitingAt), word(page, pageArmedAt)
}

// reserve takes room for a message and puts the bytes there, unseen yet.
func (s *noteSender) reserve(msg []byte) (note, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size, need := uint64(len(s.ring)), noteBytes(len(msg))
	at := s.tail % size
	pad := uint64(0)
	if at+need > size {
		pad = size - at
	}
	if !s.fits(pad + need) {
		s.wait.Store(1) // pairs with the exchange in inbound.receive
		if !s.fits(pad + need) {
			return note{}, driver.ErrFull
		}
	}
	if pad > 0 {
		word(s.ring, at).Store(noteWord(notePad, pad))
		at = 0
	}
	copy(s.ring[at+noteHead:], msg)
	s.tail += pad + need
	return note{at: at, n: uint64(len(msg)), set: true}, nil
}

func (s *noteSender) fits(need uint64) bool {
	used := s.tail - s.head.Load()
	size := uint64(len(s.ring))
	return used <= size && need <= size-used // a wild head reads as a full ring
}

// reserveNote takes room in the peer's ring.
func (p *peer) reserveNote(msg []byte) (note, error) { return p.notes.reserve(msg) }

// endNote shows a message to the peer, or lets it skip the place.
func (p *peer) endNote(n note, ok bool) {
	if !n.set {
		return
	}
	state := uint64(noteSkip)
	if ok {
		state = noteData
	}
	word(p.notes.ring, n.at).Store(noteWord(state, n.n)) // the data before it is out by then
	if p.notes.arm.Load() != 0 && p.notes.arm.Swap(0) != 0 {
		signal(p.event)
	}
}
