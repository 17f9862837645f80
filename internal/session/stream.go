// SPDX-License-Identifier: Apache-2.0

package session

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
)

// StreamPolicy says which peers may be at the other end of a stream. A Unix socket needs no
// identity: the kernel says which user runs the other process.
type StreamPolicy struct {
	Identity  *identity.Identity // nil: none
	Plaintext bool               // streams over a network need no encryption
}

// Answer authenticates the dialer of an accepted stream and returns the stream to use from then on.
// proven reports that the dialer's user or certificate was checked. secure is nil if the TLS
// handshake failed.
func (p *StreamPolicy) Answer(ctx context.Context, conn net.Conn) (secure net.Conn, proven bool,
	err error) {
	switch c := conn.(type) {
	case *net.UnixConn:
		return conn, true, checkUser(c)
	case *tls.Conn:
		return conn, true, checkTLS(ctx, c, true)
	}
	if p.Identity == nil {
		return conn, false, p.CheckPlain()
	}
	secure, err = p.Identity.Answer(ctx, conn)
	return secure, true, err
}

// Call is the counterpart of Answer for the dialer; host is the name that it dialled.
func (p *StreamPolicy) Call(ctx context.Context, conn net.Conn, host string) (net.Conn, error) {
	switch c := conn.(type) {
	case *net.UnixConn:
		return conn, checkUser(c)
	case *tls.Conn:
		return conn, checkTLS(ctx, c, false)
	}
	if p.Identity == nil {
		return conn, p.CheckPlain()
	}
	return p.Identity.Call(ctx, conn, host)
}

// StreamFrom describes the other end of a stream, for messages: its address, and the name and
// serial number of its certificate if it has shown one.
func StreamFrom(conn net.Conn) string {
	text := conn.RemoteAddr().String()
	if shown := StreamCertificate(conn); shown != nil {
		text += fmt.Sprintf(" (certificate of %q, serial number %x)", shown.Subject.CommonName,
			shown.SerialNumber)
	}
	return text
}

// StreamCertificate returns the certificate that the other end of a stream has shown; nil: none.
func StreamCertificate(conn net.Conn) *x509.Certificate {
	if c, ok := conn.(*tls.Conn); ok {
		if all := c.ConnectionState().PeerCertificates; len(all) > 0 {
			return all[0]
		}
	}
	return nil
}

// CheckPlain returns an error unless the policy allows unencrypted streams.
func (p *StreamPolicy) CheckPlain() error {
	if p.Plaintext {
		return nil
	}
	return fmt.Errorf("the stream is in plain text: set Config.Identity, or Config.Plaintext on "+
		"a network that is trusted: %w", os.ErrPermission)
}

// checkTLS checks that a TLS connection which the program has set up meets the requirements of
// Config.Identity. The dialer's tls.Config has already verified the other side.
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

// Explain adds to the error of an exchange the reason that TLS knows for the end of the connection.
func (p *StreamPolicy) Explain(err error, conn net.Conn) error {
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
	id := p.Identity
	if id == nil {
		id = &identity.Identity{}
	}
	return id.Explain(err, host)
}

// checkUser returns an error if another user runs the process at the other end of a Unix socket.
func checkUser(u *net.UnixConn) error {
	cred, err := credentials(u)
	if err != nil {
		return fmt.Errorf("check user of the other side: %w", err)
	}
	if int(cred.Uid) != os.Geteuid() {
		return fmt.Errorf("the other side runs as user %d, this one as %d: run both as one user, "+
			"or use TLS over TCP: %w", cred.Uid, os.Geteuid(), os.ErrPermission)
	}
	return nil
}

func credentials(u *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if controlErr != nil {
		return nil, controlErr
	}
	return cred, err
}

// StreamOrigin names the process at the other end of a Unix socket, or the host at the end of any
// other stream.
func StreamOrigin(conn net.Conn) string {
	if u, ok := conn.(*net.UnixConn); ok {
		if cred, err := credentials(u); err == nil {
			return fmt.Sprintf("process %d", cred.Pid)
		}
	}
	return "host " + HostOf(conn).String()
}

// The exchange over a stream: the dialer sends its description and the server answers with its own.
// Then both connect their backends, and the server reports with an empty frame that it has done so.
// A frame is a mark, a length of 4 bytes, little endian, and the bytes: a description or, to end
// the exchange, the text of an error.
const (
	DescriptionFrame = 'D'
	RefusalFrame     = 'E'
	frameHeadBytes   = 5
	refusalMax       = 1 << 10
)

// WriteFrame sends a frame with this mark.
func WriteFrame(w io.Writer, mark byte, b []byte) error {
	if mark == RefusalFrame {
		b = b[:min(len(b), refusalMax)]
	}
	frame := binary.LittleEndian.AppendUint32([]byte{mark}, uint32(len(b)))
	_, err := w.Write(append(frame, b...))
	return err
}

// ReadFrame reads a description of at most limit bytes. If the other side has refused, the error is
// ErrNoRoute.
func ReadFrame(r io.Reader, limit int) ([]byte, error) {
	var head [frameHeadBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("read description: %w", err)
	}
	n := int64(binary.LittleEndian.Uint32(head[1:]))
	switch {
	case head[0] == RefusalFrame && n <= refusalMax:
		text := make([]byte, n)
		if _, err := io.ReadFull(r, text); err != nil {
			return nil, fmt.Errorf("read refusal: %w", err)
		}
		return nil, fmt.Errorf("refused by the other side: %q: %w", text, driver.ErrNoRoute)
	case head[0] != DescriptionFrame:
		return nil, fmt.Errorf("the other side does not speak this protocol (first byte %#x): %w",
			head[0], driver.ErrCorrupt)
	case n > int64(limit):
		return nil, fmt.Errorf("description of %d bytes, at most %d: %w", n, limit,
			driver.ErrBounds)
	}
	// The buffer grows as bytes arrive, so that a false length allocates no memory.
	b, err := io.ReadAll(io.LimitReader(r, n))
	if err == nil && int64(len(b)) != n {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("read description: %w", err)
	}
	return b, nil
}
