// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// stagedPeer is the way to a peer by chains. Its batches are cut into pieces, which take
// turns: a small batch overtakes a large one.
type stagedPeer struct {
	driver.PeerBase
	s        *stager
	p        *Peer
	loop     *loop
	farKinds driver.Kinds  // that the peer's engine reaches from its staging memory
	lost     chan struct{} // closed with the peer
	heard    chan heard    // answers to requests for a window
	life     context.Context
	endLife  context.CancelFunc

	pending atomic.Int64 // batches

	opening sync.Mutex // one goroutine at a time makes what follows, before any batch needs it
	near    *pool
	windows map[*lane]*farWindow // by the lane that asked: they end with its connection
	given   bool                 // the loop has a local Peer

	mu      sync.Mutex // guards what follows
	remotes map[uint32]*stagedRemote
	keys    map[*Remote]uint32
	lastKey uint32
	closed  bool

	// Touched by the loop alone.
	local   localPeer
	slots   []*slot
	there   map[*lane]*farWindow
	turn    []*stagedJob // with pieces that have no slot yet
	jobs    map[uint64]*stagedJob
	closing *stagedClose
	forced  bool // no piece waits for an answer of the peer any more
}

// stagedRemote is a memory of the peer and the ways to it that were prepared, by shape.
type stagedRemote struct {
	*Remote
	chains map[uint64]chain
}

// connect makes the staged way to a peer that is connected by other lanes.
func (s *stager) connect(p *Peer, addr []byte) *stagedPeer {
	sp := &stagedPeer{s: s, p: p, loop: newLoop(), lost: make(chan struct{}),
		heard:   make(chan heard, 1),
		remotes: map[uint32]*stagedRemote{}, keys: map[*Remote]uint32{},
		windows: map[*lane]*farWindow{}, there: map[*lane]*farWindow{},
		jobs: map[uint64]*stagedJob{}}
	sp.life, sp.endLife = context.WithCancel(s.e.life)
	sp.local = localPeer{s: s, loop: sp.loop}
	if len(addr) == 1 {
		sp.farKinds = driver.Kinds(addr[0])
	}
	return sp
}

// route prepares the way between two memories and describes it, or says why there is none.
func (sp *stagedPeer) route(local *Region, remote *Remote, durable bool) (cost driver.Cost, text,
	obstacle string) {
	c, obstacle := sp.chain(local, remote, durable)
	if obstacle != "" {
		return cost, "", obstacle
	}
	slots, err := sp.prepare(&c)
	if err == nil {
		err = sp.remember(local, remote, durable, c)
	}
	if err != nil {
		return cost, "", fmt.Sprintf("staging memory: %v", err)
	}
	text = c.describe(local.Kind(), remote.kind, slots)
	if local.seg.ReadOnly && c.near != nil {
		text += ", and writes alone: the region here is ReadOnly"
	}
	return c.cost(), text, ""
}

// prepare makes what a chain needs, and returns how many pieces it may have under way.
func (sp *stagedPeer) prepare(c *chain) (slots int, err error) {
	sp.opening.Lock()
	defer sp.opening.Unlock()
	if sp.isClosed() {
		return 0, ErrClosed
	}
	if sp.near == nil {
		if sp.near, err = sp.s.newPool(); err != nil {
			return 0, err
		}
		sp.loop.push(&slotsMade{sp, sp.near})
	}
	if c.near != nil && !sp.given {
		self, err := sp.s.e.local()
		if err != nil {
			return 0, err
		}
		sp.given = true
		sp.loop.push(&localGiven{&sp.local, self, nil})
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
			return 0, err
		}
		sp.windows[c.by] = w
		sp.loop.push(&windowMade{sp, w})
	}
	return min(slots, w.slots), nil
}

// remember keeps a way for the batches to come.
func (sp *stagedPeer) remember(local *Region, remote *Remote, durable bool, c chain) error {
	key, err := sp.key(remote)
	if err != nil {
		return err
	}
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if m := sp.remotes[key]; m != nil {
		m.chains[shape(local, durable)] = c
	}
	return nil
}

// knows reports whether a way is remembered.
func (sp *stagedPeer) knows(local *Region, remote *Remote, durable bool) bool {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	m := sp.remotes[sp.keys[remote]]
	if m == nil {
		return false
	}
	_, ok := m.chains[shape(local, durable)]
	return ok
}

// unlearn forgets the ways that go by a lane whose connection is lost.
func (sp *stagedPeer) unlearn(l *lane) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	for _, m := range sp.remotes {
		maps.DeleteFunc(m.chains, func(_ uint64, c chain) bool { return c.by == l })
	}
}

func (sp *stagedPeer) isClosed() bool {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	return sp.closed
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

// Drop implements driver.Peer.
func (sp *stagedPeer) Drop(key uint32) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	if m := sp.remotes[key]; m != nil {
		delete(sp.keys, m.Remote)
		delete(sp.remotes, key)
	}
}

// Can implements driver.Peer. Messages go by other lanes.
func (sp *stagedPeer) Can() driver.Can { return driver.CanPattern | driver.CanDurable }

// Explain implements driver.Peer; the engine describes chains itself.
func (sp *stagedPeer) Explain(_, _ uint32) string { return "" }

// Lost implements driver.Peer.
func (sp *stagedPeer) Lost() <-chan struct{} { return sp.lost }

// Submit implements driver.Peer. The last hop of each piece of a durable batch is a
// durable one.
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
	return sp.submit(j)
}

func (sp *stagedPeer) submit(j *stagedJob) error {
	if err := j.look(); err != nil {
		return err
	}
	if sp.pending.Add(1) > stagedJobs {
		sp.pending.Add(-1)
		return ErrFull
	}
	sp.mu.Lock()
	defer sp.mu.Unlock() // so that none comes behind the end
	if sp.closed || !sp.loop.push(j) {
		sp.pending.Add(-1)
		return ErrClosed
	}
	return nil
}

// Cancel implements driver.Peer.
func (sp *stagedPeer) Cancel(tag uint64) { sp.loop.push(&stagedCancel{sp, tag}) }

// Close implements driver.Peer. A peer that does not answer for what it has in hand is
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
	ended := &stagedClose{sp: sp, done: make(chan struct{})}
	if !sp.loop.push(ended) {
		return nil
	}
	if !waitFor(ended.done, sp.s.e.cfg.AbortGrace/2) {
		sp.loop.push(&stagedForce{sp})
		waitFor(ended.done, closeMax)
	}
	released := &stagedRelease{sp: sp, done: make(chan struct{})}
	if sp.loop.push(released) {
		<-released.done
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

// stagedCancel ends a batch early.
type stagedCancel struct {
	sp  *stagedPeer
	tag uint64
}

func (c *stagedCancel) happen() {
	if j := c.sp.jobs[c.tag]; j != nil {
		c.sp.end(j, ErrAborted)
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
	sp.feed()
}

// stagedClose ends all batches; done is closed when no hop is under way, but for those that
// were given up.
type stagedClose struct {
	sp   *stagedPeer
	done chan struct{}
	told bool
}

func (c *stagedClose) happen() {
	c.sp.closing = c
	for _, j := range c.sp.jobs {
		c.sp.end(j, ErrClosed)
	}
	c.sp.feed()
}

// stagedForce ends what waits for an answer of the peer, or will.
type stagedForce struct{ sp *stagedPeer }

func (f *stagedForce) happen() {
	f.sp.forced = true
	for _, s := range f.sp.slots {
		s.giveUp(false)
	}
	f.sp.feed()
}

// carrierLost ends what waits for an answer that came by a lane.
type carrierLost struct {
	sp   *stagedPeer
	lane *lane
}

func (c *carrierLost) happen() {
	c.sp.unlearn(c.lane)
	for _, s := range c.sp.slots {
		if s.job != nil && s.c.by == c.lane {
			s.giveUp(true)
		}
	}
	c.sp.feed()
}

// stagedRelease gives the slots back.
type stagedRelease struct {
	sp   *stagedPeer
	done chan struct{}
}

func (r *stagedRelease) happen() {
	s, pool, lost := r.sp.s, r.sp.near, false
	var notices []*Transfer
	for _, slot := range r.sp.slots {
		lost = !slot.close() || lost
		if slot.notice != nil {
			notices = append(notices, slot.notice)
		}
	}
	s.e.running.Add(1)
	go func() { // the proof may take an event of this loop
		defer s.e.running.Done()
		defer close(r.done)
		pool.close(s, lost)
		for _, t := range notices {
			_ = t.stopAndClose(s.e.cfg.AbortGrace)
		}
	}()
}
