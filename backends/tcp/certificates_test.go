// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"time"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// authority signs certificates for tests.
type authority struct {
	*testkit.Authority
	ca []byte
}

func newAuthority() authority {
	a, pair, err := testkit.NewAuthority("test", 48*time.Hour)
	must(err)
	return authority{a, pair.Cert}
}

// config is that of a member whose certificate is valid for so long from an hour ago on.
func (a authority) config(valid time.Duration) *tls.Config {
	pair, _, err := a.Issue(testkit.Member{Name: "owner.test", From: time.Now().Add(-time.Hour),
		Valid: valid})
	must(err)
	return memberConfig(a.ca, pair)
}

func memberConfig(ca []byte, pair testkit.CertificatePair) *tls.Config {
	cert, err := tls.X509KeyPair(pair.Cert, pair.Key)
	must(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: pool, ClientCAs: pool}
}

// sharedTLS is of one member, for this process and those that it starts.
var sharedTLS = inheritTLS()

func inheritTLS() *tls.Config {
	const ca, cert, key = "SLUICE_TCP_TEST_CA", "SLUICE_TCP_TEST_CERT", "SLUICE_TCP_TEST_KEY"
	if os.Getenv(ca) == "" {
		a := newAuthority()
		pair, _, err := a.Issue(testkit.Member{Name: "owner.test", Valid: 24 * time.Hour})
		must(err)
		must(os.Setenv(ca, string(a.ca)))
		must(os.Setenv(cert, string(pair.Cert)))
		must(os.Setenv(key, string(pair.Key)))
	}
	return memberConfig([]byte(os.Getenv(ca)), testkit.CertificatePair{
		Cert: []byte(os.Getenv(cert)), Key: []byte(os.Getenv(key))})
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
