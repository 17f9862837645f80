// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// CertificatePair is a certificate and its key, in PEM.
type CertificatePair struct{ Cert, Key []byte }

// Authority is a certificate authority. It signs with one key, of ECDSA on P-256, and the
// certificates of its members serve both sides of a connection.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an authority, whose certificate has this name and is valid for that long, from
// now on.
func NewAuthority(name string, valid time.Duration) (*Authority, CertificatePair, error) {
	t := certificateTemplate(name, time.Now(), valid)
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, CertificatePair{}, fmt.Errorf("make a key: %w", err)
	}
	pair, cert, err := sign(t, t, key, key)
	return &Authority{cert, key}, pair, err
}

// Cert returns the authority's own certificate, by which members verify each other.
func (a *Authority) Cert() *x509.Certificate { return a.cert }

// Member describes the certificate of a member.
type Member struct {
	Name  string
	Hosts []string // names and addresses of hosts that it is valid for; none: Name
	From  time.Time
	Valid time.Duration
}

// Issue makes a certificate for both sides of a connection.
func (a *Authority) Issue(m Member) (CertificatePair, *x509.Certificate, error) {
	if m.From.IsZero() {
		m.From = time.Now()
	}
	t := certificateTemplate(m.Name, m.From, m.Valid)
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	if len(m.Hosts) == 0 {
		t.DNSNames = []string{m.Name}
	}
	for _, h := range m.Hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return CertificatePair{}, nil, fmt.Errorf("make a key: %w", err)
	}
	return sign(t, a.cert, key, a.key)
}

// Revoke adds a serial number to a list of revoked certificates in PEM, and signs the list anew,
// under the next number. A nil list begins a new one; a nil serial number adds nothing.
func (a *Authority) Revoke(list []byte, serial *big.Int) ([]byte, error) {
	t := &x509.RevocationList{Number: big.NewInt(0), ThisUpdate: time.Now().Add(-time.Minute),
		NextUpdate: a.cert.NotAfter}
	if block, _ := pem.Decode(list); block != nil {
		before, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return nil, err
		}
		t.Number, t.RevokedCertificateEntries = before.Number, before.RevokedCertificateEntries
	}
	t.Number = new(big.Int).Add(t.Number, big.NewInt(1))
	if serial != nil {
		t.RevokedCertificateEntries = append(t.RevokedCertificateEntries,
			x509.RevocationListEntry{SerialNumber: serial, RevocationTime: time.Now()})
	}
	raw, err := x509.CreateRevocationList(rand.Reader, t, a.cert, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign the list of revoked certificates: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: raw}), nil
}

// Store writes the certificate and the key to files of a directory and returns their paths. It
// replaces files that are there, each in one step.
func (p CertificatePair) Store(dir, name string) (cert, key string, err error) {
	cert, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+"-key.pem")
	for _, f := range []struct {
		path string
		text []byte
	}{{key, p.Key}, {cert, p.Cert}} {
		if err := os.WriteFile(f.path+".new", f.text, 0o600); err != nil {
			return cert, key, err
		}
		if err := os.Rename(f.path+".new", f.path); err != nil {
			return cert, key, err
		}
	}
	return cert, key, nil
}

// CertificateSerial returns the serial number of the certificate in a file.
func CertificateSerial(path string) (*big.Int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s holds no certificate in PEM", path)
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.SerialNumber, nil
}

func certificateTemplate(name string, from time.Time, valid time.Duration) *x509.Certificate {
	return &x509.Certificate{
		Subject:   pkix.Name{CommonName: name}, // the serial number is made when it is signed
		NotBefore: from.Add(-time.Minute), NotAfter: from.Add(valid),
	}
}

func sign(t, parent *x509.Certificate, key, by *ecdsa.PrivateKey) (CertificatePair,
	*x509.Certificate, error) {
	raw, err := x509.CreateCertificate(rand.Reader, t, parent, &key.PublicKey, by)
	if err != nil {
		return CertificatePair{}, nil, fmt.Errorf("sign certificate of %q: %w",
			t.Subject.CommonName, err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		return CertificatePair{}, nil, fmt.Errorf("read what was signed: %w", err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return CertificatePair{}, nil, fmt.Errorf("encode key: %w", err)
	}
	return CertificatePair{
		Cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}),
		Key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
	}, cert, nil
}
