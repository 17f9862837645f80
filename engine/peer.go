// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// Peer is another engine, connected by every backend that both have and that
// reaches it; Explain says why one is missing.
type Peer struct {
	e       *Engine
	name    string
	id      wire.ID
	host    wire.ID
	conns   []*conn  // by lane; nil: not connected by it
	reasons []string // by lane: why not

	lost     chan struct{}
	lostOnce sync.Once

	closing sync.Mutex // held while Close runs
	left    []*conn    // guarded by closing: those that it has not closed
	mu      sync.Mutex // guards the fields below
	origin  string     // the address that dialled this engine through Serve
	// what that has shown; nil: nothing
	certificate *x509.Certificate
	known       *wire.Directory
	remotes     map[string]*Remote // that were asked for
	ending      atomic.Bool        // Close was called
	served      atomic.Bool        // it dialled us through Serve
	ticket      *ticket            // that it shows; nil: made by plain Connect
	number      uint64             // counts Peers

	transfers atomic.Int64 // that are not closed
	retired   atomic.Bool  // to be closed with the last of them

	notifyMax int // bytes of a notification that both sides take
}

// conn is a Peer's way over one backend.
type conn struct {
	peer     *Peer
	lane     *lane
	p        driver.Peer
	can      driver.Can
	counters counters

	hello   []byte      // the first message
	greeted atomic.Bool // it has gone

	fragments fragmentLock

	resource *resource // nil: without a schedule

	backlog
	round  uint64      // in which it was drained last; guarded by lane.blockedMu
	served atomic.Bool // it found room since it was put last there

	gone     chan struct{} // lost or closed
	goneOnce sync.Once
	severing sync.Once
	closed   chan struct{} // made by severing: Close of the backend's Peer has returned
}

func newConn(peer *Peer, l *lane, p driver.Peer) *conn {
	return &conn{peer: peer, lane: l, p: p, can: p.Can(), gone: make(chan struct{}),
		resource: peer.e.schedule.newResource(l.caps.Name+" to "+peer.name, &l.swapIns)}
}

// watch waits for the loss or the end of the connection.
func (c *conn) watch() {
	select {
	case <-c.p.Lost():
		c.markLost()
		c.lane.poll() // transfers that wait for room learn of it
	case <-c.gone:
	}
}

// markLost marks the connection dead: no new transfer takes it. The caller polls afterwards.
func (c *conn) markLost() {
	if s := c.peer.e.schedule; s != nil {
		defer s.flush()
	}
	c.goneOnce.Do(func() { close(c.gone) })
	staged := c.peer.staged()
	if sp := staged.p.(*stagedPeer); c != staged {
		sp.loop.pushIfStarted(func() { sp.carrierLost(c.lane) })
	}
	for _, other := range c.peer.conns {
		if other != nil && other != staged && !other.isLost() {
			return
		}
	}
	staged.goneOnce.Do(func() { close(staged.gone) }) // it is nothing without the others
	c.peer.lostOnce.Do(func() { close(c.peer.lost); c.peer.e.peersVersion.Add(1) })
}

// staged is the way by chains of the other connections.
func (p *Peer) staged() *conn { return p.conns[p.e.stager.lane.index] }

func (p *Peer) chains() *stagedPeer { return p.staged().p.(*stagedPeer) }

func (c *conn) isLost() bool {
	select {
	case <-c.gone:
		return true
	default:
		return false
	}
}

// sever closes the connection as the strong means against a transfer that does not end. It
// does not wait for that: closed is called when it is.
func (c *conn) sever(closed func()) {
	c.severing.Do(func() {
		c.markLost()
		c.closed = make(chan struct{})
		c.peer.e.running.Go(func() {
			_ = c.p.Close()
			close(c.closed)
			c.lane.poll()
		})
	})
	c.peer.e.running.Go(func() {
		<-c.closed
		c.lane.poll()
		closed()
	})
}

// Name returns the name that the peer's engine has given itself.
func (p *Peer) Name() string { return p.name }

// ID tells engines apart: all Peers of one have its ID.
func (p *Peer) ID() [16]byte { return p.id }

// SameHost reports whether the peer runs under the same kernel.
func (p *Peer) SameHost() bool { return p.host == p.e.host }

// Lost is closed when no connection to the peer is alive any more: it died, froze
// for too long, or was closed. A new Connect makes a new Peer.
func (p *Peer) Lost() <-chan struct{} { return p.lost }

// Remote returns the peer's region of that name, as of its description.
func (p *Peer) Remote(name string) (*Remote, error) {
	if p.isSelf() {
		return p.ownRemote(name)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.remotes[name]; m != nil {
		return m, nil
	}
	if r, known := p.known.Region(name); known {
		p.remotes[name] = p.remoteOf(&p.known.Description, &r)
		return p.remotes[name], nil
	}
	return nil, &OpError{Op: "find region " + name, Peer: p.name,
		Err: fmt.Errorf("the peer describes no such region; it describes %s: %w", p.remoteNames(),
			ErrNoRoute)}
}

// remoteNames lists some names for an error text.
// Preconditions: p.mu is held.
func (p *Peer) remoteNames() string {
	const show = 8
	var names []string
	for r := range p.known.All() {
		if len(names) == show {
			return fmt.Sprintf("%q and %d more", names, p.known.Len()-show)
		}
		names = append(names, r.Name)
	}
	return fmt.Sprintf("%q", names)
}

// Remotes returns the names of the peer's regions in order.
func (p *Peer) Remotes() []string {
	if p.isSelf() {
		var names []string
		for _, r := range p.e.visible() {
			names = append(names, r.name)
		}
		return names
	}
	p.mu.Lock()
	known := p.known
	p.mu.Unlock()
	names := make([]string, 0, known.Len())
	for r := range known.All() {
		names = append(names, r.Name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Import makes a leased range known (Lease.Token), or one region of a partial
// description. It is ErrRevoked when the lease has ended.
func (p *Peer) Import(lease []byte) (*Remote, error) {
	d, err := p.read(lease)
	if err != nil {
		return nil, err
	}
	r, one := d.Only()
	if !one {
		return nil, &OpError{Op: "import", Peer: p.name,
			Err: fmt.Errorf("%d regions where a lease has one: use Refresh for a description: %w",
				d.Len(), ErrCorrupt)}
	}
	m := p.remoteOf(&d.Description, &r)
	var errs []error
	for i, c := range p.conns {
		if c == nil || m.tokens[i] == nil {
			continue
		}
		if _, err := m.key(i); err == nil {
			return m, nil
		} else {
			errs = append(errs, &OpError{Op: "import", Backend: c.lane.caps.Name, Peer: p.name,
				Err: p.reason(c, err)})
		}
	}
	if errs == nil {
		errs = append(errs, &OpError{Op: "import", Peer: p.name,
			Err: fmt.Errorf("no backend that connects us has a token in it: %w", ErrNoRoute)})
	}
	return nil, errors.Join(errs...)
}

// Refresh takes a newer description of the same engine: its regions become known,
// those that are gone unknown. Remotes and transfers in use are not disturbed.
func (p *Peer) Refresh(description []byte) error {
	known, err := p.read(description)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = known
	for name, old := range p.remotes {
		r, is := known.Region(name)
		if is && slices.EqualFunc(p.remoteOf(&known.Description, &r).tokens, old.tokens,
			slices.Equal[[]byte]) {
			continue // the same registration: keep what was imported
		}
		delete(p.remotes, name)
		old.retire()
	}
	return nil
}

func (p *Peer) read(b []byte) (*wire.Directory, error) {
	if len(b) > p.e.cfg.DescriptionMax {
		return nil, &OpError{Op: "import", Peer: p.name,
			Err: fmt.Errorf("%d bytes, at most Config.DescriptionMax of %d: %w", len(b),
				p.e.cfg.DescriptionMax, ErrBounds)}
	}
	d, err := wire.Read(bytes.Clone(b))
	if err != nil {
		return nil, &OpError{Op: "import", Peer: p.name, Err: err}
	}
	if d.Engine != p.id {
		return nil, &OpError{Op: "import", Peer: p.name,
			Err: fmt.Errorf(
				"it is of engine %q, which is another one or an earlier run of this: %w", d.Name,
				driver.ErrBadToken)}
	}
	return d, nil
}

// remoteOf brings the tokens of a described region into the order of our lanes.
func (p *Peer) remoteOf(d *wire.Description, r *wire.Region) *Remote {
	tokens := make([][]byte, len(p.e.lanes))
	for i, l := range p.e.lanes {
		for j := range d.Backends {
			if d.Backends[j].Name == l.caps.Name {
				tokens[i] = r.Token(j)
			}
		}
	}
	m := newRemote(p, r.Name, r.Kind, r.ReadOnly, r.Size, tokens)
	m.only = r.Only
	return m
}

// Close ends the connections: transfers in flight end with ErrClosed or with what
// came first. It is idempotent, and waits for a Close that runs already. After an error a backend
// has not ended its connection yet: Close may be called again, and asks those alone.
func (p *Peer) Close() error {
	p.closing.Lock()
	defer p.closing.Unlock()
	if !p.ending.Swap(true) {
		p.left = slices.Clone(p.conns)
	}

	var errs []error
	for i, c := range slices.Backward(p.left) { // chains before what they are made of
		if c == nil {
			continue
		}
		if err := c.p.Close(); err != nil {
			errs = append(errs, &OpError{Op: "close", Backend: c.lane.caps.Name, Peer: p.name,
				Err: err})
		} else {
			p.left[i] = nil
		}
		c.markLost()
		c.lane.poll()
		c.lane.own.CompareAndDelete(c.p.Conn(), c)
	}
	p.e.removePeer(p)
	return errors.Join(errs...)
}
