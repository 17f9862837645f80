// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// slot is a place of the staging memory and the piece that passes through it. spec/chain.pml is
// a model of how it ends; words in brackets, here and in window_hop.go, are its steps.
type slot struct {
	sp    *stagedPeer
	pool  *pool
	index int
	at    uint64 // offset in the pool, and in the peer's

	// The piece.
	job   *stagedJob // nil: free
	c     chain
	local *stagedMemory
	to    *Remote
	descs []driver.Desc
	pages driver.Pattern
	paged bool
	bytes uint64

	step     step
	answered bool // the peer has made its hop, or refused
	answer   error
	number   uint32 // of the piece, in messages
	stuck    bool   // takes no more pieces: the peer owes an answer
	lost     bool   // nor this, and a hop was given up: a backend may still use the bytes

	near, by [2]*Transfer // by Op-1
	notice   *Transfer    // withdraws the piece
	again    bool         // it was still on its way for another
	current  *Transfer
	message  []byte
	hook     func()
}

// step is what a piece waits for.
type step uint8

// A write goes near, by, hand; a read ask, hand, by, near: each where the chain has it.
const (
	atRest step = iota
	atNear      // local memory and staging memory
	atAsk       // the list is on its way to the peer
	atHand      // the peer has it in hand
	atBy        // staging memory, or local DRAM, and the peer
)

func newSlot(sp *stagedPeer, pool *pool, i int) *slot {
	s := &slot{sp: sp, pool: pool, index: i, at: uint64(i) * slotBytes}
	s.hook = func() { sp.loop.push(s) }
	return s
}

// isMoving reports whether the end of a piece is still to come.
func (s *slot) isMoving() bool { return s.job != nil && !s.lost }

// take cuts the next piece off a batch.
func (s *slot) take(j *stagedJob, c chain) {
	local, to := j.ends()
	s.local, s.to = local, to.Remote
	s.job, s.c, s.paged, s.bytes = j, c, j.paged, 0
	s.answered, s.answer = false, nil
	s.number++
	j.flying++
	if j.paged {
		s.takePages(j)
		return
	}
	first, n := &j.descs[0], 0
	for n < len(j.descs) && n < exchange.DescsMax {
		d := &j.descs[n]
		if d.LocalKey != first.LocalKey || d.RemoteKey != first.RemoteKey ||
			s.bytes+d.Len > pieceBytes {
			break
		}
		s.bytes += d.Len
		n++
	}
	s.descs, j.descs = j.descs[:n:n], j.descs[n:]
}

func (s *slot) takePages(j *stagedJob) {
	n := min(j.pages.Count, int(pieceBytes/j.pages.Run), exchange.IndicesMax)
	if s.pages = j.pages; n < j.pages.Count {
		s.pages = cutPattern(&j.pages, n)
	} else {
		j.pages.Count = 0
	}
	s.bytes = s.pages.Bytes()
}

// begin makes the first hop.
func (s *slot) begin() {
	switch {
	case s.job.op == Write && s.c.near != nil:
		s.hop(atNear)
	case s.job.op == Read && s.c.far:
		s.hop(atAsk)
	default:
		s.hop(atBy)
	}
}

// happen is the end of a hop.
func (s *slot) happen() {
	if s.current == nil {
		return
	}
	t := s.current
	if !t.Done() {
		return // the event of an earlier post
	}
	if t.isUnproven() {
		// Its bytes are no longer ours to give, nor is the batch ours to complete: the
		// engine gives that up, too.
		s.lost, s.current = true, nil
		s.sp.feed()
		return
	}
	s.current = nil
	err := t.Err()
	_ = t.Reset()
	if err != nil {
		s.failed(fmt.Errorf("%s: %w", s.hopName(), err))
		return
	}
	s.proceed()
}

// failed ends the piece [acknowledgement], unless the peer may have been asked to place it: over a
// connection that was lost, or is lost now, the message of a batch that failed may have arrived.
// Only the peer knows, so it is asked to make no such hop.
func (s *slot) failed(err error) {
	if s.step != atBy || s.job.op != Write || !s.c.far || s.answered {
		s.finish(err)
		return
	}
	s.job.fail(err)
	s.await()
}

// proceed makes the next hop, or ends the piece.
func (s *slot) proceed() {
	write := s.job.op == Write
	switch s.step {
	case atNear:
		if write {
			s.hop(atBy)
			return
		}
	case atAsk:
		s.await()
		return
	case atHand:
		if s.answer != nil {
			s.finish(fmt.Errorf("the peer's hop, dram to %v: %w", s.to.kind, s.answer))
			return
		}
		if !write {
			s.hop(atBy)
			return
		}
	case atBy:
		if write && s.c.far {
			s.await()
			return
		}
		if !write && s.c.near != nil {
			s.hop(atNear)
			return
		}
	}
	s.finish(nil)
}

// await waits for the peer's answer [hand], which may be here already.
func (s *slot) await() {
	s.step = atHand
	switch {
	case s.answered:
		s.proceed()
	case s.sp.p.conns[s.c.by.index].isLost():
		s.giveUp(true) // carrierLost may have been here before us
	case s.sp.forced:
		s.giveUp(false)
	case s.job.err != nil:
		s.stop()
	}
}

// hop starts one, unless the batch has ended meanwhile.
func (s *slot) hop(to step) {
	s.step = to
	switch {
	case s.job.err != nil:
		s.finish(nil)
	case to == atNear:
		number := s.number
		s.sp.local.get(s.c.near, func(self *Peer, err error) {
			if s.job == nil || s.number != number {
				return // given up meanwhile
			}
			s.hopNear(self, err)
		})
	default:
		s.post(s.prepareHop(to))
	}
}

func (s *slot) hopNear(self *Peer, err error) {
	switch {
	case s.job.err != nil:
		s.finish(nil)
	case err != nil:
		s.post(nil, err)
	default:
		s.post(s.prepareNear(self))
	}
}

// post starts the hop for which t is filled.
func (s *slot) post(t *Transfer, err error) {
	if err == nil {
		t.hook = s.hook
		s.current = t
		err = t.Post()
	}
	if err != nil {
		s.current = nil
		if t != nil {
			_ = t.Reset()
		}
		s.finish(fmt.Errorf("%s: %w", s.hopName(), err))
	}
}

// finish frees the slot.
func (s *slot) finish(err error) {
	j := s.job
	if err != nil {
		j.fail(err)
	}
	s.job, s.step, s.local, s.to, s.descs, s.pages = nil, atRest, nil, nil, nil, driver.Pattern{}
	j.flying--
	if !j.more() {
		s.sp.settle(j)
	}
	s.sp.feed()
}

// stop ends the hop that is under way: the event of its end follows.
func (s *slot) stop() {
	switch {
	case s.current != nil:
		s.current.stop(s.current.look().generation(), ErrAborted)
	case s.step == atHand:
		s.withdraw()
	}
}

// giveUp waits for the peer's answer no longer [giveUp]. What it has in hand of a write it may
// still place; of a read, in staging memory of its own. Where the connection is lost that memory is
// used no more: the next piece goes by another's.
func (s *slot) giveUp(carrierLost bool) {
	if s.lost {
		return // a backend has a hop of it still
	}
	if s.job != nil && s.step == atNear && s.current == nil {
		s.finish(ErrClosed) // it waits for a local Peer
		return
	}
	if s.job == nil || s.step != atHand {
		return
	}
	s.stuck = !carrierLost // the peer has the place in hand
	if s.job.op == Write {
		s.job.unanswered++
	}
	s.finish(ErrPeerLost)
}

// close gives the transfers back. It reports false when a backend may still use the bytes.
func (s *slot) close() bool {
	for _, t := range []*Transfer{s.near[0], s.near[1], s.by[0], s.by[1]} {
		if t != nil && (t.Close() != nil || t.isUnproven()) {
			s.lost = true
		}
	}
	return s.current == nil && !s.lost
}

func (s *slot) hopName() string {
	switch s.step {
	case atNear:
		return fmt.Sprintf("hop between %v and dram with %s", s.local.region.Kind(),
			s.c.near.caps.Name)
	case atAsk:
		return "request to the peer with " + s.c.by.caps.Name
	}
	return "hop between here and the peer with " + s.c.by.caps.Name
}
