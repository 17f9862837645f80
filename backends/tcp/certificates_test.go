// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"math/big"
	"os"
	"time"
)

// authorityVariable hands the authority on to the second process, which has to be of it.
const authorityVariable = "SLUICE_TCP_TEST_AUTHORITY"

// authority signs certificates for tests.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

// sharedAuthority is that of this process and of those that it starts.
var sharedAuthority = inheritAuthority()

func inheritAuthority() *authority {
	if text, ok := os.LookupEnv(authorityVariable); ok {
		raw, err := hex.DecodeString(text)
		must(err)
		n := int(raw[0])<<8 | int(raw[1])
		key, err := x509.ParseECPrivateKey(raw[2 : 2+n])
		must(err)
		cert, err := x509.ParseCertificate(raw[2+n:])
		must(err)
		return &authority{key, cert}
	}
	a := newAuthority()
	key, err := x509.MarshalECPrivateKey(a.key)
	must(err)
	raw := append([]byte{byte(len(key) >> 8), byte(len(key))}, key...)
	must(os.Setenv(authorityVariable, hex.EncodeToString(append(raw, a.cert.Raw...))))
	return a
}

func newAuthority() *authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	t := template(1)
	t.IsCA, t.BasicConstraintsValid, t.KeyUsage = true, true, x509.KeyUsageCertSign
	return &authority{key, sign(t, t, &key.PublicKey, key)}
}

func template(serial int64) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"owner.test"},
	}
}

func sign(t, parent *x509.Certificate, public any, by *ecdsa.PrivateKey) *x509.Certificate {
	raw, err := x509.CreateCertificate(rand.Reader, t, parent, public, by)
	must(err)
	cert, err := x509.ParseCertificate(raw)
	must(err)
	return cert
}

// config is that of a member; change alters its certificate.
func (a *authority) config(change ...func(*x509.Certificate)) *tls.Config {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	t := template(2)
	for _, f := range change {
		f(t)
	}
	cert := sign(t, a.cert, &key.PublicKey, a.key)
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
		RootCAs:      pool, ClientCAs: pool,
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
