// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"

	"github.com/sluicehq/sluice/backends"
)

// identities are the two faces of Config.TLS: who began a connection, and who was called.
type identities struct{ caller, called *tls.Config }

func newIdentities(base *tls.Config) *identities {
	if base == nil {
		return nil
	}
	called := base.Clone()
	called.MinVersion = tls.VersionTLS13
	called.ClientAuth = tls.RequireAndVerifyClientCert
	called.InsecureSkipVerify = false
	called.SessionTicketsDisabled = true // each connection shows its certificate
	caller := base.Clone()
	caller.MinVersion = tls.VersionTLS13
	caller.ClientSessionCache = nil
	caller.InsecureSkipVerify = base.ServerName == ""
	if base.ServerName == "" {
		caller.VerifyConnection = memberOf(base.RootCAs, base.VerifyConnection)
	}
	return &identities{caller, called}
}

// memberOf verifies everything of a certificate but its name: hosts are known by numbers that
// come and go.
func memberOf(roots *x509.CertPool, also func(tls.ConnectionState) error) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return errors.New("the owner shows no certificate")
		}
		among := x509.NewCertPool()
		for _, c := range s.PeerCertificates[1:] {
			among.AddCert(c)
		}
		_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{
			Roots: roots, Intermediates: among, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		})
		if err == nil && also != nil {
			err = also(s)
		}
		return err
	}
}

// call secures a connection that we began.
func (s *identities) call(ctx context.Context, tcp net.Conn) (net.Conn, error) {
	if s == nil {
		return tcp, nil
	}
	return shake(ctx, tls.Client(tcp, s.caller))
}

// answer secures a connection that somebody else began.
func (s *identities) answer(ctx context.Context, tcp net.Conn) (net.Conn, error) {
	if s == nil {
		return tcp, nil
	}
	return shake(ctx, tls.Server(tcp, s.called))
}

func shake(ctx context.Context, c *tls.Conn) (net.Conn, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("handshake of TLS: %w", backends.ContextError(ctx))
		}
		return nil, fmt.Errorf("handshake of TLS, see Config.TLS: %w", err)
	}
	return c, nil
}
