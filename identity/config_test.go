// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// Whatever a tls.Config brings along, a caller must show a certificate over TLS 1.3: also
// where GetConfigForClient gives another config, as one does for certificates that are renewed.
func TestConfigsCannotWeakenAnswer(t *testing.T) {
	a, pair := newAuthority(t, "ours")
	f := member(t, t.TempDir(), a, testkit.Member{Name: "one", Hosts: []string{"127.0.0.1"}},
		pair)
	cert := must(tls.LoadX509KeyPair(f[0], f[1]))(t)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(must(os.ReadFile(f[2]))(t))
	weak := func() *tls.Config {
		return &tls.Config{
			Certificates: []tls.Certificate{cert}, InsecureSkipVerify: true,
			ClientAuth: tls.NoClientCert,
			MinVersion: tls.VersionTLS10,
		}
	}
	nested := weak()
	nested.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return weak(), nil
	}
	for name, get := range map[string]func(*tls.ClientHelloInfo) (*tls.Config, error){
		"none":   nil,
		"nil":    func(*tls.ClientHelloInfo) (*tls.Config, error) { return nil, nil },
		"weak":   func(*tls.ClientHelloInfo) (*tls.Config, error) { return weak(), nil },
		"nested": func(*tls.ClientHelloInfo) (*tls.Config, error) { return nested, nil },
	} {
		base := weak()
		base.RootCAs, base.ClientCAs, base.GetConfigForClient = pool, pool, get
		id := must(FromTLS(base))(t)
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			stranger := &tls.Config{InsecureSkipVerify: true, MaxVersion: version}
			require.Error(t, answered(t, id, stranger), "%s: no certificate, version %#x", name,
				version)
			stranger.Certificates = []tls.Certificate{cert}
			err := answered(t, id, stranger)
			if version == tls.VersionTLS13 {
				require.NoError(t, err, "%s: a member", name)
			} else {
				require.Error(t, err, "%s: a member over TLS 1.2", name)
			}
		}
	}
}

// answered returns what Answer says to a caller with a config.
func answered(t *testing.T, id *Identity, caller *tls.Config) error {
	t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = id.Answer(context.Background(), c)
			_ = c.Close()
		}
		done <- err
	}()
	if c, err := tls.Dial("tcp", l.Addr().String(), caller); err == nil {
		_, _ = c.Read(make([]byte, 1)) // the end of the handshake on the other side
		_ = c.Close()
	}
	return <-done
}
