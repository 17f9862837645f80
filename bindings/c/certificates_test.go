// SPDX-License-Identifier: Apache-2.0

//go:build cgo

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
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// certificates writes files of a certificate, its key, and the authority that signed it.
func certificates(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	authorityKey, key := newKey(t), newKey(t)
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotAfter: time.Now().Add(time.Hour),
		IsCA:     true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	member := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "member"},
		NotAfter:    time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"owner.test"},
	}
	private, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	return []string{
		writePEM(t, filepath.Join(dir, "certificate"), "CERTIFICATE", signed(t, member, authority,
			key, authorityKey)),
		writePEM(t, filepath.Join(dir, "key"), "EC PRIVATE KEY", private),
		writePEM(t, filepath.Join(dir, "authority"), "CERTIFICATE", signed(t, authority, authority,
			authorityKey, authorityKey)),
	}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

func signed(t *testing.T, cert, parent *x509.Certificate, key, by *ecdsa.PrivateKey) []byte {
	t.Helper()
	raw, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, by)
	require.NoError(t, err)
	return raw
}

func writePEM(t *testing.T, name, kind string, raw []byte) string {
	t.Helper()
	require.NoError(t, os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw}),
		0o600))
	return name
}
