// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
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

// asked takes a request about staging memory that a peer has sent.
func (s *stager) asked(from *sender, what byte, body []byte) {
	s.mu.Lock()
	w := from.window
	s.mu.Unlock()
	switch {
	case what == exchange.IsWindowAsk && w != nil:
		w.offer()
	case what == exchange.IsWindowAsk:
		s.openWindow(from)
	case w == nil:
		refuseHop(from, body, ErrRevoked)
	case !w.loop.pushForeign(func() { w.hopAsked(what, body) }) && what != exchange.IsWithdrawn:
		refuseHop(from, body, ErrFull)
	}
}

// refuseHop answers a request at once.
func refuseHop(from *sender, body []byte, why error) {
	var req exchange.Hop
	if _, ok := req.ParseName(body); ok {
		from.answer(appendHopEnd(nil, &req, why))
	}
}

func appendHopEnd(b []byte, req *exchange.Hop, err error) []byte {
	return exchange.AppendOutcome(req.AppendName(append(b, exchange.IsHopEnd)), err)
}

// openWindow makes a window in a goroutine of its own, which ends it, too.
func (s *stager) openWindow(from *sender) {
	s.mu.Lock()
	asking := from.asking
	from.asking = true
	s.mu.Unlock()
	if asking {
		return // the answer to the first request is on its way
	}
	select {
	case s.opening <- struct{}{}:
	default:
		err := fmt.Errorf("this engine opens %d windows at once: %w", cap(s.opening), ErrFull)
		s.refuseWindow(from, err)
		return
	}
	if !s.serve(func() { s.serveWindow(from) }) {
		<-s.opening
		s.refuseWindow(from, ErrClosed)
	}
}

// refuseWindow says why not; the peer may ask again.
func (s *stager) refuseWindow(from *sender, why error) {
	s.mu.Lock()
	from.asking = false
	s.mu.Unlock()
	from.answer(exchange.AppendOutcome([]byte{exchange.IsWindow, 0, 0}, why))
}

func (s *stager) serveWindow(from *sender) {
	w := &window{s: s, from: from, by: from.lane, loop: newLoop()}
	err := s.admitWindow(from.ticket)
	if err == nil {
		defer s.forgetWindow(from.ticket)
		err = w.open()
	}
	<-s.opening
	if err != nil {
		w.release()
		s.refuseWindow(from, err)
		return
	}
	s.mu.Lock()
	from.window, from.asking = w, false
	s.windows[w] = struct{}{}
	s.mu.Unlock()
	w.offer()
	select {
	case <-from.gone:
	case <-s.e.life.Done():
	}
	w.end()
}

// noTicket is the origin of connections that have shown no ticket: they count together.
const noTicket = "what shows no ticket"

// admitWindow counts a window of an engine that is known by a ticket, and of the host that it is
// on. A connection that has shown no ticket has one window at most, whatever engine it claims to
// belong to. All windows of such connections are bounded only where others are to show tickets, to
// which they leave half.
func (s *stager) admitWindow(of *ticket) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if of != nil && s.holders[of] >= windowsMax {
		return fmt.Errorf("this engine has %d windows already: close connections: %w", windowsMax,
			ErrFull)
	}
	origin, bounded := noTicket, s.exchanged.Load()
	if of != nil {
		origin, bounded = of.origin, of.origin != ""
	}
	if most := s.windowsOf(); bounded && s.origins[origin] >= most {
		return fmt.Errorf("%s has %d windows already, half of Config.StagingBytes: close "+
			"connections or raise it: %w", origin, most, ErrFull)
	}
	if of != nil {
		s.holders[of]++
	}
	s.origins[origin]++
	return nil
}

// windowsOf is how many windows one host, or one process of this host, may have: as many as half of
// the staging memory makes, so that a peer that dials again and again leaves the others theirs.
func (s *stager) windowsOf() int {
	return max(windowsMax, int(s.e.cfg.StagingBytes/(2*slotsMax*slotBytes)))
}

func (s *stager) forgetWindow(of *ticket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	origin := noTicket
	if of != nil {
		origin = of.origin
		if s.holders[of]--; s.holders[of] == 0 {
			delete(s.holders, of)
		}
	}
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
	b := binary.LittleEndian.AppendUint16([]byte{exchange.IsWindow}, uint16(w.pool.slots))
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

// release closes the hops' transfers, the lease and the memory. It keeps the memory where a
// backend may still use it.
func (w *window) release() {
	stuck := false
	for i := range w.hops {
		h := &w.hops[i]
		over := true
		for _, t := range h.ts {
			if t != nil {
				over = t.stopAndClose(w.s.e.cfg.AbortGrace) == nil && over
			}
		}
		if h.memory != nil && over { // its hook came too late for the loop
			h.memory.leave()
		}
		stuck = stuck || !over
	}
	stuck = !w.revoke() || stuck
	if w.pool != nil {
		w.pool.close(w.s, stuck)
	}
}

// revoke ends the lease. Where there is no proof, as of a frozen writer into pages that a device
// holds, it tries again until there is, or until the engine closes.
func (w *window) revoke() bool {
	grace := w.s.e.cfg.AbortGrace
	for w.lease != nil && w.lease.end(grace) != nil {
		select {
		case <-time.After(grace):
		case <-w.s.e.life.Done():
			return w.lease.end(grace) == nil
		}
	}
	return true
}

// stopHops has the hops of a memory end soon, or all where m is nil.
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

// hopAsked takes a request of the peer.
func (w *window) hopAsked(what byte, body []byte) {
	var req exchange.Hop
	rest, ok := req.ParseName(body)
	if !ok || int(req.Slot) >= len(w.hops) || w.over && what != exchange.IsWithdrawn {
		refuseHop(w.from, body, ErrClosed)
		return
	}
	h := &w.hops[req.Slot]
	switch {
	case what == exchange.IsWithdrawn && len(rest) == 0:
		h.withdraw(&req)
	case what == exchange.IsWithdrawn, h.memory != nil:
		refuseHop(w.from, body, ErrBusy) // against the rules
	default:
		h.start(&req, what, body)
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
func (h *hop) start(req *exchange.Hop, what byte, body []byte) {
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
	t.extra().hook = h.hook
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
