// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// Receive implements driver.Backend. It takes from each connection in turn, and
// begins with another one each time.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	if b.closed.Load() {
		return 0, driver.ErrClosed
	}
	accepted, dialled := *b.inbound.Load(), *b.peers.Load()
	all, n := len(accepted)+len(dialled), 0
	for i := range all {
		if n == len(msgs) {
			break
		}
		at := (b.turn + i) % all
		if at >= len(accepted) {
			n += dialled[at-len(accepted)].receive(msgs[n:])
			continue
		}
		c := accepted[at]
		n += c.receive(msgs[n:])
		if c.finished() {
			b.forget(c)
		}
	}
	b.turn++
	return n, nil
}

// receive takes notifications of one peer, and at the end the news that it is lost.
func (c *inbound) receive(msgs []driver.Message) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return 0
	}
	n, wake := c.in.receive(c.conn, msgs)
	if wake && c.event >= 0 {
		signal(c.event)
	}
	if c.in.corrupt {
		c.drop()
	}
	if n < len(msgs) && c.gone && !c.said {
		c.said = true
		msgs[n] = driver.Message{Conn: c.conn, Err: driver.ErrPeerLost}
		n++
	}
	return n
}

// arm asks the peer for a wake-up, and reports whether something is there already.
func (c *inbound) arm() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return false
	}
	return c.in.arm() || c.gone && !c.said
}

// receive takes answers of the owner.
func (p *peer) receive(msgs []driver.Message) int {
	p.answerMu.Lock()
	defer p.answerMu.Unlock()
	if p.answers.mem == nil {
		return 0
	}
	n, wake := p.answers.receive(p.conn, msgs)
	if wake {
		signal(p.event)
	}
	if p.answers.corrupt {
		_ = p.sock.Close() // the reader ends by it, and the peer is lost
	}
	return n
}

func (p *peer) arm() bool {
	p.answerMu.Lock()
	defer p.answerMu.Unlock()
	return p.answers.mem != nil && p.answers.arm()
}

// Answer implements driver.Backend: it goes by the second ring of the connection.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if b.closed.Load() {
		return driver.ErrClosed
	}
	if len(msg) > messageMax {
		return fmt.Errorf("answer of %d bytes, at most %d: %w", len(msg), messageMax,
			driver.ErrBounds)
	}
	list := *b.inbound.Load() // in the order of their numbers
	i, ok := slices.BinarySearchFunc(list, conn, func(c *inbound, conn uint64) int {
		return int(int64(c.conn - conn))
	})
	if !ok {
		return driver.ErrPeerLost
	}
	return list[i].answer(msg)
}

func (c *inbound) answer(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil || c.gone || c.event < 0 {
		return driver.ErrPeerLost
	}
	e, err := c.out.reserve(msg)
	if err != nil {
		return err
	}
	if c.out.show(e, true) {
		signal(c.event)
	}
	return nil
}
