// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine/internal/exchange"
)

// sumWay is how the sums of a connection's transfers are asked for and compared. One
// goroutine compares; it sleeps while nothing has been answered.
type sumWay struct {
	conn *conn
	s    *stager
	self bool // the peer is this engine: no request goes

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

// audit makes the way of a connection, once.
func (c *conn) audit() error {
	if c.sums.Load() != nil {
		return nil
	}
	var err error
	switch {
	case c.lane == c.peer.e.stager.lane:
		err = fmt.Errorf("chains of backends are not summed: both sides must be DRAM: %w",
			ErrNotSupported)
	case !c.peer.isSelf() && !c.carries(false):
		err = fmt.Errorf("it carries no messages: name another by Route.Only: %w", ErrNotSupported)
	default:
		err = c.startSums()
	}
	if err != nil {
		return &OpError{Op: "checksum", Backend: c.lane.caps.Name, Peer: c.peer.name, Err: err}
	}
	return nil
}

// startSums begins the goroutine, unless the peer is closed.
func (c *conn) startSums() error {
	p := c.peer
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return ErrClosed
	case c.sums.Load() != nil:
		return nil
	}
	w := &sumWay{conn: c, s: p.e.stager, self: p.isSelf(), wake: make(chan struct{}, 1)}
	p.e.running.Add(1) // the Peer is open, so Engine.Close has not come to wait
	go w.run()
	c.sums.Store(w)
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

// push hands a batch to the goroutine. When that has ended, so does the batch.
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

// look compares one batch, which is sumWorking: no other goroutine ends it, so its memory stays.
func (w *sumWay) look(x sumWork) {
	_, _, bit := untag(x.tag)
	s := x.t.batches[x.t.sums.batch[bit]].sum
	answer := x.t.sums.heard[bit]
	if w.self {
		answer = w.s.sumFor(w.conn.lane, exchange.SumBody(s.request), nil)
	}
	w.finish(x, s.judge(answer, w.conn.peer.name))
}

// judge is the outcome that an answer makes: a code, and then sums.
func (s *summing) judge(answer []byte, peer string) error {
	if len(answer) == 0 || answer[0] != 0 {
		err := exchange.ParseOutcome(answer)
		return &OpError{Op: "checksum of " + s.op.String(), Peer: peer, Err: err}
	}
	return s.compare(answer[1:], peer)
}

func (w *sumWay) finish(x sumWork, err error) {
	_, _, bit := untag(x.tag)
	x.t.sums.heard[bit] = nil
	x.t.sums.state[bit].Store(sumIdle)
	w.end()
	x.t.endBatch(w.conn.lane, x.t.look().generation(), bit, err)
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
	if t == nil || bit >= batchesInFlight {
		return
	}
	of, ok := t.holdPost()
	if !ok {
		return
	}
	defer t.letGo()
	if of&(1<<generationBits-1) != generation {
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

// close ends the goroutine, once what is answered is compared.
func (w *sumWay) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// forsake ends the waits of all transfers for answers that came by a connection.
func (c *conn) forsake(why error) {
	if c.sums.Load() == nil {
		return
	}
	e := c.peer.e
	for i := range e.slots.live {
		t := e.slots.live[i].Load()
		if t == nil || t.p != c.peer {
			continue
		}
		if _, ok := t.holdPost(); ok {
			t.forsakeAll(c, why)
			t.letGo()
		}
	}
}
