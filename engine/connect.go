// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// Connect makes a peer of the engine that gave this description, by every
// backend that both have. One connection is enough; ErrNoRoute lists why each
// failed. An engine's own description gives Self.
func (e *Engine) Connect(ctx context.Context, description []byte) (*Peer, error) {
	if len(description) > e.cfg.DescriptionMax {
		return nil, &OpError{Op: "connect", Err: fmt.Errorf("description of %d bytes, at most Config.DescriptionMax of %d: %w", len(description), e.cfg.DescriptionMax, ErrBounds)}
	}
	d, err := wire.Decode(description)
	if err != nil {
		return nil, &OpError{Op: "connect", Err: err}
	}
	if d.Engine == e.id {
		return e.Self()
	}
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	return e.connect(ctx, d)
}

// connect gives up when the engine closes.

func (e *Engine) connect(ctx context.Context, d *wire.Description) (*Peer, error) {
	return e.connectPeer(ctx, d, false)
}

// connectHidden makes a peer for answers of the stager's, which the program never sees.
func (e *Engine) connectHidden(ctx context.Context, d *wire.Description) (*Peer, error) {
	return e.connectPeer(ctx, d, true)
}

func (e *Engine) connectPeer(ctx context.Context, d *wire.Description, hidden bool) (*Peer, error) {
	if err := e.takePlace(); err != nil {
		return nil, &OpError{Op: "connect", Peer: d.Name, Err: err}
	}
	defer e.givePlace()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.life, cancel)()
	p := e.newPeer(d)
	p.hidden = hidden
	var errs []error
	connected := false
	for i, l := range e.lanes {
		err := p.connectLane(ctx, i, l, d)
		if err != nil {
			p.reasons[i] = err.Error()
			errs = append(errs, &OpError{Op: "connect", Backend: l.caps.Name, Peer: d.Name, Err: err})
		}
		connected = connected || err == nil && l != e.stager.lane
	}
	if !connected {
		return nil, errors.Join(append(errs, &OpError{Op: "connect", Peer: d.Name, Err: ErrNoRoute})...)
	}
	p.remotes = make(map[string]*Remote, len(d.Regions))
	for i := range d.Regions {
		p.remotes[d.Regions[i].Name] = p.remoteOf(d, &d.Regions[i])
	}
	if err := e.addPeer(p); err != nil {
		return nil, &OpError{Op: "connect", Peer: d.Name, Err: errors.Join(err, p.Close())}
	}
	defer e.running.Done()
	p.watch()
	return p, nil
}

func (e *Engine) newPeer(d *wire.Description) *Peer {
	n := len(e.lanes)
	p := &Peer{
		e: e, name: d.Name, id: d.Engine, host: d.Host,
		conns: make([]*conn, n), reasons: make([]string, n), senders: make([]string, n),
		lost: make(chan struct{}), notifiers: make(chan *Transfer, notifyTransfersMax),
	}
	for range notifyTransfersMax {
		p.notifiers <- nil
	}
	return p
}

func (p *Peer) connectLane(ctx context.Context, i int, l *lane, d *wire.Description) error {
	addr := d.Addr(l.caps.Name)
	if l == p.e.stager.lane {
		p.conns[i] = newConn(p, l, p.e.stager.connect(p, addr))
		return nil
	}
	if addr == nil {
		return fmt.Errorf("the peer has no backend of this name: %w", ErrNotSupported)
	}
	if l.caps.Reach < driver.Network && d.Host != p.e.host {
		return fmt.Errorf("it reaches within a %v, and the peer is on another: %w", l.caps.Reach, ErrNotSupported)
	}
	bp, err := l.b.Connect(ctx, addr)
	if err != nil {
		return err
	}
	p.conns[i] = newConn(p, l, bp)
	p.senders[i] = string(addr)
	return nil
}

// takePlace reserves a place among the peers until givePlace.
func (e *Engine) takePlace() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	if len(e.peers)+e.places >= e.cfg.PeersMax {
		return fullError("peers", e.cfg.PeersMax, "PeersMax")
	}
	e.places++
	return nil
}

func (e *Engine) givePlace() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.places--
}

// addPeer makes a peer that is connected known. Unless it fails, Close waits until
// the caller has called running.Done.
func (e *Engine) addPeer(p *Peer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	e.peers[p] = struct{}{}
	e.running.Add(1)
	return nil
}

func (e *Engine) removePeer(p *Peer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.peers, p)
	if e.self == p {
		e.self = nil
	}
	for i, l := range e.lanes {
		if p.senders[i] == "" || !l.senders.CompareAndDelete(p.senders[i], p) {
			continue
		}
		for other := range e.peers { // what the same engine sends belongs to another Peer of it
			if other.senders[i] == p.senders[i] && !other.isLost() {
				l.senders.Store(p.senders[i], other)
			}
		}
	}
}

// Self returns the engine as a peer of its own: local moves take it. Its regions
// are always those that are registered now. One that is lost is replaced.
func (e *Engine) Self() (*Peer, error) {
	e.mu.Lock()
	self := e.self
	e.mu.Unlock()
	if self != nil && !self.isLost() {
		return self, nil
	}
	if self != nil {
		_ = self.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), e.cfg.ConnectTimeout)
	defer cancel()
	p, err := e.connect(ctx, e.describe(nil))
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	if self = e.self; self == nil {
		e.self = p
	}
	e.mu.Unlock()
	if self != nil { // somebody else was as quick
		return self, p.Close()
	}
	return p, nil
}

func (p *Peer) isLost() bool {
	select {
	case <-p.lost:
		return true
	default:
		return false
	}
}

func (p *Peer) isSelf() bool { return p.id == p.e.id }

// ownRemote looks a region of this engine up, and remembers what was imported
// for as long as that registration stands.
func (p *Peer) ownRemote(name string) (*Remote, error) {
	p.e.mu.Lock()
	r := p.e.regions[name]
	known := r != nil && r.mems != nil
	p.e.mu.Unlock()
	if !known {
		return nil, &OpError{Op: "find region " + name, Peer: p.name, Err: fmt.Errorf("no such region is registered: %w", ErrNoRoute)}
	}
	tokens, err := p.e.tokens(r.mems)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.remotes[name]; old != nil && slices.EqualFunc(old.tokens, tokens, slices.Equal[[]byte]) {
		return old, nil
	}
	p.remotes[name] = newRemote(p, name, r.seg.Kind, r.seg.ReadOnly, r.seg.Len, tokens)
	return p.remotes[name], nil
}
