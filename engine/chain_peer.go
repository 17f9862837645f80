// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// stagedPeer is the way to a peer by chains. Its batches are cut into pieces, which take
// turns: a small batch overtakes a large one.
type stagedPeer struct {
	driver.PeerBase
	s        *stager
	p        *Peer
	loop     *loop
	farKinds driver.Kinds      // that the peer's engine reaches from its staging memory
	lost     chan struct{}     // closed with the peer
	answers  chan windowAnswer // answers to requests for a window
	life     context.Context
	endLife  context.CancelFunc

	pending atomic.Int64 // batches

	opening sync.Mutex // held by the goroutine that makes the fields below, before a batch
	near    *pool
	windows map[*lane]*farWindow // by the lane that asked: they end with its connection
	given   bool                 // the loop has a local Peer

	mu      sync.Mutex // guards the fields below
	remotes map[uint32]*stagedRemote
	keys    map[*Remote]uint32
	lastKey uint32
	closed  bool

	// Touched by the loop alone.
	local      localPeer
	slots      []*slot
	farWindows map[*lane]*farWindow
	queue      []*stagedJob // with pieces that have no slot yet
	jobs       map[uint64]*stagedJob
	closing    bool
	idle       chan struct{} // closed once closing is set and no hop is under way; nil then
	forced     bool          // no piece waits for an answer of the peer any more
}

// stagedRemote is a memory of the peer and the ways to it that were prepared, by shape.
type stagedRemote struct {
	*Remote
	chains map[uint64]chain
}

// connect makes the staged way to a peer that is connected by other lanes.
func (s *stager) connect(p *Peer, addr []byte) *stagedPeer {
	sp := &stagedPeer{s: s, p: p, loop: newLoop(), lost: make(chan struct{}),
		answers: make(chan windowAnswer, 1),
		remotes: map[uint32]*stagedRemote{}, keys: map[*Remote]uint32{},
		windows: map[*lane]*farWindow{}, farWindows: map[*lane]*farWindow{},
		jobs: map[uint64]*stagedJob{}}
	sp.life, sp.endLife = context.WithCancel(s.e.life)
	sp.local = localPeer{s: s, loop: sp.loop}
	if len(addr) == 1 {
		sp.farKinds = driver.Kinds(addr[0])
	}
	return sp
}

// route plans the way between two memories, makes the pool, the local Peer and the window that it
// needs, as far as they are missing, keeps it for the batches to come, and describes it; or it says
// why there is none.
func (sp *stagedPeer) route(local *Region, remote *Remote, durable bool) (cost driver.Cost, text,
	obstacle string) {
	c, obstacle := sp.chain(local, remote, durable)
	if obstacle != "" {
		return cost, "", obstacle
	}
	slots, err := sp.prepare(&c)
	if err != nil {
		return cost, "", fmt.Sprintf("staging memory: %v", err)
	}
	key, err := sp.key(remote)
	if err != nil {
		return cost, "", err.Error()
	}
	sp.mu.Lock()
	if m := sp.remotes[key]; m != nil {
		m.chains[shape(local, durable)] = c
	}
	sp.mu.Unlock()
	text = c.describe(local.Kind(), remote.kind, slots)
	if local.seg.ReadOnly && c.near != nil {
		text += ", and writes alone: the region here is ReadOnly"
	}
	return c.cost(), text, ""
}

// prepare returns how many pieces the chain may have under way.
func (sp *stagedPeer) prepare(c *chain) (slots int, err error) {
	sp.opening.Lock()
	defer sp.opening.Unlock()
	if sp.life.Err() != nil {
		return 0, ErrClosed
	}
	if sp.near == nil {
		if sp.near, err = sp.s.newPool(); err != nil {
			return 0, err
		}
		near := sp.near
		sp.loop.push(func() {
			for i := range near.slots {
				sp.slots = append(sp.slots, newSlot(sp, near, i))
			}
		})
	}
	if c.near != nil && !sp.given {
		self, err := sp.s.e.local()
		if err != nil {
			return 0, err
		}
		sp.given = true
		sp.loop.push(func() { sp.local.connected(self, nil) })
	}
	slots = sp.near.slots
	if !c.far {
		return slots, nil
	}
	w := sp.windows[c.by]
	if w == nil {
		ctx, cancel := context.WithTimeout(sp.life, sp.s.e.cfg.ConnectTimeout)
		defer cancel()
		if w, err = sp.openWindow(ctx, c.by); err != nil {
			return 0, fmt.Errorf("ask the peer for staging memory: %w", err)
		}
		sp.windows[c.by] = w
		sp.loop.push(func() { sp.farWindows[w.carrier] = w })
	}
	return min(slots, w.slots), nil
}

// hasChain reports whether a way is remembered.
func (sp *stagedPeer) hasChain(local *Region, remote *Remote, durable bool) bool {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	m := sp.remotes[sp.keys[remote]]
	if m == nil {
		return false
	}
	_, ok := m.chains[shape(local, durable)]
	return ok
}

// forgetChains forgets the ways that go by a lane whose connection is lost.
func (sp *stagedPeer) forgetChains(l *lane) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	for _, m := range sp.remotes {
		maps.DeleteFunc(m.chains, func(_ uint64, c chain) bool { return c.by == l })
	}
}

// key names a peer's memory in descriptors.
func (sp *stagedPeer) key(m *Remote) (uint32, error) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if sp.closed {
		return 0, ErrClosed
	}
	if key, ok := sp.keys[m]; ok {
		return key, nil
	}
	for sp.lastKey++; sp.remotes[sp.lastKey] != nil; sp.lastKey++ {
	}
	sp.remotes[sp.lastKey], sp.keys[m] = &stagedRemote{m, map[uint64]chain{}}, sp.lastKey
	return sp.lastKey, nil
}

// forget drops the name of a memory.
func (sp *stagedPeer) forget(m *Remote) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	delete(sp.remotes, sp.keys[m])
	delete(sp.keys, m)
}

// Import implements driver.Peer; the engine has key, which knows the Remote.
func (sp *stagedPeer) Import([]byte) (uint32, uint64, error) { return 0, 0, ErrNotSupported }

// Drop implements driver.Peer; the engine has forget.
func (sp *stagedPeer) Drop(uint32) {}

// Can implements driver.Peer. Messages go by other lanes.
func (sp *stagedPeer) Can() driver.Can { return driver.CanPattern | driver.CanDurable }

// Explain implements driver.Peer; the engine describes chains itself.
func (sp *stagedPeer) Explain(_, _ uint32) string { return "" }

// Lost implements driver.Peer.
func (sp *stagedPeer) Lost() <-chan struct{} { return sp.lost }

// Submit implements driver.Peer. The last hop of each piece of a durable batch is a durable one.
func (sp *stagedPeer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(sp.Can()); err != nil {
		return err
	}
	j := &stagedJob{sp: sp, op: b.Op, tag: tag, durable: b.Durable}
	switch {
	case b.Pattern == nil:
		j.descs = append([]driver.Desc(nil), b.Descs...)
	case b.Pattern.Run > pieceBytes:
		return ErrBounds // the engine lists such entries one by one
	default:
		j.pages, j.paged = *b.Pattern, true
	}
	if err := j.check(); err != nil {
		return err
	}
	if sp.pending.Add(1) > stagedJobs {
		sp.pending.Add(-1)
		return ErrFull
	}
	sp.mu.Lock()
	defer sp.mu.Unlock() // so that none comes behind the end
	if sp.closed || !sp.loop.push(func() { sp.begin(j) }) {
		sp.pending.Add(-1)
		return ErrClosed
	}
	return nil
}

// Cancel implements driver.Peer.
func (sp *stagedPeer) Cancel(tag uint64) {
	sp.loop.push(func() {
		if j := sp.jobs[tag]; j != nil {
			sp.end(j, ErrAborted)
		}
	})
}

// Close implements driver.Peer. A peer that does not answer for pieces that it has in hand is
// waited for no longer than half of AbortGrace. The hops are waited for until they end: they are
// transfers, and the sweeper ends each, by closing its connection where nothing else helps.
func (sp *stagedPeer) Close() error {
	sp.mu.Lock()
	was := sp.closed
	sp.closed = true
	sp.mu.Unlock()
	sp.endLife()
	sp.opening.Lock() // no goroutine prepares any more; another Close has ended
	defer sp.opening.Unlock()
	if was {
		return nil
	}
	defer close(sp.lost)
	defer sp.loop.close()
	if sp.near == nil {
		return nil // never used
	}
	idle, released := make(chan struct{}), make(chan struct{})
	if !sp.loop.push(func() { // all batches end; hops that were given up are not waited for
		sp.closing, sp.idle = true, idle
		for _, j := range sp.jobs {
			sp.end(j, ErrClosed)
		}
		sp.schedule()
	}) {
		return nil
	}
	if !waitFor(idle, sp.s.e.cfg.AbortGrace/2) {
		sp.loop.push(func() { // ends the pieces that wait for an answer of the peer, or will
			sp.forced = true
			for _, s := range sp.slots {
				s.giveUp(false)
			}
			sp.schedule()
		})
		waitFor(idle, closeMax)
	}
	if sp.loop.push(func() { sp.release(released) }) {
		<-released
	}
	return nil
}

func waitFor(done <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// end lets a batch begin no more pieces, and ends those under way.
func (sp *stagedPeer) end(j *stagedJob, why error) {
	j.fail(why)
	for _, s := range sp.slots {
		if s.job == j {
			s.stop()
		}
	}
	sp.schedule()
}

// carrierLost ends the pieces that wait for an answer by a lane whose connection is lost.
func (sp *stagedPeer) carrierLost(by *lane) {
	sp.forgetChains(by)
	for _, s := range sp.slots {
		if s.job != nil && s.c.by == by {
			s.giveUp(true)
		}
	}
	sp.schedule()
}

// release gives the slots back, and closes done then.
func (sp *stagedPeer) release(done chan struct{}) {
	s, pool, lost := sp.s, sp.near, false
	var notices []*Transfer
	for _, slot := range sp.slots {
		lost = !slot.close() || lost
		if slot.notice != nil {
			notices = append(notices, slot.notice)
		}
	}
	s.e.running.Add(1)
	go func() { // the proof may take a task of this loop
		defer s.e.running.Done()
		defer close(done)
		pool.close(s, lost)
		for _, t := range notices {
			_ = t.stopAndClose(s.e.cfg.AbortGrace)
		}
	}()
}

// farWindow is staging memory of the peer that is ours to use.
type farWindow struct {
	slots   int
	carrier *lane
	remote  *Remote
}

// windowAnswer is the answer to a request for a window.
type windowAnswer struct {
	by   *lane
	body []byte // not nil
}

// openWindow asks the peer's engine for staging memory, and waits for the answer. Asked
// again, the peer gives the same window.
func (sp *stagedPeer) openWindow(ctx context.Context, carrier *lane) (*farWindow, error) {
	select {
	case <-sp.answers: // the answer to an earlier request
	default:
	}
	if err := sp.p.sendOne(ctx, carrier, []byte{wire.KindWindowAsk}); err != nil {
		return nil, err
	}
	var body []byte
	for body == nil {
		select {
		case h := <-sp.answers:
			if h.by == carrier { // else it is late, and of a request by another
				body = h.body
			}
		case <-sp.p.conns[carrier.index].gone:
			return nil, ErrPeerLost
		case <-ctx.Done():
			return nil, fmt.Errorf("no answer: %w", driver.ContextError(ctx))
		}
	}
	const fixed = 2
	if len(body) < fixed {
		return nil, fmt.Errorf("an answer of %d bytes: %w", len(body), ErrCorrupt)
	}
	w := &farWindow{carrier: carrier, slots: int(binary.LittleEndian.Uint16(body))}
	if w.slots == 0 {
		if err := wire.ParseOutcome(body[fixed:]); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("an answer without slots: %w", ErrCorrupt)
	}
	d, err := sp.p.read(body[fixed:])
	if err != nil {
		return nil, err
	}
	r, one := d.Only()
	if !one || r.Size < uint64(w.slots)*slotBytes || r.Kind != driver.DRAM {
		return nil, fmt.Errorf("a window of %d slots with another memory: %w", w.slots, ErrCorrupt)
	}
	w.remote = sp.p.remoteOf(&d.Description, &r)
	_, err = w.remote.key(carrier.index)
	return w, err
}

// answered takes an answer of the peer that came by a connection of ours.
func (sp *stagedPeer) answered(by *conn, what byte, body []byte) {
	if what == wire.KindHopEnd {
		sp.loop.pushForeign(func() { sp.hopEnded(by.lane, body) })
		return
	}
	select {
	case sp.answers <- windowAnswer{by.lane, body}:
	default: // a second one
	}
}

// hopEnded takes the answer to a request for a hop, or to its withdrawal.
func (sp *stagedPeer) hopEnded(by *lane, body []byte) {
	var h wire.Hop
	rest, ok := h.ParseName(body)
	if !ok || int(h.Slot) >= len(sp.slots) {
		return
	}
	s := sp.slots[h.Slot]
	if s.job == nil || s.number != h.Number || s.answered || s.step == atNear || s.c.by != by {
		return
	}
	s.answered, s.answer = true, wire.ParseOutcome(rest)
	if s.step == atHand {
		s.proceed()
	}
}
