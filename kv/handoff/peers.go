// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// groupSide is a GroupSender or a GroupReceiver.
type groupSide interface {
	lost(other int)
	Close() error
}

// peers keeps a group for each peer of a Sender or a Receiver: a group of one rank, whose other
// group is that peer. It closes the member of a peer that is lost.
type peers[M groupSide] struct {
	make func(*layout.Plan, *engine.Peer) (M, error)
	own  *layout.Geometry
	// sends says which of the two sides of a plan this one is.
	sends bool

	mu     sync.Mutex // not taken by handlers of a Mux
	closed bool
	of     map[[16]byte]*peerGroup[M] // by engine
}

type peerGroup[M groupSide] struct {
	peer  *engine.Peer
	shape shape
	group M
	gone  chan struct{} // closed when group is
	once  sync.Once
	err   error // of Close
}

// get returns the member for the engine of a peer that keeps its blocks in this way. It uses one
// connection to each engine, until that is lost. A member of a lost one, or for another pool of
// that engine, is closed first; ctx bounds the wait.
func (p *peers[M]) get(ctx context.Context, peer *engine.Peer, s shape) (M, error) {
	for {
		m, err := p.find(peer, s)
		if err != nil || m.shape == s && (m.peer == peer || !isLost(m.peer)) {
			return m.group, err
		}
		go p.drop(m)
		select {
		case <-m.gone:
		case <-ctx.Done():
			return m.group, context.Cause(ctx)
		}
	}
}

// find returns the member of an engine, and makes it if there is none.
func (p *peers[M]) find(peer *engine.Peer, s shape) (*peerGroup[M], error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	none := &peerGroup[M]{}
	if p.closed {
		return none, engine.ErrClosed
	}
	if m := p.of[peer.ID()]; m != nil {
		return m, nil
	}
	there, err := p.own.Pool(s.order, s.blocks, s.stride)
	if err != nil {
		return none, err
	}
	from, to := p.own.Side("kv"), there.Side("kv")
	from.Model, to.Model = "pool", "pool" // sides may call it by different names
	if !p.sends {
		from, to = to, from
	}
	plan, err := layout.NewPlan([]*layout.Side{from}, []*layout.Side{to})
	if err != nil {
		return none, err
	}
	m := &peerGroup[M]{peer: peer, shape: s, gone: make(chan struct{})}
	if m.group, err = p.make(plan, peer); err != nil {
		return none, fmt.Errorf("meet %s: %w", peer.Name(), err)
	}
	p.of[peer.ID()] = m
	go func() {
		select {
		case <-peer.Lost():
			m.group.lost(0) // before Close, which has another reason
			p.drop(m)
		case <-m.gone:
		}
	}()
	return m, nil
}

// drop closes a member and takes it out.
func (p *peers[M]) drop(m *peerGroup[M]) {
	m.once.Do(func() {
		if err := m.group.Close(); !isLost(m.peer) { // else it is for that reason
			m.err = err
		}
		p.mu.Lock()
		if p.of[m.peer.ID()] == m {
			delete(p.of, m.peer.ID())
		}
		p.mu.Unlock()
		close(m.gone)
	})
	<-m.gone
}

// close closes all members; get makes no more.
func (p *peers[M]) close() error {
	p.mu.Lock()
	p.closed = true
	var list []*peerGroup[M]
	for _, m := range p.of {
		list = append(list, m)
	}
	p.mu.Unlock()
	var all sync.WaitGroup
	for _, m := range list {
		all.Go(func() { p.drop(m) })
	}
	all.Wait()
	var errs []error
	for _, m := range list {
		errs = append(errs, m.err)
	}
	return errors.Join(errs...)
}

func isLost(peer *engine.Peer) bool {
	select {
	case <-peer.Lost():
		return true
	default:
		return false
	}
}
