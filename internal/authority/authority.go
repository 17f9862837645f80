// SPDX-License-Identifier: Apache-2.0

// Package authority makes certificate authorities for tests and small clusters: ECDSA on P-256,
// one key that signs, and certificates of members for both sides of a connection.
package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Pair is a certificate and its key, in PEM.
type Pair struct{ Cert, Key []byte }

// Authority signs certificates.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// skew is how much clocks of a cluster may differ without a new certificate being refused.
const skew = 5 * time.Minute

// New makes an authority of that name, valid from now on for as long.
func New(name string, valid time.Duration) (*Authority, Pair, error) {
	t, err := template(name, time.Now(), valid)
	if err != nil {
		return nil, Pair{}, err
	}
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, Pair{}, fmt.Errorf("make a key: %w", err)
	}
	pair, cert, err := sign(t, t, key, key)
	if err != nil {
		return nil, Pair{}, err
	}
	return &Authority{cert, key}, pair, nil
}

// Parse reads what New has made.
func Parse(p Pair) (*Authority, error) {
	cert, key := block(p.Cert, "CERTIFICATE"), block(p.Key, "PRIVATE KEY")
	if cert == nil || key == nil {
		return nil, fmt.Errorf("no certificate, or no key, in PEM: %w", driver.ErrBounds)
	}
	c, err := x509.ParseCertificate(cert)
	if err != nil {
		return nil, fmt.Errorf("read certificate: %w", err)
	}
	k, err := x509.ParsePKCS8PrivateKey(key)
	if err != nil {
		// what was wrong with it may tell of it
		return nil, errors.New("read key: it is no key in PKCS #8")
	}
	signer, ok := k.(*ecdsa.PrivateKey)
	switch {
	case !ok || !signer.PublicKey.Equal(c.PublicKey):
		return nil, fmt.Errorf("the key is not that of the certificate of %q: %w",
			c.Subject.CommonName, driver.ErrBounds)
	case !c.IsCA:
		return nil, fmt.Errorf("the certificate of %q is no authority's: %w", c.Subject.CommonName,
			driver.ErrBounds)
	}
	return &Authority{c, signer}, nil
}

func block(text []byte, kind string) []byte {
	b, _ := pem.Decode(text)
	if b == nil || b.Type != kind {
		return nil
	}
	return b.Bytes
}

// Cert is its certificate, by which members know each other.
func (a *Authority) Cert() *x509.Certificate { return a.cert }

// Member is what a certificate says.
type Member struct {
	Name  string
	Hosts []string // names and addresses that it is for; none: Name
	From  time.Time
	Valid time.Duration
}

// Issue makes a certificate for both sides of a connection. It is not valid for longer than
// the authority's own.
func (a *Authority) Issue(m Member) (Pair, *x509.Certificate, error) {
	if m.From.IsZero() {
		m.From = time.Now()
	}
	t, err := template(m.Name, m.From, m.Valid)
	if err != nil {
		return Pair{}, nil, err
	}
	if t.NotAfter.After(a.cert.NotAfter) {
		t.NotAfter = a.cert.NotAfter
	}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	hosts := m.Hosts
	if len(hosts) == 0 {
		hosts = []string{m.Name}
	}
	for _, h := range hosts {
		ip := net.ParseIP(h)
		odd := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("/:@", r) }
		if ip == nil && (h == "" || strings.ContainsFunc(h, odd)) {
			return Pair{}, nil, fmt.Errorf("host %q: want a name in ASCII or an address, without "+
				"a port: %w", h, driver.ErrBounds)
		}
		if ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, nil, fmt.Errorf("make a key: %w", err)
	}
	return sign(t, a.cert, key, a.key)
}

// nameMax bounds names: longer ones are refused by others (RFC 5280, ub-common-name).
const nameMax = 64

func template(name string, from time.Time, valid time.Duration) (*x509.Certificate, error) {
	if name == "" || len(name) > nameMax {
		return nil, fmt.Errorf("a name of %d bytes, want 1 to %d: %w", len(name), nameMax,
			driver.ErrBounds)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	return &x509.Certificate{
		SerialNumber: serial.Add(serial, big.NewInt(1)), Subject: pkix.Name{CommonName: name},
		NotBefore: from.Add(-skew), NotAfter: from.Add(valid),
	}, nil
}

func sign(t, parent *x509.Certificate, key, by *ecdsa.PrivateKey) (Pair, *x509.Certificate, error) {
	raw, err := x509.CreateCertificate(rand.Reader, t, parent, &key.PublicKey, by)
	if err != nil {
		return Pair{}, nil, fmt.Errorf("sign certificate of %q: %w", t.Subject.CommonName, err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		return Pair{}, nil, fmt.Errorf("read what was signed: %w", err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Pair{}, nil, fmt.Errorf("encode key: %w", err)
	}
	return Pair{
		Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}),
		Key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
	}, cert, nil
}
