// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// sumWay is how the sums of a connection's transfers are asked for and compared. One
// goroutine compares; it sleeps while nothing has been answered.
type sumWay struct {
	conn   *conn
	s      *stager
	self   bool   // the peer is this engine: nobody is asked
	far    []byte // whom messages are for
	nonce  uint64 // names us in the peer's messages
	number uint64 // names the audit in ours

	ready chan []byte  // what it said when it was asked
	asked atomic.Int64 // batches under way

	mu     sync.Mutex // guards what follows
	queue  []sumWork
	closed bool
	wake   chan struct{}
}

// sumWork is a batch that can be compared: its bytes are there, and so is the answer.
type sumWork struct {
	t   *Transfer
	tag uint64
}

// asksMax is how many batches of a connection may be under way: the peer keeps no more for us.
const asksMax = 16

// audit makes the way of a connection, once. It waits for the peer.
func (c *conn) audit() error {
	if c.sums.Load() != nil {
		return nil
	}
	c.auditing.Lock()
	defer c.auditing.Unlock()
	if c.sums.Load() != nil {
		return nil
	}
	w, err := c.openAudit()
	if err != nil {
		return &OpError{Op: "checksum", Backend: c.lane.caps.Name, Peer: c.peer.name, Err: err}
	}
	c.sums.Store(w)
	return nil
}

func (c *conn) openAudit() (*sumWay, error) {
	e := c.peer.e
	sp := c.peer.staged().p.(*stagedPeer)
	w := &sumWay{conn: c, s: e.stager, self: c.peer.isSelf(), far: sp.far, nonce: rand.Uint64(), ready: make(chan []byte, 1), wake: make(chan struct{}, 1)}
	switch {
	case c.lane == e.stager.lane:
		return nil, fmt.Errorf("chains of backends are not summed: both sides must be DRAM: %w", ErrNotSupported)
	case w.self:
		return w, w.start()
	case c.notifier == nil:
		return nil, fmt.Errorf("it carries no messages: name another by Route.Only: %w", ErrNotSupported)
	case w.far == nil:
		return nil, fmt.Errorf("the peer's engine serves no requests of ours, its Config.StagingBytes is too small: %w", ErrNotSupported)
	}
	w.s.enlistWay(w.nonce, w)
	err := w.introduce(sp.life, sp)
	if err == nil {
		err = w.start()
	}
	if err != nil {
		w.s.enlistWay(w.nonce, nil)
		return nil, err
	}
	return w, nil
}

// introduce asks the peer's engine to sum for us.
func (w *sumWay) introduce(life context.Context, sp *stagedPeer) error {
	ctx, cancel := context.WithTimeout(life, w.s.e.cfg.ConnectTimeout)
	defer cancel()
	msg, err := w.s.introduction(w.far, isAuditHello, w.nonce, w.conn.lane)
	if err == nil {
		err = sp.say(ctx, w.conn.lane, msg)
	}
	if err != nil {
		return err
	}
	select {
	case body := <-w.ready:
		if len(body) < 8+1 {
			return fmt.Errorf("an answer of %d bytes: %w", len(body), ErrCorrupt)
		}
		w.number = binary.LittleEndian.Uint64(body)
		return parseOutcome(body[8:])
	case <-w.conn.gone:
		return ErrPeerLost
	case <-ctx.Done():
		return fmt.Errorf("no answer: its engine must be able to connect to this one with %s, and know of checksums: %w", w.conn.lane.caps.Name, driver.ContextError(ctx))
	}
}

// start begins the goroutine, unless the peer is closed.
func (w *sumWay) start() error {
	e := w.s.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	e.running.Add(1)
	go w.run()
	return nil
}

// begin takes a place for a batch; there may be none.
func (w *sumWay) begin() bool {
	if w.asked.Add(1) > asksMax {
		w.asked.Add(-1)
		return false
	}
	return true
}

func (w *sumWay) end() { w.asked.Add(-1) }

// name puts the tag into a request that is about to go.
func (w *sumWay) name(request []byte, tag uint64) {
	binary.LittleEndian.PutUint64(request[sumTagAt:], tag)
}

// push hands a batch to the goroutine. When that has ended nobody compares: the batch ends.
func (w *sumWay) push(x sumWork) {
	w.mu.Lock()
	closed := w.closed
	if !closed {
		w.queue = append(w.queue, x)
	}
	w.mu.Unlock()
	if closed {
		w.finish(x, ErrClosed)
		return
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *sumWay) run() {
	defer w.s.e.running.Done()
	var work []sumWork
	for {
		w.mu.Lock()
		work, w.queue = w.queue, work[:0]
		closed := w.closed
		w.mu.Unlock()
		for i := range work {
			w.look(work[i])
			work[i] = sumWork{}
		}
		if len(work) > 0 {
			continue
		}
		if closed {
			return
		}
		<-w.wake
	}
}

// look compares one batch, which is sumWorking: nobody else ends it, so its memory stays.
func (w *sumWay) look(x sumWork) {
	_, _, bit := untag(x.tag)
	s := x.t.batches[x.t.sums.batch[bit]].sum
	answer := x.t.sums.heard[bit]
	if w.self {
		answer = w.s.sumFor(w.conn.lane, s.request[headBytes:], nil)
	}
	w.finish(x, s.judge(answer, w.conn.peer.name))
}

// judge is the outcome that an answer makes: a code, and then sums.
func (s *summing) judge(answer []byte, peer string) error {
	if len(answer) == 0 || answer[0] != 0 {
		err := parseOutcome(answer)
		return &OpError{Op: "checksum of " + s.op.String(), Peer: peer, Err: err}
	}
	return s.compare(answer[1:], peer)
}

func (w *sumWay) finish(x sumWork, err error) {
	_, _, bit := untag(x.tag)
	x.t.sums.heard[bit] = nil
	x.t.sums.state[bit].Store(sumIdle)
	w.end()
	x.t.endBatch(w.conn.lane, bit, err)
	w.conn.lane.poll() // what may go now, and may have ended
}

// heard takes an answer.
func (w *sumWay) heard(body []byte) {
	if len(body) < 8+1 {
		return
	}
	tag := binary.LittleEndian.Uint64(body)
	slot, generation, bit := untag(tag)
	t := w.s.e.slots.get(slot)
	if t == nil || bit >= batchesInFlight || !t.grip() {
		return
	}
	defer t.letGo()
	if t.generation.Load()&(1<<generationBits-1) != generation {
		return
	}
	s := t.summed(bit)
	if s == nil || s.way != w {
		return
	}
	state := &t.sums.state[bit]
	switch state.Load() {
	case sumFlying:
		t.sums.heard[bit] = body[8:]
		if !state.CompareAndSwap(sumFlying, sumHeard) { // moved meanwhile
			w.work(t, tag, state)
		}
	case sumMoved:
		t.sums.heard[bit] = body[8:]
		w.work(t, tag, state)
	}
}

func (w *sumWay) work(t *Transfer, tag uint64, state *atomic.Uint32) {
	if state.CompareAndSwap(sumMoved, sumWorking) {
		w.push(sumWork{t, tag})
	}
}

// close ends the goroutine, once what is answered is compared, and says goodbye.
func (w *sumWay) close(sp *stagedPeer) {
	w.mu.Lock()
	was := w.closed
	w.closed = true
	w.mu.Unlock()
	if was {
		return
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
	if w.self {
		return
	}
	w.s.enlistWay(w.nonce, nil)
	if w.conn.isLost() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), w.s.e.cfg.AbortGrace)
	defer cancel()
	_ = sp.say(ctx, w.conn.lane, binary.LittleEndian.AppendUint64(appendHead(nil, w.far, isAuditBye), w.number))
}

// enlistWay makes a way known by its nonce, or forgets it.
func (s *stager) enlistWay(nonce uint64, w *sumWay) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w == nil {
		delete(s.ways, nonce)
		return
	}
	s.ways[nonce] = w
}

// forsake ends the waits of all transfers for answers that came by a connection.
func (c *conn) forsake(why error) {
	if c.sums.Load() == nil {
		return
	}
	e := c.peer.e
	for i := range e.slots.live {
		t := e.slots.live[i].Load()
		if t == nil || t.p != c.peer || !t.grip() {
			continue
		}
		t.forsakeAll(c, why)
		t.letGo()
	}
}
