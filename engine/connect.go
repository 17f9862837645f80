// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// Connect makes a peer of the engine that gave this description, by every
// backend that both have. One connection is enough; ErrNoRoute lists why each
// failed. An engine's own description gives Self.
func (e *Engine) Connect(ctx context.Context, description []byte) (*Peer, error) {
	if len(description) > e.cfg.DescriptionMax {
		return nil, &OpError{Op: "connect", Err: fmt.Errorf("description of %d bytes, at most "+
			"Config.DescriptionMax of %d: %w", len(description), e.cfg.DescriptionMax, ErrBounds)}
	}
	// a Directory refers to its bytes, and the caller may change these
	d, err := wire.Read(bytes.Clone(description))
	if err != nil {
		return nil, &OpError{Op: "connect", Err: err}
	}
	if d.Engine == e.id {
		return e.Self()
	}
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	return e.connect(ctx, d, wire.Secret{}, nil)
}

// connect makes a Peer: it reserves a place, connects by every backend that both have, says hello
// by each connection, and makes the Peer known. show is the secret of the ticket that the peer has
// issued, ours is the ticket that the peer shows. It ends early when the engine closes.
//
// The backends connect one after the other. While none has connected, those that were not answered
// in time are tried again, with twice the patience each time, until ctx ends; the last of them has
// all of it.
func (e *Engine) connect(ctx context.Context, d *wire.Directory, show wire.Secret,
	ours *ticket) (*Peer, error) {
	fails := func(backend string, err error) error {
		return &OpError{Op: "connect", Backend: backend, Peer: d.Name, Err: err}
	}
	private := ours != nil && ours.private // the engine's private Peers take no place
	e.mu.Lock()
	switch {
	case e.closed:
		e.mu.Unlock()
		return nil, fails("", ErrClosed)
	case private:
	case len(e.peers)-e.private+e.places >= e.cfg.PeersMax:
		e.mu.Unlock()
		return nil, fails("", fullError("peers", e.cfg.PeersMax, "PeersMax"))
	default:
		e.places++
		defer func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.places--
		}()
	}
	e.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.life, cancel)()

	n, stager := len(e.lanes), e.stager.lane
	p := &Peer{e: e, name: d.Name, id: d.Engine, host: d.Host, known: d,
		remotes: map[string]*Remote{}, conns: make([]*conn, n), reasons: make([]string, n),
		notifyMax: min(e.cfg.NotifyMax, d.NotifyMax), lost: make(chan struct{})}
	// The first: a connection that is lost in its hello tells it so.
	p.conns[stager.index] = newConn(p, stager, e.stager.connect(p, d.Addr(stager.caps.Name)))
	patience := e.cfg.HandshakeTimeout
	if ours != nil && ours.guest != nil { // an exchange of Serve has no more: two rounds of it
		patience /= time.Duration(2 * n)
	}
	connected, errs := false, make([]error, n)
	left := slices.DeleteFunc(slices.Clone(e.lanes), func(l *lane) bool { return l == stager })
	for ; len(left) > 0 && !connected; patience *= 2 {
		var late []*lane
		for _, l := range left {
			once, cancel := ctx, func() {}
			if len(left) > 1 || connected {
				once, cancel = context.WithTimeout(ctx, patience)
			}
			err := p.connectLane(once, l, &d.Description, show)
			cancel()
			connected = connected || err == nil
			if p.reasons[l.index], errs[l.index] = "", nil; err != nil {
				p.reasons[l.index], errs[l.index] = err.Error(), fails(l.caps.Name, err)
			}
			if errors.Is(err, ErrTimeout) && ctx.Err() == nil {
				late = append(late, l)
			}
		}
		if left = late; len(left) > 0 && !connected {
			sleep(ctx, retryPause) // a backend may have a limit of its own, a short one
		}
	}
	if !connected {
		return nil, errors.Join(append(errs, fails("", ErrNoRoute), p.Close())...)
	}

	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return nil, fails("", errors.Join(ErrClosed, p.Close()))
	}
	e.lastPeer++
	p.number = e.lastPeer
	if ours != nil {
		p.ticket = ours
		ours.peer.Store(p)
		if ours.guest != nil {
			ours.guest.bound = true
		}
	}
	if e.peers[p] = struct{}{}; private {
		e.private++
	}
	e.peersVersion.Add(1)
	e.running.Add(1) // Close waits until its connections are watched
	e.mu.Unlock()
	defer e.running.Done()
	for _, c := range p.conns { // all are there by now
		if c != nil {
			e.running.Go(c.watch)
		}
	}
	return p, nil
}

// connectLane connects by one backend, and sends the first message if it carries any. Where the
// peer takes none for now, since its program does not read its notifications, the hello goes before
// the first message that does. A connection by which it fails is closed.
func (p *Peer) connectLane(ctx context.Context, l *lane, d *wire.Description,
	show wire.Secret) error {
	addr := d.Addr(l.caps.Name)
	if addr == nil {
		return fmt.Errorf("the peer has no backend of this name: %w", ErrNotSupported)
	}
	if l.caps.Reach < driver.Network && d.Host != p.e.host {
		return fmt.Errorf("it reaches within a %v, and the peer is on another: %w", l.caps.Reach,
			ErrNotSupported)
	}
	bp, err := l.b.Connect(ctx, addr)
	if err != nil {
		return err
	}
	c := newConn(p, l, bp)
	p.conns[l.index] = c
	if !c.notifies() {
		return nil
	}
	l.own.Store(bp.Conn(), c) // before the peer can answer by it
	c.hello = p.e.hello(show)
	soon, cancel := context.WithTimeout(ctx, p.e.cfg.AbortGrace)
	defer cancel()
	err = p.sendOne(soon, l, c.hello)
	switch {
	case err == nil:
		c.greeted.Store(true)
	case soon.Err() != nil && ctx.Err() == nil && !errors.Is(err, ErrPeerLost):
		err = nil
	default:
		p.conns[l.index] = nil
		l.own.CompareAndDelete(bp.Conn(), c)
		_ = c.p.Close()
	}
	return err
}

// sendOne sends one message by a lane and waits until it is on its way.
func (p *Peer) sendOne(ctx context.Context, by *lane, msg []byte) error {
	t, err := p.e.NewTransfer(p, Write, Route{Only: by.caps.Name})
	if err != nil {
		return err
	}
	defer func() {
		_ = t.Close()
		for t.pins.Load() != 0 { // the sweeper may look at our connections still
			runtime.Gosched()
		}
	}()
	t.quiet = true
	t.attachFrame(msg)
	if err := t.postOnce(); err != nil {
		return err
	}
	return awaitOnce(ctx, t)
}

// removePeer forgets a peer that is closed, and frees its place.
func (e *Engine) removePeer(p *Peer) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, known := e.peers[p]; known && p.isPrivate() {
		e.private--
	}
	delete(e.peers, p)
	if e.self == p {
		e.self = nil
	}
	if e.localSelf == p {
		e.localSelf = nil
	}
	if p.ticket != nil {
		p.ticket.peer.Store(nil)
		delete(e.tickets, p.ticket.secret)
		if p.ticket.guest != nil {
			p.ticket.guest.end()
		}
	}
	e.peersVersion.Add(1)
}

func (p *Peer) isLost() bool {
	select {
	case <-p.lost:
		return true
	default:
		return false
	}
}

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

// retire closes the Peer when no Transfer of it is left.
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

// ownRemote looks a region of this engine up, and keeps the imported key
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

// forgetOwn drops the keys that Self has imported of a region that is closed.
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

// Describe returns the bytes with which a peer connects and reaches regions:
// those named, or all that are registered when none is. Send it over any channel
// that you trust: a program that has it can reach those regions. It grows by about 30
// bytes a region and backend.
func (e *Engine) Describe(regions ...*Region) ([]byte, error) {
	if len(regions) > 0 {
		return e.encode(e.describe(regions), regions, false)
	}
	regions = e.visible()
	return e.encode(e.describe(regions), regions, true)
}

// encode adds the tokens of regions to their description. Those that were closed since may be left
// out.
func (e *Engine) encode(d *wire.Description, regions []*Region, leaveOut bool) ([]byte, error) {
	kept, n := d.Regions[:0], len(e.lanes)
	lists, all := make([][]byte, n*len(regions)), make([]byte, 0, tokenGuess*len(regions))
	for i, r := range regions {
		if r.e != e {
			return nil, &OpError{Op: "describe region " + r.name,
				Err: fmt.Errorf("it is of another engine: %w", ErrBounds)}
		}
		tokens := lists[i*n : (i+1)*n : (i+1)*n]
		var err error
		if all, err = appendTokens(tokens, all, r.mems); errors.Is(err, ErrClosed) && leaveOut {
			continue
		}
		if err != nil {
			return nil, &OpError{Op: "describe region " + r.name, Err: err}
		}
		d.Regions[i].Pack(tokens)
		kept = append(kept, d.Regions[i])
	}
	d.Regions = kept
	b, err := wire.Encode(nil, d)
	if err != nil {
		return nil, &OpError{Op: "describe", Err: err}
	}
	return b, nil
}

// visible returns the regions that Describe tells of, by name.
func (e *Engine) visible() []*Region {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := make([]*Region, 0, len(e.regions))
	for _, r := range e.regions {
		if !r.private && r.mems != nil {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b *Region) int { return strings.Compare(a.name, b.name) })
	return list
}

func (e *Engine) describe(regions []*Region) *wire.Description {
	d := &wire.Description{Engine: e.id, Host: e.host, Name: e.cfg.Name, NotifyMax: e.cfg.NotifyMax,
		Regions: make([]wire.Region, len(regions))}
	for _, l := range e.lanes {
		d.Backends = append(d.Backends, wire.Backend{Name: l.caps.Name, Addr: l.b.Addr()})
	}
	for i, r := range regions {
		d.Regions[i] = wire.Region{Name: r.name, Kind: r.seg.Kind, ReadOnly: r.seg.ReadOnly,
			Size: r.seg.Len}
	}
	return d
}

// tokenGuess is the size of most backends' tokens; a longer one costs an allocation.
const tokenGuess = 32

// tokens returns those of one region, by lane.
func (e *Engine) tokens(mems []driver.Memory) ([][]byte, error) {
	list := make([][]byte, len(mems))
	_, err := appendTokens(list, make([]byte, 0, len(mems)*tokenGuess), mems)
	return list, err
}

// appendTokens appends the tokens of one region to all, and lists them by lane.
func appendTokens(list [][]byte, all []byte, mems []driver.Memory) ([]byte, error) {
	for i, m := range mems {
		if m == nil {
			continue
		}
		start := len(all)
		var err error
		if all, err = m.AppendToken(all); err != nil {
			return all, err
		}
		if len(all) > start { // otherwise no peer reaches it by that lane
			list[i] = all[start:len(all):len(all)]
		}
	}
	return all, nil
}
