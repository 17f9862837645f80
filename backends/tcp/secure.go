// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// security is how the two ends of a connection know each other. Both must have the same.
type security uint8

const (
	plain     security = iota // plain text: not at all; tokens alone open memory
	certified                 // TLS with certificates of both sides
	pinned                    // TLS with the key that the owner's address names: see ownKey
)

func (s security) String() string {
	return [...]string{"in plain text (Config.Plaintext)",
		"by certificates (Config.TLS or Identity)",
		"by the key in its address (neither TLS, Identity nor Plaintext)"}[s]
}

// secureCall encrypts a connection that this backend has opened to a place of an owner.
func (b *Backend) secureCall(ctx context.Context, tcp *net.TCPConn, to *address,
	place string) (net.Conn, error) {
	switch b.address.security {
	case plain:
		return tcp, nil
	case pinned:
		return callPinned(ctx, &records{TCPConn: tcp, b: b}, to.pin)
	}
	return b.identity.Call(ctx, &records{TCPConn: tcp, b: b}, withoutPort(place))
}

// secureAnswer encrypts a connection that a peer has opened.
func (b *Backend) secureAnswer(ctx context.Context, tcp *net.TCPConn) (net.Conn, error) {
	switch b.address.security {
	case plain:
		return tcp, nil
	case pinned:
		return b.ownKey.answer(ctx, &records{TCPConn: tcp, b: b})
	}
	return b.identity.Answer(ctx, &records{TCPConn: tcp, b: b})
}

// explainHangUp adds to an error why the owner may have hung up before its welcome: it may have
// refused this side's certificate.
func (b *Backend) explainHangUp(err error, tcp net.Conn) error {
	if b.address.security != certified {
		return err
	}
	return b.identity.Explain(err, withoutPort(tcp.RemoteAddr().String()))
}

// withoutPort returns the host of a place.
func withoutPort(place string) string {
	host, _, err := net.SplitHostPort(place)
	if err != nil {
		return place
	}
	return host
}

// pin is the part of a pinned address by which both sides prove themselves: a digest of the owner's
// key, and a secret that shows the owner that an initiator was given the address.
type pin struct {
	key    [sha256.Size]byte // digest of the public key
	secret [16]byte
}

// ownKey is the key of a backend whose Config has no identity. Each backend makes a new one, so
// that nothing need be configured: an initiator trusts the key because the address that names it
// came by a channel that its program trusts. A program that stands between the two has another key.
type ownKey struct {
	pin    pin
	server *tls.Config
}

func newOwnKey() (*ownKey, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	// Initiators look at nothing in the certificate but its key.
	text, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0),
	}, &x509.Certificate{}, public, private)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	k := &ownKey{server: &tls.Config{MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true,
		DynamicRecordSizingDisabled: true, // transfers are large
		Certificates: []tls.Certificate{{
			Certificate: [][]byte{text}, PrivateKey: private}}}}
	_, _ = rand.Read(k.pin.secret[:]) // never fails: it ends the program instead
	cert, err := x509.ParseCertificate(text)
	if err != nil {
		return nil, fmt.Errorf("read the certificate: %w", err)
	}
	k.pin.key = sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return k, nil
}

func (k *ownKey) answer(ctx context.Context, conn net.Conn) (net.Conn, error) {
	return shake(ctx, tls.Server(conn, k.server))
}

var errOtherKey = errors.New("what answers at the owner's address has another key than the " +
	"address names: it is another program, or one that stands between")

// callPinned is secureCall to the owner of a key, and to no other.
func callPinned(ctx context.Context, conn net.Conn, p pin) (net.Conn, error) {
	c := tls.Client(conn, &tls.Config{MinVersion: tls.VersionTLS13,
		DynamicRecordSizingDisabled: true,
		InsecureSkipVerify:          true, // VerifyConnection checks the key instead
		VerifyConnection: func(s tls.ConnectionState) error {
			got := sha256.Sum256(s.PeerCertificates[0].RawSubjectPublicKeyInfo)
			if subtle.ConstantTimeCompare(got[:], p.key[:]) != 1 {
				return fmt.Errorf("%w: %w", errOtherKey, driver.ErrBadToken)
			}
			return nil
		}})
	return shake(ctx, c)
}

func shake(ctx context.Context, c *tls.Conn) (net.Conn, error) {
	err := c.HandshakeContext(ctx)
	if ctx.Err() != nil {
		err = driver.ContextError(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("handshake of TLS: %w", err)
	}
	return c, nil
}

// records is the socket to which crypto/tls writes one record of 16 KiB after the other. Once the
// connection reads and writes frames, records are kept in a chunk, and flush writes what the socket
// takes: crypto/tls never waits for the socket, and the kernel is called once for several records.
type records struct {
	*net.TCPConn
	b *Backend

	mu      sync.Mutex // crypto/tls may write on its own while it reads
	c       *conn      // of which records are kept; nil: its handshake
	chunk   *chunk     // records that are kept; nil: none
	written int        // bytes of them that are written

	// read is readOnce as a closure, which is allocated once. Read passes it into, and readOnce
	// leaves the others.
	read    func(fd uintptr) bool
	into    []byte
	readN   int
	readErr error
}

// recordsSlack is the number of bytes by which TLS records may exceed the chunk that they encrypt,
// with a few that crypto/tls writes on its own.
const recordsSlack = 256

// errRecords: the peer had crypto/tls answer too often, and reads none of the answers.
var errRecords = fmt.Errorf("more records of TLS than were asked for: %w", driver.ErrCorrupt)

// keep begins to keep records until flush. The reading goroutine of c starts later.
func (r *records) keep(c *conn) {
	r.mu.Lock()
	r.c, r.read = c, r.readOnce
	r.mu.Unlock()
}

// Read implements net.Conn.
func (r *records) Read(p []byte) (int, error) {
	if r.c == nil {
		return r.TCPConn.Read(p)
	}
	r.into = p
	if err := r.c.raw.Read(r.read); err != nil {
		return 0, err
	}
	return r.readN, r.readErr
}

// readOnce does the work of Read. The runtime's poller calls it until it returns true.
func (r *records) readOnce(fd uintptr) bool {
	for {
		n, err := unix.Read(int(fd), r.into)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			if r.c.look(int(fd)) {
				continue
			}
			return false
		case n == 0:
			err = io.EOF
		}
		r.readN, r.readErr = max(n, 0), err
		return true
	}
}

// Write implements net.Conn.
func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.c == nil {
		return r.TCPConn.Write(p)
	}
	if r.chunk == nil {
		r.chunk = r.b.chunks.get()
		r.chunk.n, r.written = 0, 0
	}
	if len(p) > len(r.chunk.mem)-r.chunk.n {
		_ = r.TCPConn.CloseRead() // which the reading goroutine finds
		return 0, errRecords
	}
	r.chunk.n += copy(r.chunk.mem[r.chunk.n:], p)
	return len(p), nil
}

// wait reports whether records wait for flush.
func (r *records) wait() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.chunk != nil
}

// flush writes the records that Write has kept, as far as the socket takes them: EAGAIN if it does
// not take all.
func (r *records) flush(fd int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.chunk != nil {
		n, err := unix.Write(fd, r.chunk.mem[r.written:r.chunk.n])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if r.written += n; r.written == r.chunk.n {
			r.b.chunks.put(r.chunk)
			r.chunk = nil
		}
	}
	return nil
}
