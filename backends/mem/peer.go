// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"context"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

type peer struct {
	driver.PeerBase // this backend needs no Help

	from, to *Backend
	conn     uint64 // from's number of the connection
	lost     chan struct{}
	loseOnce sync.Once

	entry  sync.RWMutex // held for reading while Submit runs, so that Close can wait for it
	closed bool         // guarded by entry

	mu         sync.RWMutex // guards what follows; never held while copying
	imports    session.Imports[memory]
	flying     map[uint64]*job // batches that workers copy, by tag
	unfinished int             // flying, and batches whose worker has still to complete them
	idle       *sync.Cond      // signalled when unfinished becomes 0

	sender  session.Sender // notifications; its Conn is to's number of the connection
	answers session.Sender // answers of the owner
}

// Connect implements driver.Backend.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	registry.RLock()
	to := registry.byAddr[string(addr)]
	registry.RUnlock()
	if to == nil {
		return nil, fmt.Errorf("connect with mem: no such backend in this process: %w",
			driver.ErrPeerLost)
	}
	p := &peer{from: b, to: to, conn: b.box.NewConn(),
		lost: make(chan struct{}), flying: map[uint64]*job{},
		sender:  session.Sender{From: &b.box, To: &to.box, Conn: to.box.NewConn()},
		answers: session.Sender{From: &to.box, To: &b.box}}
	p.answers.Conn = p.conn
	p.idle = sync.NewCond(&p.mu)
	if err := b.admit(b.peers, p.conn, p); err != nil {
		return nil, err
	}
	if err := to.admit(to.senders, p.sender.Conn, p); err != nil {
		_ = p.Close()
		return nil, fmt.Errorf("connect with mem: %w", driver.ErrPeerLost)
	}
	return p, nil
}

func (b *Backend) admit(set map[uint64]*peer, conn uint64, p *peer) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return driver.ErrClosed
	}
	set[conn] = p
	return nil
}

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.conn }

// Import implements driver.Peer.
func (p *peer) Import(token []byte) (key uint32, size uint64, err error) {
	p.entry.RLock()
	defer p.entry.RUnlock()
	if p.closed {
		return 0, 0, driver.ErrClosed
	}
	if p.to.closed.Load() {
		return 0, 0, driver.ErrPeerLost
	}
	t, err := session.DecodeToken(token, &p.to.owner)
	if err != nil {
		return 0, 0, err
	}
	m := p.to.memories.At(t.Key)
	if err := m.checkToken(&t); err != nil {
		return 0, 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if key, err = p.imports.Add(m); err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	return key, t.Size, nil
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.imports.Drop(key)
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lost }

// lose ends the connection; the owner or the initiator may call it. No new batch starts afterwards.
func (p *peer) lose() {
	p.loseOnce.Do(func() {
		close(p.lost)
		p.to.mu.Lock()
		_, known := p.to.senders[p.sender.Conn]
		delete(p.to.senders, p.sender.Conn)
		p.to.mu.Unlock()
		if known {
			p.to.box.DeliverLoss(p.sender.Conn)
		}
	})
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if j := p.flying[tag]; j != nil {
		j.cancel.CompareAndSwap(nil, &driver.ErrAborted)
	}
}

// Close implements driver.Peer.
func (p *peer) Close() error {
	p.entry.Lock()
	p.closed = true
	p.entry.Unlock()
	p.mu.Lock()
	for _, j := range p.flying {
		j.cancel.CompareAndSwap(nil, &driver.ErrClosed)
	}
	for p.unfinished > 0 {
		p.idle.Wait()
	}
	p.imports = session.Imports[memory]{}
	p.mu.Unlock()
	p.lose()
	p.from.mu.Lock()
	delete(p.from.peers, p.conn)
	p.from.mu.Unlock()
	return nil
}

// Explain implements driver.Peer.
func (p *peer) Explain(_, _ uint32) string { return "one copy within the process" }
