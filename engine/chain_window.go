// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// window is staging memory of ours that a peer writes and reads by its own backend, with the
// hops that this engine makes for it between that and memory of ours. It belongs to the
// connection by which it was asked for, and ends with it; there is at most one a connection.
type window struct {
	s     *stager
	from  *sender
	by    *lane
	pool  *pool
	lease *Lease
	token []byte // lets the peer reach the memory
	loop  *loop

	// Touched by the loop alone.
	local  localPeer
	hops   []hop
	busy   int
	over   bool          // no hop begins
	ending chan struct{} // closed when busy is 0; nil then, and before the end
}

// request takes a request about staging memory that a peer has sent.
func (s *stager) request(from *sender, what byte, body []byte) {
	s.mu.Lock()
	w := from.window
	s.mu.Unlock()
	switch {
	case what == wire.KindWindowAsk && w != nil:
		w.offer()
	case what == wire.KindWindowAsk:
		s.openWindow(from)
	case w == nil:
		refuseHop(from, body, ErrRevoked)
	case !w.loop.pushForeign(func() { w.hopRequested(what, body) }) && what != wire.KindWithdrawn:
		refuseHop(from, body, ErrFull)
	}
}

// refuseHop answers a request at once.
func refuseHop(from *sender, body []byte, why error) {
	var req wire.Hop
	if _, ok := req.ParseName(body); ok {
		from.answer(appendHopEnd(nil, &req, why))
	}
}

func appendHopEnd(b []byte, req *wire.Hop, err error) []byte {
	return wire.AppendOutcome(req.AppendName(append(b, wire.KindHopEnd)), err)
}

// openWindow makes a window in a goroutine of its own, which ends it, too. A connection has one at
// most.
func (s *stager) openWindow(from *sender) {
	s.mu.Lock()
	opening := from.opening
	from.opening = true
	s.mu.Unlock()
	if opening {
		return // the answer to the first request is on its way
	}
	refuse := func(why error) {
		s.mu.Lock()
		from.opening = false
		s.mu.Unlock()
		from.answer(wire.AppendOutcome([]byte{wire.KindWindow, 0, 0}, why))
	}
	if !s.serve(func() {
		w := &window{s: s, from: from, by: from.lane, loop: newLoop()}
		err := s.admitWindow(from)
		if err == nil {
			defer s.forgetWindow(from)
			err = w.open()
		}
		if err != nil {
			w.release()
			refuse(err)
			return
		}
		s.mu.Lock()
		from.window, from.opening = w, false
		s.windows[w] = struct{}{}
		s.mu.Unlock()
		w.offer()
		select {
		case <-from.gone:
		case <-s.e.life.Done():
		}
		w.end()
	}) {
		refuse(ErrClosed)
	}
}

// noTicket is the origin of connections that have shown no ticket: they count together.
const noTicket = "what shows no ticket"

// admitWindow counts a window by the host, or the process of this host, from which its connection
// comes. Each connection has one at most. One host has as many as half of the staging memory
// makes, so that a peer that dials again and again leaves the others theirs. Connections that have
// shown no ticket count together, and are bounded only where others are to show tickets.
func (s *stager) admitWindow(from *sender) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	origin, bounded := from.origin(), s.exchanged.Load()
	if from.ticket != nil {
		bounded = origin != ""
	}
	most := max(windowsMin, int(s.e.cfg.StagingBytes/(2*slotsMax*slotBytes)))
	if bounded && s.origins[origin] >= most {
		return fmt.Errorf("%s has %d windows already, half of Config.StagingBytes: close "+
			"connections or raise it: %w", origin, most, ErrFull)
	}
	s.origins[origin]++
	return nil
}

func (s *stager) forgetWindow(from *sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	origin := from.origin()
	if s.origins[origin]--; s.origins[origin] == 0 {
		delete(s.origins, origin)
	}
}

// open takes memory and makes the token by which the peer reaches it.
func (w *window) open() (err error) {
	if w.pool, err = w.s.newPool(); err != nil {
		return err
	}
	if w.lease, err = w.pool.region.Lease(0, w.pool.region.Size(), LeaseOptions{}); err != nil {
		return err
	}
	d, err := wire.Decode(w.lease.Token())
	if err != nil {
		return err
	}
	r := &d.Regions[0]
	token := r.Token(w.by.index)
	if token == nil {
		return fmt.Errorf("%s does not reach staging memory here: %w", w.by.caps.Name, ErrNoRoute)
	}
	d.Backends = []wire.Backend{{Name: w.by.caps.Name}}
	r.Pack([][]byte{token})
	if w.token, err = wire.Encode(nil, d); err != nil {
		return err
	}
	self, err := w.s.e.local()
	if err != nil {
		return err
	}
	w.local = localPeer{s: w.s, loop: w.loop, peer: self}
	w.hops = make([]hop, w.pool.slots)
	for i := range w.hops {
		h := &w.hops[i]
		h.w, h.index = w, i
		ended := h.ended
		h.hook = func() { w.loop.push(ended) }
	}
	return nil
}

// offer answers the request for the window. Asked again, it is the same.
func (w *window) offer() {
	b := binary.LittleEndian.AppendUint16([]byte{wire.KindWindow}, uint16(w.pool.slots))
	w.from.answer(append(b, w.token...))
}

// end stops the hops, waits for their ends as long as they may take, and gives all back.
func (w *window) end() {
	w.s.mu.Lock()
	delete(w.s.windows, w) // the sender keeps it: a hop that is withdrawn may be under way yet
	w.s.mu.Unlock()
	ended := make(chan struct{})
	w.loop.push(func() {
		w.over, w.ending = true, ended
		w.stopHops(nil, ErrAborted)
		w.checkEnd()
	})
	waitFor(ended, 4*w.s.e.cfg.AbortGrace)
	w.loop.close()
	w.release()
}

// release closes the hops' transfers, the lease and the memory. Where the lease has no proof, as of
// a frozen writer into pages that a device holds, it waits until the engine has found one, or
// closes. It keeps the memory where a backend may still use it.
func (w *window) release() {
	stuck, grace := false, w.s.e.cfg.AbortGrace
	for i := range w.hops {
		h := &w.hops[i]
		over := true
		for _, t := range h.ts {
			if t != nil {
				over = t.stopAndClose(grace) == nil && over
			}
		}
		if h.memory != nil && over { // its hook came too late for the loop
			h.memory.leave()
		}
		stuck = stuck || !over
	}
	if w.lease != nil && w.lease.end(grace) != nil {
		select {
		case <-w.lease.Revoked():
		case <-w.s.e.life.Done():
			stuck = w.lease.end(grace) != nil || stuck
		}
	}
	if w.pool != nil {
		w.pool.close(w.s, stuck)
	}
}

// stopHops ends the hops of a memory soon, or all hops where m is nil.
func (w *window) stopHops(m *stagedMemory, why error) {
	for i := range w.hops {
		if h := &w.hops[i]; h.memory != nil && (m == nil || h.memory == m) {
			h.stop(why)
		}
	}
}

// checkEnd tells the goroutine that ends the window when no hop is under way.
func (w *window) checkEnd() {
	if w.busy == 0 && w.ending != nil {
		close(w.ending)
		w.ending = nil
	}
}

// hop is a copy that a window makes for the peer: at most one for each slot at a time.
type hop struct {
	w       *window
	index   int
	req     wire.Hop
	op      driver.Op
	memory  *stagedMemory // nil: at rest
	t       *Transfer     // nil: at rest, or waiting for a local Peer
	why     error         // it was stopped before it began
	ts      [2]*Transfer  // by Op-1
	descs   []driver.Desc
	indices []uint32
	hook    func()
}

// hopRequested takes a request of the peer.
func (w *window) hopRequested(what byte, body []byte) {
	var req wire.Hop
	rest, ok := req.ParseName(body)
	if !ok || int(req.Slot) >= len(w.hops) || w.over && what != wire.KindWithdrawn {
		refuseHop(w.from, body, ErrClosed)
		return
	}
	h := &w.hops[req.Slot]
	switch {
	case what == wire.KindWithdrawn && len(rest) == 0:
		h.withdraw(&req)
	case what == wire.KindWithdrawn, h.memory != nil:
		refuseHop(w.from, body, ErrBusy) // against the rules
	default:
		h.start(&req, what, body)
	}
}

// withdraw ends a hop early, or says that there is none: the peer withdraws, too, when it
// does not know whether its request has come. Requests of a connection come in order.
func (h *hop) withdraw(req *wire.Hop) {
	if h.memory != nil && h.req.Number == req.Number {
		h.stop(ErrAborted) // the answer says how it ended
		return
	}
	h.w.from.answer(appendHopEnd(nil, req, ErrAborted))
}

// start makes a hop for the peer.
func (h *hop) start(req *wire.Hop, what byte, body []byte) {
	if err := req.Parse(body); err != nil {
		refuseHop(h.w.from, body, err)
		return
	}
	h.req, h.op, h.why = *req, ownOp(what), nil
	by, err := h.begin()
	if err != nil {
		h.finish(err)
		return
	}
	h.w.local.with(by, func(self *Peer, err error) {
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
	list := h.w.pool.region.Bytes()[at+pieceBytes:][:wire.ListBytes]
	if h.descs, h.indices, err = h.req.ReadList(list, h.descs[:0], h.indices[:0]); err != nil {
		return nil, err
	}
	r, self := h.memory.region, h.w.local.peer
	by = s.nearest(r, func(l *lane) bool {
		return !h.req.Durable || self.conns[l.index] != nil &&
			self.conns[l.index].can&driver.CanDurable != 0
	})
	switch {
	case by == nil && h.req.Durable:
		return nil, fmt.Errorf("no backend there says when bytes of its %v would survive a loss "+
			"of power: %w", r.Kind(), ErrNoRoute)
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
	r, at := &h.req, uint64(h.index)*slotBytes
	t, err := renewTransfer(&h.ts, self, h.op, Route{Only: by.caps.Name, Durable: r.Durable})
	if err != nil {
		return err
	}
	h.t = t
	if r.Paged {
		p := Pages{Count: r.Count, EntryLen: r.EntryLen, LocalBase: at, LocalStride: r.EntryLen,
			RemoteBase: r.Base, RemoteStride: r.Stride}
		if r.Listed {
			p.Remote = h.indices
		}
		err = t.AddPages(h.w.pool.region, own, p)
	}
	for i := 0; i < len(h.descs) && err == nil; i++ {
		d := &h.descs[i]
		err = t.Add(h.w.pool.region, at+d.Local, own, d.Remote, d.Len)
	}
	if err != nil {
		return err
	}
	t.extra().hook = h.hook
	return t.Post()
}

// stop ends the hop soon: ended follows.
func (h *hop) stop(why error) {
	if h.t == nil {
		h.why = why
		return
	}
	h.t.stop(h.t.state().generation(), why)
}

// ended answers for the hop. One that was given up is never answered: its end is not known.
func (h *hop) ended() {
	if h.memory == nil || h.t == nil || h.t.isUnproven() {
		return
	}
	if !h.t.Done() {
		return // the hook of an earlier post
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
	h.w.checkEnd()
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
		t.class = unscheduled
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
