// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"

	"github.com/sluicehq/sluice/driver"
)

// prepareHop fills a transfer with what the step moves.
func (s *slot) prepareHop(to step) (*Transfer, error) {
	switch {
	case to == atNear:
		return s.prepareNear()
	case to == atAsk:
		t, err := s.transfer(&s.by, s.sp.p, Write, Route{Only: s.c.by.caps.Name})
		if err != nil {
			return nil, err
		}
		return t, s.tell(t, isGet)
	case s.c.far:
		return s.prepareFar()
	}
	t, err := s.transfer(&s.by, s.sp.p, s.job.op, Route{Only: s.c.by.caps.Name, Durable: s.job.durable})
	if err != nil {
		return nil, err
	}
	return t, s.addScattered(t, s.to, false)
}

// prepareNear goes by the engine's own peer, to which the local memory is remote.
func (s *slot) prepareNear() (*Transfer, error) {
	self, err := s.sp.s.e.Self()
	if err != nil {
		return nil, err
	}
	op := Read
	if s.job.op == Read {
		op = Write
	}
	own, err := s.local.own(self)
	if err != nil {
		return nil, err
	}
	t, err := s.transfer(&s.near, self, op, Route{Only: s.c.near.caps.Name})
	if err != nil {
		return nil, err
	}
	return t, s.addScattered(t, own, true)
}

// prepareFar moves between here and the peer's slot; a write tells the peer then.
func (s *slot) prepareFar() (*Transfer, error) {
	t, err := s.transfer(&s.by, s.sp.p, s.job.op, Route{Only: s.c.by.caps.Name})
	if err != nil {
		return nil, err
	}
	if s.c.near != nil {
		err = t.Add(s.pool.region, s.at, s.sp.there.remote, s.at, s.bytes)
	} else {
		err = s.addStraight(t)
	}
	if err == nil && s.job.op == Write {
		err = s.tell(t, isPut)
	}
	return t, err
}

// addScattered lists the piece between the slot, where it lies in one, and a memory of the
// given side.
func (s *slot) addScattered(t *Transfer, m *Remote, local bool) error {
	if s.paged {
		p := Pages{Count: s.pages.Count, EntryLen: s.pages.EntryLen, LocalBase: s.at, LocalStride: s.pages.EntryLen,
			RemoteBase: s.pages.RemoteBase, RemoteStride: s.pages.RemoteStride, Remote: s.pages.Remote}
		if local {
			p.RemoteBase, p.RemoteStride, p.Remote = s.pages.LocalBase, s.pages.LocalStride, s.pages.Local
		}
		return t.AddPages(s.pool.region, m, p)
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
	far := s.sp.there.remote
	if s.paged {
		p := s.pages
		p.RemoteBase, p.RemoteStride, p.Remote = s.at, p.EntryLen, nil
		return t.AddPages(s.local.region, far, p)
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
	at := s.at + pieceBytes
	list := s.pool.region.Bytes()[at:][:listBytes]
	h := farHop{window: s.sp.there.number, slot: uint16(s.index), number: s.number, token: s.to.tokens[s.sp.s.lane.index], durable: s.job.durable}
	n := 0
	if s.paged {
		h.pages = Pages{Count: s.pages.Count, EntryLen: s.pages.EntryLen, RemoteBase: s.pages.RemoteBase, RemoteStride: s.pages.RemoteStride}
		h.paged, h.listed = true, s.pages.Remote != nil
		for i, index := range s.pages.Remote {
			binary.LittleEndian.PutUint32(list[4*i:], index)
		}
		n = 4 * len(s.pages.Remote)
	} else {
		for i := range s.descs {
			binary.LittleEndian.PutUint64(list[listEntry*i:], s.descs[i].Remote)
			binary.LittleEndian.PutUint64(list[listEntry*i+8:], s.descs[i].Len)
		}
		h.count = len(s.descs)
		n = listEntry * h.count
	}
	if n > 0 {
		if err := t.Add(s.pool.region, at, s.sp.there.remote, at, uint64(n)); err != nil {
			return err
		}
	}
	s.message = h.append(appendHead(s.message[:0], s.sp.far, what))
	return t.Notify(s.message)
}

// withdraw asks the peer not to make its hop, or to end it. Its answer follows all the same.
func (s *slot) withdraw() {
	if s.notice != nil && s.notice.state.Load() == posted {
		return // of this piece, or the peer takes nothing
	}
	if s.notice == nil || s.notice.route.Only != s.c.by.caps.Name {
		t, err := s.sp.s.e.NewTransfer(s.sp.p, Write, Route{Only: s.c.by.caps.Name})
		if err != nil {
			return // then the answer is waited for as long as Close allows
		}
		if s.notice != nil {
			_ = s.notice.Close()
		}
		s.notice = t
	}
	h := farHop{window: s.sp.there.number, slot: uint16(s.index), number: s.number}
	_ = s.notice.Notify(h.appendName(appendHead(nil, s.sp.far, isWithdrawn)))
	_ = s.notice.Post()
}

// transfer returns the slot's transfer of that kind, made anew where the way has changed.
func (s *slot) transfer(of *[2]*Transfer, p *Peer, op Op, by Route) (*Transfer, error) {
	t := of[op-1]
	if t != nil && t.p == p && t.route == by {
		return t, nil
	}
	if t != nil {
		_ = t.Close()
		of[op-1] = nil
	}
	t, err := s.sp.s.e.NewTransfer(p, op, by)
	if err == nil {
		of[op-1] = t
	}
	return t, err
}

// ownOp is the direction of a hop between staging memory, which is local to it, and memory
// of the engine's own peer.
func ownOp(what byte) driver.Op {
	if what == isPut {
		return Write
	}
	return Read
}
