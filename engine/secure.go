// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/sluicehq/sluice/identity"
)

// answer makes a stream that was accepted one that may be spoken over. proven: the
// other side is known by user or certificate.
func (e *Engine) answer(ctx context.Context, conn net.Conn) (secure net.Conn, proven bool,
	err error) {
	switch c := conn.(type) {
	case *net.UnixConn:
		return conn, true, checkUser(conn)
	case *tls.Conn:
		return conn, true, checkTLS(ctx, c, true)
	}
	if e.cfg.Identity == nil {
		return conn, false, e.checkPlain()
	}
	secure, err = e.cfg.Identity.Answer(ctx, conn)
	return secure, true, err // nil where TLS itself has said no
}

// call is answer for a stream that we began; host is what was dialled.
func (e *Engine) call(ctx context.Context, conn net.Conn, host string) (net.Conn, error) {
	switch c := conn.(type) {
	case *net.UnixConn:
		return conn, checkUser(conn)
	case *tls.Conn:
		return conn, checkTLS(ctx, c, false)
	}
	if e.cfg.Identity == nil {
		return conn, e.checkPlain()
	}
	return e.cfg.Identity.Call(ctx, conn, host)
}

// Origin says what dialled this engine through Serve: its address, and the name and serial number
// of its certificate where it has shown one. It is "" for other Peers.
func (p *Peer) Origin() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.origin
}

// came says by which stream a peer has come.
func (p *Peer) came(conn net.Conn) {
	text := conn.RemoteAddr().String()
	if shown := certificate(conn); shown != nil {
		text += fmt.Sprintf(" (certificate of %q, serial number %x)", shown.Subject.CommonName,
			shown.SerialNumber)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.origin = text
}

// certificate returns the certificate that the other side of a stream has shown; nil: none.
func certificate(conn net.Conn) *x509.Certificate {
	c, ok := conn.(*tls.Conn)
	if !ok {
		return nil
	}
	shown := c.ConnectionState().PeerCertificates
	if len(shown) == 0 {
		return nil
	}
	return shown[0]
}

func commonName(conn net.Conn) string {
	if shown := certificate(conn); shown != nil {
		return shown.Subject.CommonName
	}
	return ""
}

func (e *Engine) checkPlain() error {
	if e.cfg.Plaintext {
		return nil
	}
	return fmt.Errorf("the stream is in plain text: set Config.Identity, or Config.Plaintext on "+
		"a network that is trusted: %w", os.ErrPermission)
}

// checkTLS wants of TLS that the program has set up what Config.Identity would ask for. Of
// the side that was called the dialer's tls.Config has verified what it was told to.
func checkTLS(ctx context.Context, c *tls.Conn, called bool) error {
	if err := c.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("handshake of TLS: %w", err)
	}
	switch s := c.ConnectionState(); {
	case s.Version < tls.VersionTLS13:
		return fmt.Errorf("the stream has TLS before 1.3: set MinVersion, or use "+
			"Config.Identity: %w", os.ErrPermission)
	case called && len(s.VerifiedChains) == 0:
		return fmt.Errorf("the listener's TLS asks for no certificate: set ClientAuth to "+
			"tls.RequireAndVerifyClientCert, or use Config.Identity: %w", os.ErrPermission)
	}
	return nil
}

// explain adds to what an exchange failed with why the other side hung up, where TLS knows.
func (e *Engine) explain(err error, conn net.Conn) error {
	if _, plain := conn.(*net.TCPConn); plain && (errors.Is(err, io.EOF) ||
		errors.Is(err, syscall.ECONNRESET)) {
		return fmt.Errorf("the other side hung up on plain text (%w): it may ask for TLS, set "+
			"Config.Identity", err)
	}
	if _, secure := conn.(*tls.Conn); !secure {
		return err
	}
	host, _, splitErr := net.SplitHostPort(conn.RemoteAddr().String())
	if splitErr != nil {
		host = "the other side"
	}
	id := e.cfg.Identity
	if id == nil {
		id = &identity.Identity{}
	}
	return id.Explain(err, host)
}
