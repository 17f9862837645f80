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
	"time"

	"github.com/sluicehq/sluice/driver"
)

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
