// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/engine/internal/rendezvous"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/wire"
)

// Serve exchanges descriptions with engines that dial and may, until ctx ends or the listener
// is closed, and connects back: Config.OnPeer is given each new peer. The listener may be
// a Unix socket (peers of another user are refused), or of a network: then Config.Identity says
// which peers may be a peer, or Config.Plaintext that everybody may. A listener that speaks TLS
// itself, by tls.NewListener, must ask for certificates.
//
// A connection that has not proved its identity is told nothing, but in plain text, where all are
// served. There an engine with which no connection comes about is not told why, and not before
// HandshakeTimeout: a stranger must not learn which addresses this host reaches. OnRefused is told
// at once.
//
// Each exchange is bounded by HandshakeTimeout and DescriptionMax; HandshakesMax of them run at
// once, of one host half as many. Further connections wait their turn, and one that keeps silent
// makes room. Serve closes the listener. The two engines also exchange tickets, by which each
// knows the other as the sender of notifications.
func (e *Engine) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer l.Close()
	if _, plain := l.(*net.TCPListener); plain && e.cfg.Identity == nil {
		if err := e.meets.CheckPlain(); err != nil {
			return &OpError{Op: "serve " + l.Addr().String(), Err: err}
		}
	}
	s := &server{e: e, in: session.NewLobby(e.cfg.HandshakesMax, clock.Host())}
	defer context.AfterFunc(ctx, func() { _ = l.Close(); s.in.Close() })()
	defer context.AfterFunc(e.life, cancel)()
	defer s.exchanges.Wait()
	err := s.in.Serve(l, func(conn net.Conn, v *session.Visit) bool {
		s.exchanges.Go(func() { s.hear(ctx, conn, v) })
		return true
	})
	if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		return e.serveEnd(ctx)
	}
	return &OpError{Op: "serve " + l.Addr().String(), Err: err}
}

// server is one call of Serve.
type server struct {
	e         *Engine
	in        *session.Lobby
	exchanges sync.WaitGroup
}

// hear is one exchange: it waits for a place, for the other side to prove its identity and to
// describe itself, answers, and connects back. The dialer is told of an error, once there is
// a stream to tell it over.
func (s *server) hear(ctx context.Context, conn net.Conn, v *session.Visit) {
	defer conn.Close()
	defer v.Leave()
	if !v.Wait() {
		return
	}
	g := &guest{e: s.e, host: v.Host}
	defer g.leave()
	// Time in which this process is kept off its processors is not the other side's.
	within, cancel := context.WithCancelCause(ctx)
	limit := clock.AfterRunning(clock.Host(), s.e.cfg.HandshakeTimeout, func() {
		_ = conn.SetDeadline(time.Unix(1, 0)) // fails only where it is closed
		cancel(context.DeadlineExceeded)      // last: a refusal waits for it, and sets a deadline
	})
	defer limit.Stop()
	defer cancel(nil)

	secure, member, err := s.e.meets.Answer(within, conn)
	if err == nil && member && !v.Show(session.ShownIdentity) {
		err = errHungUp
	}
	var theirs *introduction
	if err == nil {
		theirs, err = s.e.readIntroduction(g.reader(secure))
	}
	if err == nil && !v.Show(session.ShownAll) {
		err = errHungUp
	}
	if err == nil {
		err = s.greet(within, secure, theirs, g)
	}
	if err == nil {
		return
	}
	if s.e.cfg.OnRefused != nil {
		s.e.cfg.OnRefused(conn.RemoteAddr(), err)
	}
	if secure == nil {
		return
	}
	why := err.Error()
	if !member && g.dialled {
		// It had us connect to an address of its choice. Neither words nor the time that it took
		// shall tell what is there.
		why = strangerRefusal
		<-within.Done()
	}
	_ = conn.SetDeadline(time.Now().Add(refusalTime))
	_ = rendezvous.WriteFrame(secure, rendezvous.Refusal, []byte(why))
}

// strangerRefusal is all that a dialer in plain text is told.
const strangerRefusal = "in plain text it says no more: see OnRefused of its Config"

// refusalTime is the time that a refusal has to go out, once an exchange has ended.
const refusalTime = time.Second

var errHungUp = errors.New("too many silent connections")

func (e *Engine) serveEnd(ctx context.Context) error {
	if e.life.Err() != nil {
		return ErrClosed
	}
	return ctx.Err()
}

// greet answers a description, and connects back.
func (s *server) greet(ctx context.Context, conn net.Conn, theirs *introduction, g *guest) error {
	if err := g.takePlace(); err != nil {
		return err
	}
	t, err := s.e.introduceItself(conn, g)
	if err != nil {
		return err
	}
	if theirs.Engine == s.e.id { // its own program has dialled, or its description came back
		s.e.revokeTicket(t)
		return rendezvous.WriteFrame(conn, rendezvous.Description, nil)
	}
	g.dialled = true
	p, err := s.e.connectTo(ctx, theirs, t)
	if err != nil {
		return err
	}
	p.setOrigin(rendezvous.From(conn))
	p.served.Store(true)
	if err := rendezvous.WriteFrame(conn, rendezvous.Description, nil); err != nil {
		return errors.Join(err, p.Close())
	}
	if s.e.cfg.OnPeer != nil {
		go s.e.cfg.OnPeer(p)
		return nil
	}
	go func() { // the program does not have it
		<-p.lost
		_ = p.Close()
	}()
	return nil
}

// Listen is net.Listen for Serve. The socket file that a killed program has left does not stop it:
// a file at which the kernel refuses connections is replaced.
func Listen(network, address string) (net.Listener, error) {
	return rendezvous.Listen(network, address)
}

// Origin returns the address that dialled this engine through Serve, and the name and serial number
// of its certificate where it has shown one. It is "" for other Peers.
func (p *Peer) Origin() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.origin
}

func (p *Peer) setOrigin(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.origin = text
}

// closeUnlessSelf closes a peer that one exchange has made; Self is everybody's.
func (p *Peer) closeUnlessSelf() error {
	if p.isSelf() {
		return nil
	}
	return p.Close()
}

// introduction is the description of one side of an exchange.
type introduction struct {
	*wire.Directory
	show exchange.Secret // for the hellos of our connections: see ticket
}

// introduceItself sends this engine's description, and a ticket that the other side's
// connections have to show; g is nil where this engine began the exchange.
func (e *Engine) introduceItself(conn net.Conn, g *guest) (*ticket, error) {
	ours, err := e.Describe()
	if err != nil {
		return nil, err
	}
	t := e.issueTicket(rendezvous.Origin(conn))
	t.guest = g
	err = rendezvous.WriteFrame(conn, rendezvous.Description, append(ours, t.secret[:]...))
	if err != nil {
		e.revokeTicket(t)
		return nil, err
	}
	return t, nil
}

// readIntroduction refuses nonsense before anything is given in return.
func (e *Engine) readIntroduction(conn io.Reader) (*introduction, error) {
	b, err := rendezvous.ReadFrame(conn, e.cfg.DescriptionMax+len(exchange.Secret{}))
	if err != nil {
		return nil, err
	}
	in := &introduction{}
	n := max(0, len(b)-len(in.show))
	copy(in.show[:], b[n:])
	in.Directory, err = wire.Read(b[:n])
	return in, err
}

// connectTo connects to the other side of an exchange. t is for its connections; it ends
// with the Peer.
func (e *Engine) connectTo(ctx context.Context, in *introduction, t *ticket) (*Peer, error) {
	if in.Engine == e.id {
		e.revokeTicket(t)
		return e.Self()
	}
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	p, err := e.connect(ctx, in.Directory, in.show, t)
	if err != nil {
		e.revokeTicket(t)
	}
	return p, err
}

// Dial connects to an engine that serves at the address: "unix" and a path, or
// "tcp" and host:port. When it returns, the other side has connected back. Over a network,
// Config.Identity says what this side shows, and what the other side must show.
//
// Dial tries again until ctx ends or ConnectTimeout is over, while no process listens there, and
// where the server ends the stream without a word after a while: it was overloaded. A server that
// ends it at once may want TLS, or have too many waiting: Dial tries that again for
// HandshakeTimeout alone.
func (e *Engine) Dial(ctx context.Context, network, address string) (*Peer, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	defer context.AfterFunc(e.life, cancel)()
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = ""
	}
	var last error
	first := time.Now()
	for pause := session.AcceptPauseMin; ; pause = min(2*pause, session.AcceptPauseMax) {
		var p *Peer
		began := time.Now()
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			err = &OpError{Op: "dial", Err: err}
		} else {
			p, err = e.dial(ctx, conn, host)
		}
		switch {
		case err == nil:
			return p, nil
		case isRetryable(err, time.Since(began) >= immediateClose ||
			time.Since(first) < e.cfg.HandshakeTimeout):
			last = err
			if !sleep(ctx, pause) {
				return nil, err
			}
		case last != nil && ctx.Err() != nil: // the context's error says less
			return nil, last
		default:
			return nil, err
		}
	}
}

// immediateClose is the time within which a server ends a stream that it does not want, for example
// since it expects TLS, or refuses for want of room. One that was overloaded ends it by a limit,
// which is longer.
const immediateClose = 250 * time.Millisecond

// isRetryable reports whether a later try of Dial may do better than one that failed; hungUp: also
// where the other side hung up.
func isRetryable(err error, hungUp bool) bool {
	// no process listens yet, or as many wait at a Unix socket as may
	for _, is := range []error{syscall.ECONNREFUSED, syscall.ENOENT, syscall.EAGAIN} {
		if errors.Is(err, is) {
			return true
		}
	}
	return hungUp && session.HungUp(err)
}

// retryPause is before the next try, so that a busy backend can free a connection.
const retryPause = 5 * time.Millisecond

// sleep waits, and reports whether the context lasts.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// DialConn is Dial over a stream that is there already; TLS that the program has set up on it
// must have verified the other side. It closes the stream.
func (e *Engine) DialConn(ctx context.Context, conn net.Conn) (*Peer, error) {
	return e.dial(ctx, conn, "")
}

func (e *Engine) dial(ctx context.Context, conn net.Conn, host string) (*Peer, error) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer stop()
	secure, err := e.meets.Call(ctx, conn, host)
	var p *Peer
	if err == nil {
		p, err = e.introduce(ctx, secure)
	}
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("the other side had not answered: %w", ctx.Err())
		}
		return nil, &OpError{Op: "dial", Err: err}
	}
	return p, nil
}

func (e *Engine) introduce(ctx context.Context, conn net.Conn) (*Peer, error) {
	t, err := e.introduceItself(conn, nil)
	if err != nil {
		return nil, e.meets.Explain(err, conn)
	}
	theirs, err := e.readIntroduction(conn)
	if err != nil {
		e.revokeTicket(t)
		return nil, e.meets.Explain(err, conn)
	}
	p, err := e.connectTo(ctx, theirs, t)
	if err != nil {
		return nil, err
	}
	if _, err := rendezvous.ReadFrame(conn, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("peer %s did not connect back: %w", p.name, err),
			p.closeUnlessSelf())
	}
	return p, nil
}

// descriptionsMax is how many times Config.DescriptionMax the descriptions take that came through
// Serve.
const descriptionsMax = 16

// guests counts the places and bytes of engines that came through Serve, by host. Engine.mu guards
// it.
type guests struct {
	peers session.HostCount // of Config.PeersMax
	bytes session.HostCount // of descriptions
}

func newGuests(c *Config) guests {
	return guests{session.HostCount{Most: c.PeersMax}, session.HostCount{Most: descriptionsMax *
		c.DescriptionMax}}
}

// guest is an engine that has come through Serve, from its first byte until its Peer is closed.
type guest struct {
	e       *Engine
	host    session.Host
	dialled bool // this engine has begun to connect back

	// Engine.mu guards what follows.
	bytes int
	peer  bool // it has a place among the peers
	bound bool // a Peer stands for it, which ends it
}

// reader counts the bytes that are read of a description, and reads no more than there is room for.
func (g *guest) reader(from io.Reader) io.Reader { return guestReader{g, from} }

type guestReader struct {
	g    *guest
	from io.Reader
}

// Read implements io.Reader.
func (r guestReader) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	e := r.g.e
	e.mu.Lock()
	defer e.mu.Unlock()
	c := &e.guests.bytes
	if fits, _ := c.Fits(r.g.host, n); !fits {
		return 0, fmt.Errorf("the descriptions of all peers take %d bytes at most, of one host "+
			"half as many, raise Config.DescriptionMax: %w", c.Most, ErrFull)
	}
	c.Add(r.g.host, n)
	r.g.bytes += n
	return n, err
}

// takePlace reserves a place among the peers.
func (g *guest) takePlace() error {
	g.e.mu.Lock()
	defer g.e.mu.Unlock()
	err := g.e.guests.peers.Take(g.host, "peers", "PeersMax")
	g.peer = err == nil
	return err
}

// leave gives back the place and the bytes of the guest, unless it has a Peer.
func (g *guest) leave() {
	g.e.mu.Lock()
	defer g.e.mu.Unlock()
	if !g.bound {
		g.end()
	}
}

// end gives back the place and the bytes of the guest.
// Preconditions: Engine.mu is held.
func (g *guest) end() {
	g.e.guests.bytes.Add(g.host, -g.bytes)
	if g.peer {
		g.e.guests.peers.Add(g.host, -1)
	}
	g.bytes, g.peer = 0, false
}

// ticket proves that a connection comes from the engine with which descriptions were
// exchanged (Serve, Dial): that engine alone has been given the secret, and shows it in the
// hello of each of its connections.
type ticket struct {
	secret  exchange.Secret
	private bool                 // for a Peer that the program never has
	origin  string               // the other end of its exchange; "": this engine
	guest   *guest               // nil: of an exchange that this engine began
	peer    atomic.Pointer[Peer] // once this engine has connected, too
}

// issueTicket makes a ticket for another engine, valid until revokeTicket.
func (e *Engine) issueTicket(origin string) *ticket {
	t := &ticket{origin: origin}
	rand.Read(t.secret[:])
	if origin != "" {
		e.stager.exchanged.Store(true)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tickets[t.secret] = t
	return t
}

func (e *Engine) revokeTicket(t *ticket) {
	if t == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.tickets, t.secret)
}

// bind makes the ticket stand for a Peer.
// Preconditions: e.mu is held.
func (t *ticket) bind(p *Peer) {
	p.ticket = t
	t.peer.Store(p)
	if t.guest != nil {
		t.guest.bound = true
	}
}

// hello is the first message of each connection.
func (e *Engine) hello(show exchange.Secret) []byte {
	h := exchange.Hello{ID: e.id, Show: show, Name: e.cfg.Name}
	return h.Append(nil)
}
