// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"net"
	"time"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// handshakesMax bounds the control connections that have not said hello, or are refused.
const handshakesMax = 64

// accept takes control connections until the listener is closed.
func (b *Backend) accept(l net.Listener) {
	_ = b.lobby.Serve(l, func(conn net.Conn, v *session.Visit) bool {
		return b.tasks.Start(func() { b.serve(conn, v) })
	})
}

// serve is our end of a connection, from its hello to its end.
func (b *Backend) serve(conn net.Conn, v *session.Visit) {
	if !v.Wait() {
		return
	}
	defer v.Leave()
	c := &inbound{b: b, ch: newChannel(conn, &b.cfg), visit: v,
		knows: make(map[*memory]struct{})}
	defer func() {
		c.ch.wait()
		if c.counted {
			b.mu.Lock()
			b.admitted.Add(v.Host, -1)
			b.mu.Unlock()
		}
	}()
	if !b.watch(c) {
		c.ch.close(driver.ErrClosed)
		return
	}
	defer b.unwatch(c)
	h := c.hear()
	if h == nil {
		c.ch.close(driver.ErrCorrupt)
		return
	}
	c.ch.start()
	if err := c.open(h); err != nil {
		c.ch.send((&welcome{status: session.StatusOf(err)}).encode())
		c.ch.farewell(b.cfg.Grace)
		return
	}
	c.run()
}

// watch has Close end the connection, unless it has begun.
func (b *Backend) watch(c *inbound) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.accepted == nil {
		return false
	}
	b.accepted[c] = struct{}{}
	return true
}

func (b *Backend) unwatch(c *inbound) {
	b.mu.Lock()
	delete(b.accepted, c)
	b.mu.Unlock()
}

// hear waits for the hello; nil: something else came, or nothing.
func (c *inbound) hear() *hello {
	limit := clock.AfterRunning(c.b.cfg.clock, c.b.cfg.hello, func() { c.hurry(aLongTimeAgo) })
	m, err := c.ch.receive()
	if !limit.Stop() || err != nil {
		return nil
	}
	h, ok := m.(*hello)
	if !ok || len(h.pairs) == 0 {
		return nil
	}
	c.hurry(time.Time{})
	return h
}

// hurry sets until when the peer must say something, unless we close.
func (c *inbound) hurry(deadline time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.quitting {
		_ = c.ch.conn.SetReadDeadline(deadline) // fails only where it is closed
	}
}

// open makes our end of the queue pairs and welcomes the peer; an error is why not.
func (c *inbound) open(h *hello) error {
	if _, err := decodeAddress(h.from); err != nil {
		return fmt.Errorf("a hello without an address: %w", driver.ErrCorrupt)
	}
	if h.to != c.b.address.owner || c.b.gate.IsShut() {
		return driver.ErrPeerLost // the backend that it means is gone, and we have its place
	}
	c.b.mu.Lock()
	err := c.b.admitted.Take(c.visit.Host, "peers", "ConnsMax")
	c.b.mu.Unlock()
	if err != nil {
		return err
	}
	c.counted = true
	if !c.visit.Leave() {
		return driver.ErrPeerLost // another connection has its place
	}
	link, err := c.b.net.connect(false, 0)
	if err != nil {
		return err
	}
	c.link = link
	c.b.add(link.ID(), c)
	w := welcome{}
	for i := range h.pairs {
		o := &h.pairs[i]
		if int(o.rail) >= len(c.b.rails) {
			o.rail = 0 // of a peer that makes rails up: its queue pair leads nowhere
		}
		c.rails = append(c.rails, int(o.rail))
		w.pairs = append(w.pairs, c.make(i, &o.end))
	}
	c.ch.send(w.encode())
	return nil
}

// make makes and begins our end of a queue pair.
func (c *inbound) make(pair int, theirs *verbs.End) pairAnswer {
	end, err := c.link.PairMake(pair, c.rails[pair])
	if err != nil {
		return pairAnswer{}
	}
	if c.link.PairBegin(pair, *theirs) != nil {
		_ = c.link.PairEnd(pair) // there is nothing to lose
		return pairAnswer{}
	}
	return pairAnswer{there: true, end: end}
}
