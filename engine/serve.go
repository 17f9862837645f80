// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

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

// Serve exchanges descriptions with whoever dials, until ctx ends or the listener
// is closed, and connects back: Config.OnPeer is given each new peer. The
// listener may be TCP, a Unix socket (peers of another user are refused) or TLS
// by tls.NewListener. Each exchange is bounded by HandshakeTimeout and
// DescriptionMax, and HandshakesMax of them run at once. Serve closes the listener.
func (e *Engine) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer l.Close()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	go func() {
		select {
		case <-e.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	var exchanges sync.WaitGroup
	defer exchanges.Wait()
	places := make(chan struct{}, e.cfg.HandshakesMax)
	for {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return e.serveEnd(ctx)
		}
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return e.serveEnd(ctx)
			}
			return &OpError{Op: "serve " + l.Addr().String(), Err: err}
		}
		exchanges.Add(1)
		go func() {
			defer func() { <-places; exchanges.Done() }()
			e.greet(ctx, conn)
		}()
	}
}

func (e *Engine) serveEnd(ctx context.Context) error {
	if e.isClosing() {
		return ErrClosed
	}
	return ctx.Err()
}

// greet is the server's side of one exchange. What goes wrong is told to the
// dialer; a server has nobody else to tell.
func (e *Engine) greet(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(e.cfg.HandshakeTimeout))
	p, err := e.meet(ctx, conn)
	if err != nil {
		_ = writeFrame(conn, refusalMark, []byte(err.Error()))
		return
	}
	p.served.Store(true)
	if writeFrame(conn, frameMark, nil) != nil {
		_ = p.closeUnlessSelf()
		return
	}
	if e.cfg.OnPeer != nil {
		go e.cfg.OnPeer(p)
		return
	}
	go func() { // nobody else can close it
		<-p.lost
		_ = p.closeUnlessSelf()
	}()
}

// closeUnlessSelf closes a peer that one exchange has made; Self is everybody's.
func (p *Peer) closeUnlessSelf() error {
	if p.isSelf() {
		return nil
	}
	return p.Close()
}

func (e *Engine) meet(ctx context.Context, conn net.Conn) (*Peer, error) {
	if err := checkUser(conn); err != nil {
		return nil, err
	}
	theirs, err := e.readDescription(conn)
	if err != nil {
		return nil, err
	}
	ours, err := e.Describe()
	if err != nil {
		return nil, err
	}
	if err := writeFrame(conn, frameMark, ours); err != nil {
		return nil, err
	}
	return e.Connect(ctx, theirs)
}

// Dial connects to an engine that serves at the address: "unix" and a path, or
// "tcp" and host:port. When it returns, the other side has connected back.
func (e *Engine) Dial(ctx context.Context, network, address string) (*Peer, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, &OpError{Op: "dial", Err: err}
	}
	return e.DialConn(ctx, conn)
}

// DialConn is Dial over a stream that is there already, TLS for instance. It
// closes the stream.
func (e *Engine) DialConn(ctx context.Context, conn net.Conn) (*Peer, error) {
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, e.cfg.ConnectTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer stop()
	p, err := e.introduce(ctx, conn)
	if err != nil {
		if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("the other side did not answer in time: %w", ctx.Err())
		}
		return nil, &OpError{Op: "dial", Err: err}
	}
	return p, nil
}

func (e *Engine) introduce(ctx context.Context, conn net.Conn) (*Peer, error) {
	if err := checkUser(conn); err != nil {
		return nil, err
	}
	ours, err := e.Describe()
	if err != nil {
		return nil, err
	}
	if err := writeFrame(conn, frameMark, ours); err != nil {
		return nil, err
	}
	theirs, err := e.readDescription(conn)
	if err != nil {
		return nil, err
	}
	p, err := e.Connect(ctx, theirs)
	if err != nil {
		return nil, err
	}
	if _, err := readFrame(conn, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("peer %s did not connect back: %w", p.name, err), p.closeUnlessSelf())
	}
	return p, nil
}

func (e *Engine) readDescription(conn net.Conn) ([]byte, error) {
	b, err := readFrame(conn, e.cfg.DescriptionMax)
	if err != nil {
		return nil, err
	}
	_, err = wire.Decode(b) // refused before anything is given in return
	return b, err
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
		return nil, fmt.Errorf("the other side does not speak this protocol (first byte %#x): %w", head[0], ErrCorrupt)
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
