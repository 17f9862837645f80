// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/wire"
)

// Serve exchanges descriptions with engines that dial, if they may, until ctx ends or the listener
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
	in := session.NewLobby(e.cfg.HandshakesMax, clock.Host())
	defer context.AfterFunc(ctx, func() { _ = l.Close(); in.Close() })()
	defer context.AfterFunc(e.life, cancel)()
	var exchanges sync.WaitGroup
	defer exchanges.Wait()
	err := in.Serve(l, func(conn net.Conn, v *session.Visit) bool {
		exchanges.Go(func() { e.handshake(ctx, conn, v) })
		return true
	})
	switch {
	case e.life.Err() != nil:
		return ErrClosed
	case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
		return ctx.Err()
	}
	return &OpError{Op: "serve " + l.Addr().String(), Err: err}
}

// handshake is one exchange: it waits for a place, for the other side to prove its identity and to
// describe itself, answers, and connects back. The dialer is told of an error, once there is
// a stream to tell it over.
func (e *Engine) handshake(ctx context.Context, conn net.Conn, v *session.Visit) {
	defer conn.Close()
	defer v.Leave()
	if !v.Wait() {
		return
	}
	g := &guest{e: e, host: v.Host}
	defer g.leave()
	// Time in which this process is kept off its processors is not the other side's.
	within, cancel := context.WithCancelCause(ctx)
	limit := clock.AfterRunning(clock.Host(), e.cfg.HandshakeTimeout, func() {
		_ = conn.SetDeadline(time.Unix(1, 0)) // fails only where it is closed
		cancel(context.DeadlineExceeded)      // last: a refusal waits for it, and sets a deadline
	})
	defer limit.Stop()
	defer cancel(nil)

	secure, member, err := e.meets.Answer(within, conn)
	if err == nil && member && !v.Show(session.ShownIdentity) {
		err = errHungUp
	}
	var theirs *introduction
	if err == nil {
		g.from = secure
		theirs, err = e.readIntroduction(g)
	}
	if err == nil && !v.Show(session.ShownAll) {
		err = errHungUp
	}
	if err == nil {
		err = g.reservePlace()
	}
	var t *ticket
	if err == nil {
		t, err = e.introduceItself(secure, g)
	}
	var p *Peer
	switch {
	case err != nil:
	case theirs.Engine == e.id: // its own program has dialled, or its description came back
		e.revokeTicket(t)
		err = session.WriteFrame(secure, session.DescriptionFrame, nil)
	default:
		g.dialled = true
		if p, err = e.connectTo(within, theirs, t); err != nil {
			break
		}
		p.mu.Lock()
		p.origin, p.certificate = session.StreamFrom(secure), session.StreamCertificate(secure)
		p.mu.Unlock()
		p.served.Store(true)
		if err = session.WriteFrame(secure, session.DescriptionFrame, nil); err != nil {
			err = errors.Join(err, p.Close())
		}
	}
	switch {
	case err == nil && p != nil && e.cfg.OnPeer != nil:
		go e.cfg.OnPeer(p)
	case err == nil && p != nil:
		go func() { // the program does not have it
			<-p.lost
			_ = p.Close()
		}()
	}
	if err == nil {
		return
	}

	if e.cfg.OnRefused != nil {
		e.cfg.OnRefused(conn.RemoteAddr(), err)
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
	_ = session.WriteFrame(secure, session.RefusalFrame, []byte(why))
}

// strangerRefusal is all that a dialer in plain text is told.
const strangerRefusal = "in plain text it says no more: see OnRefused of its Config"

// refusalTime is the time that a refusal has to go out, once an exchange has ended.
const refusalTime = time.Second

var errHungUp = errors.New("too many silent connections")

// Listen is net.Listen for Serve. The socket file that a killed program has left does not stop it:
// a file at which the kernel refuses connections is replaced.
func Listen(network, address string) (net.Listener, error) {
	return session.Listen(network, address)
}

// Origin returns the address that dialled this engine through Serve, and the name and serial number
// of its certificate where it has shown one. It is "" for other Peers.
func (p *Peer) Origin() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.origin
}

// Certificate returns the certificate that the Peer has shown which dialled this engine through
// Serve; it must not be changed. It is nil for other Peers, and where none was asked for.
func (p *Peer) Certificate() *x509.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.certificate
}

// introduction is the description of one side of an exchange.
type introduction struct {
	*wire.Directory
	show wire.Secret // for the hellos of our connections: see ticket
}

// introduceItself sends this engine's description, and a ticket that the other side's
// connections have to show; g is nil where this engine began the exchange.
func (e *Engine) introduceItself(conn net.Conn, g *guest) (*ticket, error) {
	ours, err := e.Describe()
	if err != nil {
		return nil, err
	}
	t := e.issueTicket(session.StreamOrigin(conn))
	t.guest = g
	err = session.WriteFrame(conn, session.DescriptionFrame, append(ours, t.secret[:]...))
	if err != nil {
		e.revokeTicket(t)
		return nil, err
	}
	return t, nil
}

// readIntroduction refuses nonsense before anything is given in return.
func (e *Engine) readIntroduction(conn io.Reader) (*introduction, error) {
	b, err := session.ReadFrame(conn, e.cfg.DescriptionMax+len(wire.Secret{}))
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
	switch network {
	case "unix":
	case "tcp", "tcp4", "tcp6":
		if e.cfg.Identity == nil {
			if err := e.meets.CheckPlain(); err != nil {
				return nil, &OpError{Op: "dial", Err: err}
			}
		}
	default:
		return nil, &OpError{Op: "dial", Err: fmt.Errorf("network %q: there are \"unix\" and "+
			"\"tcp\": %w", network, ErrNotSupported)}
	}
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
		case e.life.Err() != nil:
			return nil, &OpError{Op: "dial", Err: ErrClosed}
		case isRetryable(err, time.Since(began) >= immediateClose ||
			time.Since(first) < e.cfg.HandshakeTimeout):
			last = err
			if !sleep(ctx, pause) {
				return nil, e.unserved(err, time.Since(first))
			}
		case last != nil && ctx.Err() != nil: // the context's error says less
			return nil, e.unserved(last, time.Since(first))
		default:
			return nil, err
		}
	}
}

// unserved is the error of a Dial whose time is over, by its last try: no process listened, or it
// hung up each time.
func (e *Engine) unserved(last error, took time.Duration) error {
	if e.life.Err() != nil {
		return &OpError{Op: "dial", Err: ErrClosed}
	}
	var dial *net.OpError
	if !errors.As(last, &dial) || dial.Op != "dial" {
		return last
	}
	return &OpError{Op: "dial", Err: fmt.Errorf("no engine served there for %v: start the other "+
		"side, or correct the address: %w", took.Round(10*time.Millisecond), dial)}
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

func (e *Engine) dial(ctx context.Context, conn net.Conn, host string) (p *Peer, err error) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	secure, err := e.meets.Call(ctx, conn, host)
	var t *ticket
	if err == nil {
		if t, err = e.introduceItself(secure, nil); err != nil {
			err = e.meets.Explain(err, secure)
		}
	}
	var theirs *introduction
	if err == nil {
		if theirs, err = e.readIntroduction(secure); err != nil {
			e.revokeTicket(t)
			err = e.meets.Explain(err, secure)
		}
	}
	if err == nil {
		p, err = e.connectTo(ctx, theirs, t)
	}
	if err == nil {
		if _, err = session.ReadFrame(secure, 0); err != nil {
			err = fmt.Errorf("peer %s did not connect back: %w", p.name, err)
			if !p.isSelf() { // which others have, too
				err = errors.Join(err, p.Close())
			}
		}
	}
	if err == nil {
		return p, nil
	}
	if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("the other side had not answered: %w", ctx.Err())
	}
	return nil, &OpError{Op: "dial", Err: err}
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

// guest is an engine that has come through Serve, from its first byte until its Peer is closed.
type guest struct {
	e       *Engine
	host    session.Host
	from    io.Reader // its description
	dialled bool      // this engine has begun to connect back

	// Engine.mu guards what follows.
	bytes int
	peer  bool // it has a place among the peers
	bound bool // a Peer stands for it, which ends it
}

// Read implements io.Reader. It counts the bytes of the guest's description, and gives no more than
// there is room for.
func (g *guest) Read(b []byte) (int, error) {
	n, err := g.from.Read(b)
	g.e.mu.Lock()
	defer g.e.mu.Unlock()
	c := &g.e.guests.bytes
	if fits, _ := c.Fits(g.host, n); !fits {
		return 0, fmt.Errorf("the descriptions of all peers take %d bytes at most, of one host "+
			"half as many, raise Config.DescriptionMax: %w", c.Most, ErrFull)
	}
	c.Add(g.host, n)
	g.bytes += n
	return n, err
}

// reservePlace reserves a place among the peers.
func (g *guest) reservePlace() error {
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
	secret  wire.Secret
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

// hello is the first message of each connection.
func (e *Engine) hello(show wire.Secret) []byte {
	h := wire.Hello{ID: e.id, Show: show, Name: e.cfg.Name}
	return h.Append(nil)
}
