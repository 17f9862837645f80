// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/internal/wire"
)

// Self returns the engine as a peer of its own: local moves take it. Its regions
// are always those that are registered now. When one of its connections is lost the next
// call returns another Peer; the first serves on by those that are left.
func (e *Engine) Self() (*Peer, error) {
	p, old, err := e.ownPeer(&e.self, false)
	if old != nil && old.isLost() {
		_ = old.Close()
	}
	return p, err
}

// local is Self for the engine's chains. The program never has it, so it is closed when it
// was replaced and its last Transfer is.
func (e *Engine) local() (*Peer, error) {
	p, old, err := e.ownPeer(&e.localSelf, true)
	if old != nil {
		old.retire()
	}
	return p, err
}

// ownPeer returns the Peer in a place, or puts a new one there where that has lost a
// connection. It must not be called from a loop: it connects.
func (e *Engine) ownPeer(place **Peer, private bool) (p, replaced *Peer, err error) {
	e.mu.Lock()
	old := *place
	e.mu.Unlock()
	if old != nil && old.isWhole() {
		return old, nil, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), e.cfg.ConnectTimeout)
	defer cancel()
	t := e.issueTicket("")
	t.private = private
	p, err = e.connect(ctx, &wire.Directory{Description: *e.describe(nil)}, t.secret, t)
	if err != nil {
		e.revokeTicket(t)
		return nil, nil, err
	}
	e.mu.Lock()
	other := *place
	if other == old {
		*place = p
	}
	e.mu.Unlock()
	if other != old && other != nil { // another goroutine was as quick
		return other, nil, p.Close()
	}
	return p, old, nil
}

// isWhole reports whether the Peer is open and all of its connections are alive.
func (p *Peer) isWhole() bool {
	for _, c := range p.conns {
		if c != nil && c.isLost() {
			return false
		}
	}
	return !p.ending.Load()
}

// retire has the Peer closed when no Transfer of it is left.
func (p *Peer) retire() {
	p.retired.Store(true)
	p.closeIfUnused()
}

func (p *Peer) closeIfUnused() {
	if p.retired.Load() && p.transfers.Load() == 0 {
		p.e.stager.serve(func() { _ = p.Close() }) // Engine.Close ends it otherwise
	}
}

func (p *Peer) isPrivate() bool { return p.ticket != nil && p.ticket.private }

func (p *Peer) isSelf() bool { return p.id == p.e.id }

// ownRemote looks a region of this engine up, and remembers what was imported
// for as long as that registration stands.
func (p *Peer) ownRemote(name string) (*Remote, error) {
	p.e.mu.Lock()
	r := p.e.regions[name]
	known := r != nil && r.mems != nil
	p.e.mu.Unlock()
	if !known {
		err := fmt.Errorf("no such region is registered: %w", ErrNoRoute)
		return nil, &OpError{Op: "find region " + name, Peer: p.name, Err: err}
	}
	tokens, err := p.e.tokens(r.mems)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.remotes[name]
	if old != nil && slices.EqualFunc(old.tokens, tokens, slices.Equal[[]byte]) {
		return old, nil
	}
	p.remotes[name] = newRemote(p, name, r.seg.Kind, r.seg.ReadOnly, r.seg.Len, tokens)
	p.remotes[name].own = r
	if old != nil {
		old.retire()
	}
	return p.remotes[name], nil
}

// forgetOwn lets go of what Self has imported of a region that is closed.
func (e *Engine) forgetOwn(r *Region) {
	e.mu.Lock()
	p := e.self
	e.mu.Unlock()
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.remotes[r.name]; m != nil && m.own == r {
		delete(p.remotes, r.name)
		m.retire()
	}
}
