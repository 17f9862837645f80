// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// window is staging memory of ours that a peer writes and reads by its own backend, with the
// hops that we make for it between that and memory of ours.
type window struct {
	s      *stager
	number uint64
	nonce  uint64 // names it to the peer
	to     []byte // the peer's stager
	from   string // the only address whose requests count
	peer   *Peer  // for the answers; a connection of its own, whose loss ends the window
	by     *lane
	pool   *pool
	lease  *Lease
	bye    chan struct{}
	held   bool // counted among the sender's

	// Touched by the stager's goroutine alone.
	hops    []hop
	busy    int
	answers []*Transfer
	ending  *windowEnds // waits until busy is 0
}

// hop is one of a window's: a slot of it.
type hop struct {
	w       *window
	index   int
	number  uint32
	memory  *stagedMemory // nil: at rest
	t       *Transfer
	ts      [2]*Transfer // by Op-1
	descs   []driver.Desc
	indices []uint32
	hook    func()
}

// receiveHello has a goroutine connect back, unless too many are at it.
func (s *stager) receiveHello(m *stagedMessage) {
	s.welcome(func() { s.greet(m) })
}

// welcome runs greet in a goroutine, where there is a place.
func (s *stager) welcome(greet func()) {
	select {
	case s.hellos <- struct{}{}:
	default:
		return
	}
	if !s.serve(func() {
		defer func() { <-s.hellos }()
		greet()
	}) {
		<-s.hellos
	}
}

// callBack connects to who has sent a hello; nil: it cannot be reached, or made no sense.
func (s *stager) callBack(m *stagedMessage) (back *Peer, nonce uint64, stager []byte) {
	if len(m.body) < 8+1 {
		return nil, 0, nil
	}
	d, err := wire.Decode(m.body[9:])
	if err != nil || d.Engine == s.e.id || string(d.Addr(m.lane.caps.Name)) != m.from {
		return nil, 0, nil
	}
	to := d.Addr(Staged)
	if len(to) != len(s.id)+1 {
		return nil, 0, nil
	}
	ctx, cancel := context.WithTimeout(s.e.life, s.e.cfg.ConnectTimeout)
	defer cancel()
	d.Backends = []wire.Backend{{Name: m.lane.caps.Name, Addr: []byte(m.from)}}
	if back, err = s.e.connectHidden(ctx, d); err != nil {
		return nil, 0, nil
	}
	return back, binary.LittleEndian.Uint64(m.body), to[:len(s.id)]
}

// greet connects to who asked, and gives it a window or says why not. Who cannot be reached
// gets no answer.
func (s *stager) greet(m *stagedMessage) {
	back, nonce, to := s.callBack(m)
	if back == nil {
		return
	}
	ctx, cancel := context.WithTimeout(s.e.life, s.e.cfg.ConnectTimeout)
	defer cancel()
	w := &window{s: s, number: rand.Uint64(), nonce: nonce, to: to,
		from: m.from, peer: back, by: m.lane, bye: make(chan struct{}, 1)}
	token, err := w.open()
	if err == nil && !s.push(&windowOpened{w}) {
		err = ErrClosed
	}
	known := err == nil
	if sent := w.reply(ctx, token, err); known && sent == nil && s.serve(w.watch) {
		return
	}
	w.end(known)
}

// hold counts a window of a sender.
func (s *stager) hold(from string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[from] >= windowsMax {
		return fmt.Errorf("this engine has %d windows already: close peers: %w", windowsMax, ErrFull)
	}
	s.holders[from]++
	return nil
}

func (s *stager) unhold(from string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holders[from]--; s.holders[from] == 0 {
		delete(s.holders, from)
	}
}

// open takes memory and returns what lets the peer reach it.
func (w *window) open() (token []byte, err error) {
	if err := w.s.hold(w.from); err != nil {
		return nil, err
	}
	w.held = true
	if w.pool, err = w.s.newPool(w.by); err != nil {
		return nil, err
	}
	if w.lease, err = w.pool.region.Lease(0, w.pool.region.Size(), LeaseOptions{}); err != nil {
		return nil, err
	}
	d, err := wire.Decode(w.lease.Token())
	if err != nil {
		return nil, err
	}
	r := &d.Regions[0]
	d.Backends = []wire.Backend{{Name: w.by.caps.Name}}
	r.Tokens = r.Tokens[w.by.index : w.by.index+1]
	return wire.Encode(nil, d)
}

func (w *window) reply(ctx context.Context, token []byte, why error) error {
	slots := 0
	if why == nil {
		slots = w.pool.slots
	} else {
		token = appendOutcome(nil, why)
	}
	b := binary.LittleEndian.AppendUint64(appendHead(nil, w.to, isWindow), w.nonce)
	b = binary.LittleEndian.AppendUint64(b, w.number)
	b = append(binary.LittleEndian.AppendUint16(b, uint16(slots)), token...)
	t, err := w.s.e.NewTransfer(w.peer, Write, Route{Only: w.by.caps.Name})
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	return notifyOnce(ctx, t, b)
}

// watch ends the window with the peer, with its goodbye, or with the engine.
func (w *window) watch() {
	select {
	case <-w.peer.Lost():
	case <-w.bye:
	case <-w.s.e.life.Done():
	}
	w.end(true)
}

// end stops the hops, waits for their ends as long as they may take, and gives all back.
func (w *window) end(known bool) {
	stuck := false
	if ended := (&windowEnds{w: w, done: make(chan struct{})}); known && w.s.push(ended) {
		stuck = !waitFor(ended.done, 4*w.s.e.cfg.AbortGrace)
	}
	_ = w.peer.Close() // ends the answers, too
	if !stuck {
		stuck = !w.closeTransfers()
	}
	stuck = !w.revoke() || stuck
	if w.pool != nil {
		w.pool.close(w.s, stuck)
	}
	if w.held {
		w.s.unhold(w.from)
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
			return false
		}
	}
	return true
}

// closeTransfers reports false when one of them was given up.
func (w *window) closeTransfers() bool {
	all := append([]*Transfer(nil), w.answers...)
	for i := range w.hops {
		all = append(all, w.hops[i].ts[:]...)
	}
	whole := true
	for _, t := range all {
		if t != nil {
			_ = t.Abort(context.Background())
			whole = t.Close() == nil && !t.unproven.Load() && whole
		}
	}
	return whole
}

// windowOpened makes a window known.
type windowOpened struct{ w *window }

func (o *windowOpened) happen() {
	w := o.w
	w.hops = make([]hop, w.pool.slots)
	for i := range w.hops {
		h := &w.hops[i]
		h.w, h.index = w, i
		h.hook = func() { w.s.push(h) }
	}
	w.s.windows[w.number] = w
}

// windowEnds forgets it and ends its hops; done is closed when there is none.
type windowEnds struct {
	w    *window
	done chan struct{}
}

func (e *windowEnds) happen() {
	w := e.w
	delete(w.s.windows, w.number)
	if w.busy == 0 {
		close(e.done)
		return
	}
	w.ending = e
	for i := range w.hops {
		if h := &w.hops[i]; h.memory != nil {
			h.t.stop(ErrAborted)
		}
	}
}

// find returns the window of a request, if it is the sender's.
func (m *stagedMessage) find(h *farHop) (*hop, bool) {
	w := m.s.windows[h.window]
	if w == nil || w.from != m.from || int(h.slot) >= len(w.hops) {
		return nil, false
	}
	return &w.hops[h.slot], true
}

// receiveHop makes a hop for the peer.
func (s *stager) receiveHop(m *stagedMessage) {
	var req farHop
	if _, ok := req.parseName(m.body); !ok {
		return
	}
	h, ok := m.find(&req)
	if !ok || h.memory != nil {
		return // not the sender's, or it has something under way there and breaks the rules
	}
	h.number = req.number
	if err := h.begin(&req, m); err != nil {
		h.leave()
		h.w.answer(h, err)
	}
}

func (h *hop) begin(req *farHop, m *stagedMessage) (err error) {
	if err := req.parse(m.body); err != nil {
		return err
	}
	s := h.w.s
	if h.memory, err = s.enter(req.token); err != nil {
		return err
	}
	h.w.busy++
	op := ownOp(m.what)
	if op == Write && h.memory.region.seg.ReadOnly {
		return driver.ErrReadOnly
	}
	at := uint64(h.index) * slotBytes
	list := h.w.pool.region.Bytes()[at+pieceBytes:][:listBytes]
	if h.descs, h.indices, err = req.readList(list, h.descs[:0], h.indices[:0]); err != nil {
		return err
	}
	if err := h.prepare(op, at, req); err != nil {
		return err
	}
	h.t.hook = h.hook
	return h.t.Post()
}

// prepare fills the transfer, which checks the bounds of the memory.
func (h *hop) prepare(op driver.Op, at uint64, req *farHop) error {
	s := h.w.s
	self, err := s.e.Self()
	if err != nil {
		return err
	}
	by := s.nearest(h.memory.region.seg.Kind, h.memory.region.mems, func(l *lane) bool { return !req.durable || self.persists(l) })
	switch {
	case by == nil && req.durable:
		return fmt.Errorf("no backend there says when bytes of its %v would survive a loss of power: %w", h.memory.region.Kind(), ErrNoRoute)
	case by == nil:
		return ErrNoRoute
	}
	own, err := h.memory.own(self)
	if err != nil {
		return err
	}
	if h.t, err = h.transfer(self, op, Route{Only: by.caps.Name, Durable: req.durable}); err != nil {
		return err
	}
	if req.paged {
		p := req.pages
		p.LocalBase, p.LocalStride = at, p.EntryLen
		if req.listed {
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

func (h *hop) transfer(self *Peer, op driver.Op, by Route) (*Transfer, error) {
	t := h.ts[op-1]
	if t != nil && t.p == self && t.route == by {
		return t, nil
	}
	if t != nil {
		_ = t.Close()
		h.ts[op-1] = nil
	}
	t, err := h.w.s.e.NewTransfer(self, op, by)
	if err == nil {
		h.ts[op-1] = t
	}
	return t, err
}

// happen is the end of the hop. One that was given up is never answered: nobody knows.
func (h *hop) happen() {
	if h.memory == nil || h.t.unproven.Load() {
		return
	}
	err := h.t.Err()
	h.leave()
	h.w.answer(h, err)
}

// leave lets go of the memory.
func (h *hop) leave() {
	if h.t != nil {
		_ = h.t.Reset()
		h.t = nil
	}
	if h.memory != nil {
		h.memory.leave()
		h.memory = nil
		if h.w.busy--; h.w.busy == 0 && h.w.ending != nil {
			close(h.w.ending.done)
			h.w.ending = nil
		}
	}
}

// answer tells the peer how it ended.
func (w *window) answer(h *hop, err error) {
	t, failed := w.answerer()
	if failed != nil {
		return // then it waits in vain: the connection is at its end
	}
	var op *OpError
	if errors.As(err, &op) {
		err = fmt.Errorf("%s: %w", op.Backend, op.Err)
	}
	b := binary.LittleEndian.AppendUint64(appendHead(nil, w.to, isAnswer), w.nonce)
	b = binary.LittleEndian.AppendUint16(b, uint16(h.index))
	b = binary.LittleEndian.AppendUint32(b, h.number)
	if t.Notify(appendOutcome(b, err)) == nil {
		_ = t.Post()
	}
}

// answerer returns a transfer that is free: one more than slots suffices, unless the peer
// takes slots again before its backend has told us that it has taken our answer.
func (w *window) answerer() (*Transfer, error) {
	for _, t := range w.answers {
		if t.state.Load() != posted {
			return t, nil
		}
	}
	if len(w.answers) > 2*len(w.hops) {
		return nil, ErrFull
	}
	t, err := w.s.e.NewTransfer(w.peer, Write, Route{Only: w.by.caps.Name})
	if err == nil {
		w.answers = append(w.answers, t)
	}
	return t, err
}

// receiveWithdrawal ends a hop early. The answer says how it ended.
func (s *stager) receiveWithdrawal(m *stagedMessage) {
	var req farHop
	rest, ok := req.parseName(m.body)
	if !ok || len(rest) > 0 {
		return
	}
	if h, ok := m.find(&req); ok && h.memory != nil && h.number == req.number {
		h.t.stop(ErrAborted)
	}
}

func (s *stager) receiveBye(m *stagedMessage) {
	if len(m.body) != 8 {
		return
	}
	if w := s.windows[binary.LittleEndian.Uint64(m.body)]; w != nil && w.from == m.from {
		select {
		case w.bye <- struct{}{}:
		default:
		}
	}
}
