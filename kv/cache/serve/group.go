// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// Group lets one engine have clients of many servers. The engine's notifications are the group's
// until Close: it hands each answer to the client that waits for it.
type Group struct {
	// Grace is how long a Load, and what is as it, waits for the word that nothing of it runs any
	// more once its context has ended. Default 2 s. It is set before the first Dial.
	Grace time.Duration

	e    *engine.Engine
	life context.Context // ends with Close
	stop context.CancelFunc
	read chan struct{} // closed when nothing reads notifications any more

	mu      sync.Mutex // guards what follows
	clients map[*engine.Peer]*Client
	ending  []*Client          // that are lost or closed: answers of them may have come
	wake    context.CancelFunc // has the reader end those once it has read what is there
	over    bool               // the reader has ended
}

// NewGroup begins to read the engine's notifications.
func NewGroup(e *engine.Engine) *Group {
	g := &Group{e: e, read: make(chan struct{}), clients: map[*engine.Peer]*Client{},
		wake: func() {}}
	g.life, g.stop = context.WithCancel(context.Background())
	go g.run()
	return g
}

// Close ends all clients that are left, as a lost server does: Client.Close of each revokes its
// leases, before or afterwards.
func (g *Group) Close() {
	g.stop()
	<-g.read
}

// Dial connects to a server at an address, as Engine.Dial does.
func (g *Group) Dial(ctx context.Context, network, address string) (*Client, error) {
	p, err := g.e.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return g.Meet(ctx, p)
}

// Meet makes a client of a server that was dialled, and of which no client was made. Its Close, and
// an error of Meet, close the peer.
func (g *Group) Meet(ctx context.Context, p *engine.Peer) (*Client, error) {
	c := &Client{peer: p, group: g, ended: make(chan struct{}),
		room: make(chan struct{}, requestsMax), attaching: make(chan struct{}, 1),
		grace:   cmp.Or(g.Grace, cancelGrace),
		waiting: map[uint64]chan []byte{}, regions: map[*engine.Region]attached{}}
	var life context.Context
	life, c.cancel = context.WithCancel(g.life)
	g.mu.Lock()
	if g.over {
		g.mu.Unlock()
		return nil, errors.Join(fmt.Errorf("meet the cache: the group: %w", engine.ErrClosed),
			p.Close())
	}
	g.clients[p] = c
	g.mu.Unlock()
	go func() {
		select {
		case <-p.Lost():
		case <-life.Done():
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		if !g.over {
			g.ending = append(g.ending, c)
			g.wake()
		}
	}()
	if err := c.Ping(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("meet the cache: %w", err), c.Close(ctx))
	}
	return c, nil
}

// run reads until the group or the engine is closed. A client that is lost ends once the answers
// that had come before are handed out, or as many notifications as the engine has room for.
func (g *Group) run() {
	defer close(g.read)
	for g.life.Err() == nil {
		woken, wake := context.WithCancel(g.life)
		g.mu.Lock()
		g.wake = wake
		if len(g.ending) > 0 {
			wake()
		}
		g.mu.Unlock()
		for late := 0; late < drainMax; {
			n, err := g.e.Next(woken)
			if err != nil {
				if !errors.Is(err, context.Canceled) { // the engine is closed
					g.stop()
				}
				break
			}
			g.hand(n)
			if woken.Err() != nil {
				late++
			}
		}
		wake()
		g.mu.Lock()
		for _, c := range g.ending {
			g.end(c)
		}
		g.ending = nil
		g.mu.Unlock()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.over = true
	for _, c := range g.clients {
		g.end(c)
	}
}

// drainMax bounds the notifications that go before the end of a client that is lost.
const drainMax = 1 << 12

// hand gives an answer to the request that waits for it.
func (g *Group) hand(n engine.Notification) {
	g.mu.Lock()
	c := g.clients[n.Peer]
	if c != nil && n.Err != nil { // the server has closed, or lost, a connection that answers took
		g.end(c)
	}
	g.mu.Unlock()
	if c == nil || n.Err != nil {
		return
	}
	what, id, body := readHead(n.Data)
	if what != kindAnswered {
		return
	}
	if to := c.answered(id); to != nil {
		to <- body // it has room
	}
}

// end says that no answer comes to a client any more. The caller holds the lock.
func (g *Group) end(c *Client) {
	if g.clients[c.peer] != c {
		return
	}
	delete(g.clients, c.peer)
	c.cancel()
	close(c.ended)
}
