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
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// security is how the ends of a connection know each other: both must do it alike.
type security uint8

const (
	plain     security = iota // by tokens alone
	certified                 // TLS with certificates of both sides
	pinned                    // TLS with the key that the owner's address names: see ownKey
)

func (s security) String() string {
	return [...]string{"in plain text (Config.Plaintext)",
		"by certificates (Config.TLS or Identity)",
		"by the key in its address (neither TLS, Identity nor Plaintext)"}[s]
}

// call secures a connection that we began, to a place of its owner's.
func (b *Backend) call(ctx context.Context, tcp *net.TCPConn, to *address, place string) (net.Conn,
	error) {
	switch b.address.security {
	case plain:
		return tcp, nil
	case pinned:
		return callPinned(ctx, &records{TCPConn: tcp, b: b}, to.pin)
	}
	return b.secure.Call(ctx, &records{TCPConn: tcp, b: b}, withoutPort(place))
}

// answer secures a connection that a peer began.
func (b *Backend) answer(ctx context.Context, tcp *net.TCPConn) (net.Conn, error) {
	switch b.address.security {
	case plain:
		return tcp, nil
	case pinned:
		return b.own.answer(ctx, &records{TCPConn: tcp, b: b})
	}
	return b.secure.Answer(ctx, &records{TCPConn: tcp, b: b})
}

// refusal says why the owner hung up in place of a welcome: it may have refused our
// certificate.
func (b *Backend) refusal(err error, tcp net.Conn) error {
	if b.address.security != certified {
		return err
	}
	return b.secure.Explain(err, withoutPort(tcp.RemoteAddr().String()))
}

// withoutPort is a place without its port.
func withoutPort(place string) string {
	host, _, err := net.SplitHostPort(place)
	if err != nil {
		return place
	}
	return host
}

// pin is what an address says of its owner's key, and what the owner asks of its callers: they
// have been given the address.
type pin struct {
	key    [sha256.Size]byte // digest of the public key
	secret [16]byte
}

// ownKey is the key of a backend to which no other identity was given. It is made anew for each, so
// that nothing need be configured: a peer trusts it as the address that names it came by a channel
// that the program trusts, and proves by the secret in it that it may call. What passes is
// encrypted; a program between the two has another key.
type ownKey struct {
	pin    pin
	server *tls.Config
}

func newOwnKey() (*ownKey, error) {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	// What a certificate says is not looked at, but for its key.
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

// callPinned speaks to the owner of a key, and to no other.
func callPinned(ctx context.Context, conn net.Conn, p pin) (net.Conn, error) {
	c := tls.Client(conn, &tls.Config{MinVersion: tls.VersionTLS13,
		DynamicRecordSizingDisabled: true,
		InsecureSkipVerify:          true, // by names and authorities; the key is looked at instead
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

// records is a socket below TLS, which writes one record of 16 KiB after the other. Between hold
// and flush they wait in a chunk, so that the kernel is called once for several.
type records struct {
	*net.TCPConn
	b *Backend

	mu     sync.Mutex // TLS may write of itself while the program reads
	chunk  *chunk     // nil: nothing is held back
	holds  bool
	failed error
}

// recordsSlack is by how much the records of what fits into a chunk may exceed it.
const recordsSlack = 256

// hold keeps what is written until flush.
func (r *records) hold() {
	r.mu.Lock()
	r.holds = true
	r.mu.Unlock()
}

// flush writes what was kept. What failed once fails for good, as TLS does.
func (r *records) flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.holds = false
	r.empty()
	return r.failed
}

// Write implements net.Conn.
func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.chunk != nil && len(p) > len(r.chunk.mem)-r.chunk.n {
		r.empty()
	}
	if r.failed != nil {
		return 0, r.failed
	}
	if !r.holds {
		return r.TCPConn.Write(p)
	}
	if r.chunk == nil {
		r.chunk = r.b.chunks.get()
		r.chunk.n = 0
	}
	r.chunk.n += copy(r.chunk.mem[r.chunk.n:], p) // a record is smaller than a chunk
	return len(p), nil
}

func (r *records) empty() {
	if r.chunk == nil {
		return
	}
	if _, err := r.TCPConn.Write(r.chunk.mem[:r.chunk.n]); r.failed == nil {
		r.failed = err
	}
	r.b.chunks.put(r.chunk)
	r.chunk = nil
}
