// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// prepareHop fills a transfer with what the step moves.
func (s *slot) prepareHop(to step) (*Transfer, error) {
	switch {
	case to == atAsk:
		t, err := renewTransfer(&s.by, s.sp.p, Write, Route{Only: s.c.by.caps.Name})
		if err != nil {
			return nil, err
		}
		return t, s.tell(t, exchange.IsGet)
	case s.c.far:
		return s.prepareFar()
	}
	t, err := renewTransfer(&s.by, s.sp.p, s.job.op, Route{Only: s.c.by.caps.Name,
		Durable: s.job.durable})
	if err != nil {
		return nil, err
	}
	return t, s.addScattered(t, s.to, false)
}

// prepareNear goes by the engine's own peer, to which the local memory is remote.
func (s *slot) prepareNear(self *Peer) (*Transfer, error) {
	op := Read
	if s.job.op == Read {
		op = Write
	}
	own, err := s.local.own(self)
	if err != nil {
		return nil, err
	}
	t, err := renewTransfer(&s.near, self, op, Route{Only: s.c.near.caps.Name})
	if err != nil {
		return nil, err
	}
	return t, s.addScattered(t, own, true)
}

// prepareFar moves between here and the peer's slot; a write tells the peer then.
func (s *slot) prepareFar() (*Transfer, error) {
	t, err := renewTransfer(&s.by, s.sp.p, s.job.op, Route{Only: s.c.by.caps.Name})
	if err != nil {
		return nil, err
	}
	if s.c.near != nil {
		err = t.Add(s.pool.region, s.at, s.window().remote, s.at, s.bytes)
	} else {
		err = s.addStraight(t)
	}
	if err == nil && s.job.op == Write {
		err = s.tell(t, exchange.IsPut)
	}
	return t, err
}

// window is the peer's staging memory, as the lane of the piece reaches it.
func (s *slot) window() *farWindow { return s.sp.there[s.c.by] }

// addScattered lists the piece between the slot, where it lies in one, and a memory of the
// given side.
func (s *slot) addScattered(t *Transfer, m *Remote, local bool) error {
	if s.paged {
		p := s.pages
		if local {
			p.Remote = p.Local
		}
		p.Local = Side{Base: s.at, Stride: p.Run}
		return t.AddPattern(s.pool.region, m, p)
	}
	at := s.at
	for i := range s.descs {
		d := &s.descs[i]
		off := d.Remote
		if local {
			off = d.Local
		}
		if err := t.Add(s.pool.region, at, m, off, d.Len); err != nil {
			return err
		}
		at += d.Len
	}
	return nil
}

// addStraight lists the piece between local DRAM and the peer's slot.
func (s *slot) addStraight(t *Transfer) error {
	far := s.window().remote
	if s.paged {
		p := s.pages
		p.Remote = Side{Base: s.at, Stride: p.Run}
		return t.AddPattern(s.local.region, far, p)
	}
	at := s.at
	for i := range s.descs {
		if err := t.Add(s.local.region, s.descs[i].Local, far, at, s.descs[i].Len); err != nil {
			return err
		}
		at += s.descs[i].Len
	}
	return nil
}

// tell has the list follow, and the message that asks for the peer's hop.
func (s *slot) tell(t *Transfer, what byte) error {
	if err := s.makeNotice(); err != nil {
		return err
	}
	at := s.at + pieceBytes
	list := s.pool.region.Bytes()[at:][:exchange.ListBytes]
	h := exchange.Hop{Slot: uint16(s.index), Number: s.number,
		Token: s.to.tokens[s.sp.s.lane.index], Durable: s.job.durable}
	n := uint64(0)
	if s.paged {
		n = h.ListEntries(list, &s.pages)
	} else {
		n = h.ListDescs(list, s.descs)
	}
	if n > 0 {
		if err := t.Add(s.pool.region, at, s.window().remote, at, n); err != nil {
			return err
		}
	}
	s.message = h.Append(append(s.message[:0], what))
	t.attachFrame(s.message)
	return nil
}

// makeNotice has a withdrawal's transfer there before the peer may need one: later the program may
// have all that there may be.
func (s *slot) makeNotice() error {
	if s.notice != nil {
		if s.notice.route.Only == s.c.by.caps.Name {
			return nil
		}
		if err := s.notice.Close(); err != nil { // that of an earlier piece is on its way
			return fmt.Errorf("withdrawal: %w", err)
		}
		s.notice = nil
	}
	t, err := s.sp.s.e.NewTransfer(s.sp.p, Write, Route{Only: s.c.by.caps.Name})
	if err != nil {
		return fmt.Errorf("withdrawal: %w", err)
	}
	t.hook = func() { s.sp.loop.push(&noticeSent{s}) }
	s.notice = t
	return nil
}

// withdraw asks the peer not to make its hop, or to end it [withdraw]. Its answer follows all the
// same.
func (s *slot) withdraw() {
	if s.notice != nil && s.notice.look().underWay() {
		s.again = true // that of an earlier piece, or the peer takes nothing now
		return
	}
	s.again = false
	h := exchange.Hop{Slot: uint16(s.index), Number: s.number}
	s.notice.attachFrame(h.AppendName([]byte{exchange.IsWithdrawn}))
	_ = s.notice.Post()
}

// noticeSent is the end of a withdrawal's way. One for another piece may have to follow.
type noticeSent struct{ s *slot }

func (n *noticeSent) happen() {
	if s := n.s; s.again && s.job != nil && s.step == atHand {
		s.withdraw()
	}
}

// ownOp is the direction of a hop between staging memory, which is local to it, and memory
// of the engine's own peer.
func ownOp(what byte) driver.Op {
	if what == exchange.IsPut {
		return Write
	}
	return Read
}
