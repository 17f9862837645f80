// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// hop is what a window does for the peer: at most one for each slot at a time.
type hop struct {
	w       *window
	index   int
	req     exchange.Hop
	op      driver.Op
	memory  *stagedMemory // nil: at rest
	t       *Transfer     // nil: at rest, or waiting for a local Peer
	why     error         // it was stopped before it began
	ts      [2]*Transfer  // by Op-1
	descs   []driver.Desc
	indices []uint32
	hook    func()
}

// hopAsked is a request of the peer.
type hopAsked struct {
	w    *window
	what byte
	body []byte
}

func (a *hopAsked) happen() {
	var req exchange.Hop
	rest, ok := req.ParseName(a.body)
	if !ok || int(req.Slot) >= len(a.w.hops) || a.w.over && a.what != exchange.IsWithdrawn {
		refuseHop(a.w.from, a.body, ErrClosed)
		return
	}
	h := &a.w.hops[req.Slot]
	switch {
	case a.what == exchange.IsWithdrawn && len(rest) == 0:
		h.withdraw(&req)
	case a.what == exchange.IsWithdrawn, h.memory != nil:
		refuseHop(a.w.from, a.body, ErrBusy) // against the rules
	default:
		h.start(&req, a)
	}
}

// withdraw ends a hop early, or says that there is none: the peer withdraws, too, when it
// does not know whether its request has come. Requests of a connection come in order.
func (h *hop) withdraw(req *exchange.Hop) {
	if h.memory != nil && h.req.Number == req.Number {
		h.stop(ErrAborted) // the answer says how it ended
		return
	}
	h.w.from.answer(appendHopEnd(nil, req, ErrAborted))
}

// start makes a hop for the peer.
func (h *hop) start(req *exchange.Hop, a *hopAsked) {
	if err := req.Parse(a.body); err != nil {
		refuseHop(h.w.from, a.body, err)
		return
	}
	h.req, h.op, h.why = *req, ownOp(a.what), nil
	by, err := h.begin()
	if err != nil {
		h.finish(err)
		return
	}
	h.w.local.get(by, func(self *Peer, err error) {
		if err == nil {
			err = h.post(self, by)
		}
		if err != nil {
			h.finish(err)
		}
	})
}

// begin admits the hop [enter] and chooses the lane.
func (h *hop) begin() (by *lane, err error) {
	s := h.w.s
	if h.memory, err = s.enter(h.req.Token); err != nil {
		return nil, err
	}
	h.w.busy++
	if h.op == Write && h.memory.region.seg.ReadOnly {
		return nil, driver.ErrReadOnly
	}
	at := uint64(h.index) * slotBytes
	list := h.w.pool.region.Bytes()[at+pieceBytes:][:exchange.ListBytes]
	if h.descs, h.indices, err = h.req.ReadList(list, h.descs[:0], h.indices[:0]); err != nil {
		return nil, err
	}
	r := h.memory.region
	by = s.nearest(r.seg.Kind, r.mems, func(l *lane) bool {
		return !h.req.Durable || h.w.local.peer.persists(l)
	})
	switch {
	case by == nil && h.req.Durable:
		return nil, fmt.Errorf("no backend there says when bytes of its %v would survive a loss "+
			"of power: %w",
			r.Kind(), ErrNoRoute)
	case by == nil:
		return nil, ErrNoRoute
	}
	return by, nil
}

// post fills the transfer, which checks the bounds of the memory, and posts it [place].
func (h *hop) post(self *Peer, by *lane) error {
	if h.why != nil {
		return h.why
	}
	own, err := h.memory.own(self)
	if err != nil {
		return err
	}
	t, err := renewTransfer(&h.ts, self, h.op, Route{Only: by.caps.Name, Durable: h.req.Durable})
	if err != nil {
		return err
	}
	h.t = t
	if err := h.fill(own); err != nil {
		return err
	}
	t.hook = h.hook
	return t.Post()
}

func (h *hop) fill(own *Remote) error {
	at := uint64(h.index) * slotBytes
	if r := &h.req; r.Paged {
		p := Pages{Count: r.Count, EntryLen: r.EntryLen, LocalBase: at, LocalStride: r.EntryLen,
			RemoteBase: r.Base, RemoteStride: r.Stride}
		if r.Listed {
			p.Remote = h.indices
		}
		return h.t.AddPages(h.w.pool.region, own, p)
	}
	for i := range h.descs {
		d := &h.descs[i]
		if err := h.t.Add(h.w.pool.region, at+d.Local, own, d.Remote, d.Len); err != nil {
			return err
		}
	}
	return nil
}

// stop ends the hop soon: the event of its end follows.
func (h *hop) stop(why error) {
	if h.t == nil {
		h.why = why
		return
	}
	h.t.stop(h.t.look().generation(), why)
}

// happen is the end of the hop. One that was given up is never answered: its end is not known.
func (h *hop) happen() {
	if h.memory == nil || h.t == nil || h.t.isUnproven() {
		return
	}
	if !h.t.Done() {
		return // the event of an earlier post
	}
	h.finish(h.t.Err())
}

// finish lets go of the memory and tells the peer how the hop ended [finish].
func (h *hop) finish(err error) {
	if h.t != nil {
		_ = h.t.Reset()
		h.t = nil
	}
	if h.memory != nil {
		h.memory.leave()
		h.memory = nil
		h.w.busy--
	}
	var op *OpError
	if errors.As(err, &op) {
		err = fmt.Errorf("%s: %w", op.Backend, op.Err)
	}
	h.w.from.answer(appendHopEnd(nil, &h.req, err))
	h.w.rest()
}

// renewTransfer returns the transfer of a direction, made anew where the way has changed.
func renewTransfer(of *[2]*Transfer, p *Peer, op Op, by Route) (*Transfer, error) {
	t := of[op-1]
	if t != nil && t.p == p && t.route == by {
		return t, nil
	}
	if t != nil {
		_ = t.Close()
		of[op-1] = nil
	}
	t, err := p.e.NewTransfer(p, op, by)
	if err == nil {
		of[op-1] = t
	}
	return t, err
}

// stopAndClose ends and closes a transfer. An error means that a backend may still use its
// memory.
func (t *Transfer) stopAndClose(grace time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*grace)
	defer cancel()
	err := t.Abort(ctx)
	if errors.Is(err, ErrUnproven) {
		err = nil // of the peer's memory alone
	}
	return errors.Join(err, t.Close())
}
