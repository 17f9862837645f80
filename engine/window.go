// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"fmt"
	"time"

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
	over   bool        // no hop begins
	ending *windowEnds // waits until busy is 0
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
	case !w.loop.pushForeign(&hopAsked{w, what, body}) && what != exchange.IsWithdrawn:
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
	err := s.hold(from.ticket)
	if err == nil {
		defer s.unhold(from.ticket)
		err = w.open()
	}
	<-s.opening
	if err != nil {
		w.giveBack()
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

// hold counts a window of an engine that is known by a ticket, and of the host that it is on. A
// connection that has shown none has one window at most, whatever engine it claims to belong to.
// All of these are bounded only where others are to show tickets, to which they leave half.
func (s *stager) hold(of *ticket) error {
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

func (s *stager) unhold(of *ticket) {
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

// open takes memory and makes what lets the peer reach it.
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
		h.hook = func() { w.loop.push(h) }
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
	ended := &windowEnds{w: w, done: make(chan struct{})}
	w.loop.push(ended)
	waitFor(ended.done, 4*w.s.e.cfg.AbortGrace)
	w.loop.close()
	w.giveBack()
}

// giveBack closes the hops' transfers, the lease and the memory. It keeps the memory where a
// backend may still use it.
func (w *window) giveBack() {
	stuck := false
	for i := range w.hops {
		h := &w.hops[i]
		over := true
		for _, t := range h.ts {
			if t != nil {
				over = t.stopAndClose(w.s.e.cfg.AbortGrace) == nil && over
			}
		}
		if h.memory != nil && over { // its event came too late for the loop
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

// windowEnds ends all hops; done is closed when there is none.
type windowEnds struct {
	w    *window
	done chan struct{}
}

func (e *windowEnds) happen() {
	w := e.w
	w.over, w.ending = true, e
	for i := range w.hops {
		if h := &w.hops[i]; h.memory != nil {
			h.stop(ErrAborted)
		}
	}
	w.rest()
}

// rest tells the goroutine that ends the window when no hop is under way.
func (w *window) rest() {
	if w.busy == 0 && w.ending != nil {
		close(w.ending.done)
		w.ending = nil
	}
}
