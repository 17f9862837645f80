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

// pairConfig is that of a group of one rank, whose other group is one peer. Its plan says which
// layers there are and how many tokens a block has, and names one byte of each token: where the
// bytes of a block lie, its lease and the geometry say.
func pairConfig(p *engine.Peer, r *engine.Region, g *layout.Geometry, l Limits) (GroupConfig,
	error) {
	side := &layout.Side{Version: layout.SideVersion, Model: "pool",
		Regions: []layout.Area{{Name: "kv", Bytes: g.PoolBytes()}},
		Groups:  []layout.Group{{Blocks: uint32(g.Blocks())}}}
	for i := range g.Layers() {
		side.Views = append(side.Views, layout.View{Layer: i, Part: "all", DType: "bytes", Cell: 1,
			Units: 1, Count: 1, Tokens: g.Tokens(), Token: 1, Block: g.Stride()})
	}
	plan, err := layout.NewPlan([]*layout.Side{side}, []*layout.Side{side})
	return GroupConfig{Plan: plan, Regions: []*engine.Region{r}, Peers: []*engine.Peer{p},
		Limits: l, Edge: func(e *layout.Edge) { e.Op = engine.Write }, blocks: g}, err
}

// groupSide is a GroupSender or a GroupReceiver.
type groupSide interface {
	lost(other int)
	Close() error
}

// peers keeps a group for each peer of a Sender or a Receiver, until that peer is lost.
type peers[M groupSide] struct {
	make func(*engine.Peer) (M, error)

	mu     sync.Mutex // not taken by handlers of a Mux
	closed bool
	of     map[[16]byte]*peerGroup[M] // by engine
}

type peerGroup[M groupSide] struct {
	peer  *engine.Peer
	group M
	gone  chan struct{} // closed when group is
	once  sync.Once
	err   error // of Close
}

// get returns the group for the engine of a peer. It uses one connection to each engine, until
// that is lost. The group of a lost one is closed first; ctx bounds the wait.
func (p *peers[M]) get(ctx context.Context, peer *engine.Peer) (M, error) {
	for {
		m, err := p.find(peer)
		if err != nil || m.peer == peer || !isLost(m.peer) {
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

// find returns the group of an engine, and makes it if there is none.
func (p *peers[M]) find(peer *engine.Peer) (*peerGroup[M], error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.of[peer.ID()]
	if m != nil {
		return m, nil
	}
	m = &peerGroup[M]{peer: peer, gone: make(chan struct{})}
	if p.closed {
		return m, engine.ErrClosed
	}
	var err error
	if m.group, err = p.make(peer); err != nil {
		return m, fmt.Errorf("meet %s: %w", peer.Name(), err)
	}
	if p.of == nil {
		p.of = map[[16]byte]*peerGroup[M]{}
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

// drop closes a group and takes it out.
func (p *peers[M]) drop(m *peerGroup[M]) {
	m.once.Do(func() {
		if err := m.group.Close(); !isLost(m.peer) { // else it is for that reason
			m.err = err
		}
		p.mu.Lock()
		delete(p.of, m.peer.ID())
		p.mu.Unlock()
		close(m.gone)
	})
	<-m.gone
}

// close closes all groups; get makes no more.
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
