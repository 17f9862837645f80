// SPDX-License-Identifier: Apache-2.0

// Package identity gives a program its identity on a network, and says which peers it accepts:
// TLS 1.3 with certificates of both sides, from files or from a tls.Config. Engines exchange
// their descriptions so (engine.Config.Identity), and backend tcp its bytes
// (tcp.Config.Identity); one Identity serves both.
//
// A peer is known by the authority that signed its certificate: each program with a certificate of
// it is a member, by whatever name and address, so the authority should be the project's
// own. CheckHost and CheckName ask for the name as well.
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

// Identity makes connections secure. It may be used from any goroutine, by any number of
// engines and backends. FromFiles and FromTLS make one.
type Identity struct {
	source source
	host   bool   // a dialled peer's certificate is for the host that was dialled
	name   string // it is for this name instead
}

// source gives what the next handshake takes.
type source interface {
	current() *faces
	trouble() error // of the last attempt to renew it
}

// faces are what one handshake takes: on the side that dials, and on the side that answers.
type faces struct {
	caller, called *tls.Config
	leaf           *x509.Certificate // nil: known when it is asked for
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
		// Shown whatever the other side asks for: it refuses a wrong one with a better reason
		// than none.
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
	s.SessionTicketsDisabled = true // each connection shows its certificate
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

// memberOf verifies everything of a certificate but its name: hosts are known by numbers that
// come and go. The functions of base are given the chains that were found, as crypto/tls gives
// them on the side that is called: a peer need not send what lies between it and an authority.
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

// Call secures a connection that we began, to host, which CheckHost looks at; empty: what the
// connection's address says. Where it fails the connection is the caller's to close.
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

// Answer secures a connection that a peer began. When it returns without an error, the
// other side has shown a certificate. Where it fails the connection is the caller's to close.
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

// Facts are what can be said of an Identity without a secret.
type Facts struct {
	Name       string   // the subject of the certificate
	Hosts      []string // that it is for, names and addresses
	Issuer     string
	IssuerKey  []byte // identifier of the authority's key, which tells two of one name apart
	NotBefore  time.Time
	NotAfter   time.Time
	RenewError error // the files have changed, and could not be read: those of before are in use
}

// Facts looks at what the next handshake will take. It is empty where a tls.Config gives the
// certificate by a function.
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
