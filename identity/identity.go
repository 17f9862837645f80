// SPDX-License-Identifier: Apache-2.0

// Package identity configures mutual TLS: it gives a program its identity, and decides which peers
// it accepts. Connections use TLS 1.3 with certificates of both sides, from files or from a
// tls.Config. Engines use it to exchange their descriptions (engine.Config.Identity), and backend
// tcp to move bytes (tcp.Config.Identity). One Identity can serve both.
//
// A peer is accepted if an authority of ours has signed its certificate, no matter what name and
// address the certificate has. So the authority should sign only for one deployment. CheckHost and
// CheckName also check the name.
package identity

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Identity secures connections. It is safe for concurrent use, and any number of engines and
// backends may share one. FromFiles and FromTLS make one.
type Identity struct {
	source source
	host   bool   // the certificate of a dialled peer must be for the dialled host
	name   string // it must be for this name instead; empty: for the dialled host
}

// source provides the configuration of the next handshake.
type source interface {
	current() *faces
	trouble() error // the error of the last attempt to renew it
}

// faces is the TLS configuration of a handshake: caller for the side that dials, called for the
// side that accepts.
type faces struct {
	caller, called *tls.Config
	leaf           *x509.Certificate // our certificate; nil: a function returns it in the handshake
}

// FromTLS makes an Identity of a tls.Config, of which Certificates (or GetCertificate and
// GetClientCertificate), RootCAs and ClientCAs must be set. TLS 1.3 with certificates of both
// sides is asked for on every connection, whatever else it says, also by GetConfigForClient. The
// side that is called must show a certificate for ServerName where that is set; else any of
// RootCAs will do.
func FromTLS(base *tls.Config) (*Identity, error) {
	switch {
	case base == nil:
		return nil, fmt.Errorf("identity: no tls.Config: %w", driver.ErrBounds)
	case len(base.Certificates) == 0 && base.GetCertificate == nil:
		return nil, fmt.Errorf("identity: the tls.Config has no Certificates: %w", driver.ErrBounds)
	case base.RootCAs == nil || base.ClientCAs == nil:
		return nil, fmt.Errorf("identity: the tls.Config needs RootCAs and ClientCAs, by which "+
			"peers are known: %w", driver.ErrBounds)
	}
	return &Identity{source: fixed{newFaces(base.Clone())}}, nil
}

// CheckHost returns an Identity that requires of a dialled peer, besides, that its certificate is
// for the host that was dialled. It keeps one member from answering in another's place.
func (i *Identity) CheckHost() *Identity { return &Identity{source: i.source, host: true} }

// CheckName returns an Identity that requires of a dialled peer, besides, that its certificate is
// for this name, whatever was dialled.
func (i *Identity) CheckName(name string) *Identity {
	return &Identity{source: i.source, host: true, name: name}
}

// fixed is a source that never changes.
type fixed struct{ f *faces }

func (s fixed) current() *faces { return s.f }
func (s fixed) trouble() error  { return nil }

func newFaces(base *tls.Config) *faces {
	called := strict(base, base.ClientCAs)
	if get := base.GetConfigForClient; get != nil {
		called.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			cfg, err := get(hello)
			if cfg == nil || err != nil {
				return nil, err
			}
			return strict(cfg, base.ClientCAs), nil
		}
	}
	caller := base.Clone()
	caller.MinVersion, caller.MaxVersion = tls.VersionTLS13, 0
	caller.ClientSessionCache = nil
	caller.DynamicRecordSizingDisabled = true // transfers are large
	caller.InsecureSkipVerify = base.ServerName == ""
	if base.ServerName == "" {
		caller.VerifyConnection, caller.VerifyPeerCertificate = memberOf(base), nil
	}
	if len(base.Certificates) == 1 && base.GetClientCertificate == nil {
		// Send the certificate even if the server does not list its authority: the server's error
		// for a wrong certificate says more than that for none.
		caller.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &base.Certificates[0], nil
		}
	}
	f := &faces{caller: caller, called: called}
	if len(base.Certificates) > 0 {
		f.leaf, _ = leafOf(&base.Certificates[0]) // one that cannot be read fails in the handshake
	}
	return f
}

// strict returns a config for the side that is called: TLS 1.3, and a certificate of the other
// side, signed by one of the config's ClientCAs or, where it has none, of authorities.
func strict(cfg *tls.Config, authorities *x509.CertPool) *tls.Config {
	s := cfg.Clone()
	s.MinVersion, s.MaxVersion = tls.VersionTLS13, 0
	s.ClientAuth = tls.RequireAndVerifyClientCert
	s.InsecureSkipVerify = false
	s.DynamicRecordSizingDisabled = true
	s.SessionTicketsDisabled = true // a resumed session would not send a certificate
	s.GetConfigForClient = nil
	if s.ClientCAs == nil {
		s.ClientCAs = authorities
	}
	return s
}

func leafOf(c *tls.Certificate) (*x509.Certificate, error) {
	if c.Leaf != nil {
		return c.Leaf, nil
	}
	if len(c.Certificate) == 0 {
		return nil, errors.New("no certificate in it")
	}
	return x509.ParseCertificate(c.Certificate[0])
}

// memberOf returns a tls.Config.VerifyConnection that verifies a certificate except for its name,
// since hosts are often known only by addresses that change. It passes the verified chains to the
// functions of base, as crypto/tls does on the server's side; a chain may contain intermediate
// certificates that the peer did not send.
func memberOf(base *tls.Config) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		if len(s.PeerCertificates) == 0 {
			return errors.New("the other side shows no certificate")
		}
		o := x509.VerifyOptions{Roots: base.RootCAs, Intermediates: x509.NewCertPool(),
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
		if base.Time != nil {
			o.CurrentTime = base.Time()
		}
		for _, c := range s.PeerCertificates[1:] {
			o.Intermediates.AddCert(c)
		}
		var err error
		s.VerifiedChains, err = s.PeerCertificates[0].Verify(o)
		if err == nil && base.VerifyPeerCertificate != nil {
			raw := make([][]byte, len(s.PeerCertificates))
			for i, c := range s.PeerCertificates {
				raw[i] = c.Raw
			}
			err = base.VerifyPeerCertificate(raw, s.VerifiedChains)
		}
		if err == nil && base.VerifyConnection != nil {
			err = base.VerifyConnection(s)
		}
		return err
	}
}

// Call performs the handshake of a connection that this side has dialled. CheckHost compares the
// certificate with host or, if that is empty, with the connection's remote address. After an error
// the caller must close conn.
func (i *Identity) Call(ctx context.Context, conn net.Conn, host string) (net.Conn, error) {
	cfg := i.source.current().caller
	if i.host {
		host = cmp.Or(i.name, host)
		if host == "" {
			host = hostOf(conn)
		}
		cfg = cfg.Clone()
		cfg.VerifyConnection = forHost(host, cfg.VerifyConnection)
	}
	return i.shake(ctx, tls.Client(conn, cfg))
}

func forHost(host string, also func(tls.ConnectionState) error) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		if also != nil {
			if err := also(s); err != nil {
				return err
			}
		}
		return s.PeerCertificates[0].VerifyHostname(host)
	}
}

// Answer performs the handshake of a connection that a peer has dialled. If it succeeds, the peer
// has a certificate of one of our authorities. After an error the caller must close conn.
func (i *Identity) Answer(ctx context.Context, conn net.Conn) (net.Conn, error) {
	return i.shake(ctx, tls.Server(conn, i.source.current().called))
}

func (i *Identity) shake(ctx context.Context, c *tls.Conn) (net.Conn, error) {
	if err := c.HandshakeContext(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("handshake of TLS: %w", driver.ContextError(ctx))
		}
		return nil, fmt.Errorf("handshake of TLS: %w", i.Explain(err, hostOf(c)))
	}
	return c, nil
}

func hostOf(c net.Conn) string {
	at := c.RemoteAddr()
	if at == nil {
		return "the other side"
	}
	if host, _, err := net.SplitHostPort(at.String()); err == nil {
		return host
	}
	return at.String()
}

// Facts describes the certificate of an Identity. It contains no secret.
type Facts struct {
	Name       string   // the subject of the certificate
	Hosts      []string // names and addresses that the certificate is for
	Issuer     string
	IssuerKey  []byte // identifier of the authority's key: authorities may have the same name
	NotBefore  time.Time
	NotAfter   time.Time
	RenewError error // changed files could not be used, and their former content is still in use
}

// Facts describes the certificate of the next handshake. It is empty if a function of a tls.Config
// returns the certificate.
func (i *Identity) Facts() Facts {
	if i.source == nil {
		return Facts{}
	}
	f := i.source.current()
	facts := Facts{RenewError: i.source.trouble()}
	if c := f.leaf; c != nil {
		facts.Name, facts.Issuer, facts.IssuerKey = c.Subject.CommonName, c.Issuer.CommonName,
			c.AuthorityKeyId
		facts.NotBefore, facts.NotAfter = c.NotBefore, c.NotAfter
		facts.Hosts = namesOf(c)
	}
	return facts
}

func namesOf(c *x509.Certificate) []string {
	names := append([]string(nil), c.DNSNames...)
	for _, ip := range c.IPAddresses {
		names = append(names, ip.String())
	}
	return names
}
