// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// answersMax is how many answers of one connection may be on their way or not received.
const answersMax = 64

// replies counts what an owner has answered over one connection. Answers go over the
// control connection, which keeps their order; the initiator tells how many its program
// has taken, which makes room for more.
type replies struct {
	sent, taken uint64
	refused     bool // an Answer found no room
	over        bool // the connection has ended
}

// Answer implements driver.Backend.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if !b.gate.Enter() {
		return driver.ErrClosed
	}
	defer b.gate.Exit()
	if len(msg) > messageMax {
		return driver.ErrBounds
	}
	c, accepted := b.end(conn).(*inbound)
	if !accepted {
		return driver.ErrPeerLost
	}
	return c.reply(msg)
}

func (c *inbound) reply(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.replies
	if !r.over && r.sent-r.taken >= answersMax {
		r.refused = true
		return driver.ErrFull
	}
	if r.over || !c.ch.send((&answer{data: msg}).encode()) {
		return driver.ErrPeerLost
	}
	r.sent++
	return nil
}

// credited notes how many answers the peer's program has taken, and reports whether that
// makes sense.
func (c *inbound) credited(taken uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.replies
	if taken < r.taken || taken > r.sent {
		return false
	}
	r.taken = taken
	if r.refused {
		r.refused = false
		c.b.roomForAnswers()
	}
	return true
}

// endReplies has Answer say that the connection has ended.
func (c *inbound) endReplies() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.replies.over = true
	if c.replies.refused {
		c.b.roomForAnswers() // it is to learn that there will be none
	}
}

// roomForAnswers wakes a program whose Answer found no room.
func (b *Backend) roomForAnswers() {
	b.answers.room.Store(true)
	b.wake()
}

// answers holds what owners have answered over connections of ours, until Receive.
type answers struct {
	room atomic.Bool // an Answer of ours that found no room may find some now

	waiting atomic.Int64 // of list: looked at before the lock
	mu      sync.Mutex
	list    []answered
}

type answered struct {
	p    *peer
	data []byte
}

// add puts an answer into the list, and reports whether the owner kept to its bound.
func (a *answers) add(p *peer, data []byte) bool {
	a.mu.Lock()
	p.answersIn++
	fits := p.answersIn-p.answersOut <= answersMax
	if fits {
		a.list = append(a.list, answered{p, data})
		a.waiting.Add(1)
	}
	a.mu.Unlock()
	if fits {
		p.b.wake()
	}
	return fits
}

// ready reports whether there is an answer, or, once, that there is room again.
func (a *answers) ready() bool {
	return a.room.Load() && a.room.Swap(false) || a.waiting.Load() > 0
}

// take fills msgs with answers, and tells their owners.
func (a *answers) take(msgs []driver.Message) int {
	if a.waiting.Load() == 0 {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n := min(len(msgs), len(a.list))
	for i, x := range a.list[:n] {
		msgs[i] = driver.Message{Conn: x.p.Conn(), Data: x.data}
		x.p.answersOut++
		if x.p.answersOut%(answersMax/4) == 0 {
			x.p.ch.send((&answersTaken{count: x.p.answersOut}).encode())
		}
	}
	a.list = slices.Delete(a.list, 0, n)
	a.waiting.Add(int64(-n))
	return n
}

// forget drops what came over a connection that the program has closed.
func (a *answers) forget(p *peer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.list)
	a.list = slices.DeleteFunc(a.list, func(x answered) bool { return x.p == p })
	a.waiting.Add(int64(len(a.list) - n))
}
