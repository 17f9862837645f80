// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// certificates writes an authority, and a member of it, and returns the flags that name them.
func certificates(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	now := time.Now()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign |
			x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	cert, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	files := map[string]*pem.Block{"cert": {Type: "CERTIFICATE", Bytes: cert},
		"key": {Type: "PRIVATE KEY", Bytes: raw}}
	for name, block := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block),
			0o600))
	}
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	return []string{"--tcp-cert", certFile, "--tcp-key", keyFile, "--tcp-ca", certFile}
}

func TestReplayOverTCP(t *testing.T) {
	for name, args := range map[string][]string{
		"plain":  {"--tcp-conns", "2"},
		"secure": append(certificates(t), "--tcp-listen", "127.0.0.1:0"),
		"aborts": {"--abort-rate", "0.4"},
	} {
		t.Run(name, func(t *testing.T) {
			r := replayReport(t, append([]string{"--trace", smallTrace(t, 10), "--backend", "tcp"},
				args...)...)
			if r["route"] != "tcp" || r["mismatches"] != 0.0 || r["blocks_leaked"] != 0.0 ||
				r["bytes"].(float64) == 0 {
				t.Errorf("%v", r)
			}
		})
	}
}

func TestDoctorSaysWhoCanReadTCP(t *testing.T) {
	for want, args := range map[string][]string{
		"this host alone": nil,
		"everybody on the network": {"--tcp-listen", "127.0.0.1:0",
			"--tcp-plaintext"},
		"TLS 1.3 with certificates of both sides": certificates(t),
	} {
		o := sluice(t, append([]string{"doctor"}, args...)...)
		if o.status != 0 || !strings.Contains(o.stdout, "tcp-privacy") ||
			!strings.Contains(o.stdout, want) {
			t.Errorf("doctor %v: no %q in %+v", args, want, o)
		}
	}
}

func TestExplainTCP(t *testing.T) {
	o := sluice(t, "explain", "--backend", "tcp")
	if o.status != 0 || !strings.Contains(o.stdout, "* tcp") ||
		!strings.Contains(o.stdout, "in plain text to 127.0.0.1:") {
		t.Errorf("%+v", o)
	}
}
