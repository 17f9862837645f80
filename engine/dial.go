// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/internal/session"
)

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

// immediateClose is within what time a server ends a stream that it does not want, for example
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
	secure, err := e.call(ctx, conn, host)
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
		return nil, e.explain(err, conn)
	}
	theirs, err := e.readIntroduction(conn)
	if err != nil {
		e.revokeTicket(t)
		return nil, e.explain(err, conn)
	}
	p, err := e.connectTo(ctx, theirs, t)
	if err != nil {
		return nil, err
	}
	if _, err := readFrame(conn, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("peer %s did not connect back: %w", p.name, err),
			p.closeUnlessSelf())
	}
	return p, nil
}
