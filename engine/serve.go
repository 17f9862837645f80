// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/wire"
)

// The exchange over a stream: the dialer sends its description, the server
// answers with its own; each is a mark, a length of 4 bytes, little endian, and
// the bytes. Both connect, then the server says with a last frame of no bytes
// that it has. A frame under the other mark is an error text and ends it.
const (
	frameMark   = 'D'
	refusalMark = 'E'
	frameHead   = 5
	refusalMax  = 1 << 10
)

// Serve exchanges descriptions with engines that dial and may, until ctx ends or the listener
// is closed, and connects back: Config.OnPeer is given each new peer. The listener may be
// a Unix socket (peers of another user are refused), or of a network: then Config.Identity says
// which peers may be a peer, or Config.Plaintext that everybody may. A listener that speaks TLS
// itself, by tls.NewListener, must ask for certificates.
//
// A connection that has not proved its identity is told nothing, but in plain text, where all are
// served. There an engine with which no connection comes about is not told why, and not before
// HandshakeTimeout: what this host reaches is no stranger's business. OnRefused is told at once.
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
		if err := e.checkPlain(); err != nil {
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
// describe itself, answers, and connects back. What goes wrong is told to the dialer, once there is
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

	secure, member, err := s.e.answer(within, conn)
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
	_ = writeFrame(secure, refusalMark, []byte(why))
}

// strangerRefusal is all that a dialer in plain text is told.
const strangerRefusal = "in plain text it says no more: see OnRefused of its Config"

// refusalTime is what a refusal has to go out, once an exchange has ended.
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
		return writeFrame(conn, frameMark, nil)
	}
	g.dialled = true
	p, err := s.e.connectTo(ctx, theirs, t)
	if err != nil {
		return err
	}
	p.came(conn)
	p.served.Store(true)
	if err := writeFrame(conn, frameMark, nil); err != nil {
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

// closeUnlessSelf closes a peer that one exchange has made; Self is everybody's.
func (p *Peer) closeUnlessSelf() error {
	if p.isSelf() {
		return nil
	}
	return p.Close()
}

// introduction is what one side of an exchange says of itself.
type introduction struct {
	*wire.Directory
	show exchange.Secret // for the hellos of our connections: see ticket
}

// introduceItself sends this engine's description, and a ticket that the other side's
// connections have to show; g is nil where this engine began the exchange.
func (e *Engine) introduceItself(conn net.Conn, g *guest) (*ticket, error) {
	ours, err := e.describeTo(conn)
	if err != nil {
		return nil, err
	}
	t := e.issueTicket(originOf(conn))
	t.guest = g
	if err := writeFrame(conn, frameMark, append(ours, t.secret[:]...)); err != nil {
		e.revokeTicket(t)
		return nil, err
	}
	return t, nil
}

// readIntroduction refuses what makes no sense before anything is given in return.
func (e *Engine) readIntroduction(conn io.Reader) (*introduction, error) {
	b, err := readFrame(conn, e.cfg.DescriptionMax+len(exchange.Secret{}))
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

func writeFrame(w io.Writer, mark byte, b []byte) error {
	if mark == refusalMark {
		b = b[:min(len(b), refusalMax)]
	}
	frame := binary.LittleEndian.AppendUint32([]byte{mark}, uint32(len(b)))
	_, err := w.Write(append(frame, b...))
	return err
}

func readFrame(r io.Reader, limit int) ([]byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("read description: %w", err)
	}
	n := int64(binary.LittleEndian.Uint32(head[1:]))
	switch {
	case head[0] == refusalMark && n <= refusalMax:
		text := make([]byte, n)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, fmt.Errorf("read refusal: %w", err)
		}
		return nil, fmt.Errorf("refused by the other side: %q: %w", text, ErrNoRoute)
	case head[0] != frameMark:
		return nil, fmt.Errorf("the other side does not speak this protocol (first byte %#x): %w",
			head[0], ErrCorrupt)
	case n > int64(limit):
		return nil, fmt.Errorf("description of %d bytes, at most %d: %w", n, limit, ErrBounds)
	}
	// Grows as bytes arrive: a length alone costs the reader nothing.
	b, err := io.ReadAll(io.LimitReader(r, n))
	if err == nil && int64(len(b)) != n {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("read description: %w", err)
	}
	return b, nil
}
