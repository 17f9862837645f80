// SPDX-License-Identifier: Apache-2.0

package authority

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// RevokedFile is the list of revoked certificates in an authority's directory.
const RevokedFile = "ca-revoked.pem"

// listKind is the type of a revocation list in PEM.
const listKind = "X509 CRL"

// Revoke adds the serial number of a certificate to a list in PEM, which it signs anew; no list
// begins one. Without a number it only signs. A list never shrinks.
func (a *Authority) Revoke(list []byte, serial *big.Int) ([]byte, error) {
	t := &x509.RevocationList{Number: big.NewInt(0), ThisUpdate: time.Now().Add(-skew),
		NextUpdate: a.cert.NotAfter}
	if len(list) > 0 {
		before, err := a.parseList(list)
		if err != nil {
			return nil, err
		}
		t.Number, t.RevokedCertificateEntries = before.Number, before.RevokedCertificateEntries
	}
	t.Number = new(big.Int).Add(t.Number, big.NewInt(1))
	known := serial == nil
	for _, e := range t.RevokedCertificateEntries {
		known = known || e.SerialNumber.Cmp(serial) == 0
	}
	if !known {
		entry := x509.RevocationListEntry{SerialNumber: serial, RevocationTime: time.Now()}
		t.RevokedCertificateEntries = append(t.RevokedCertificateEntries, entry)
	}
	raw, err := x509.CreateRevocationList(rand.Reader, t, a.cert, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign the list of revoked certificates: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: listKind, Bytes: raw}), nil
}

func (a *Authority) parseList(list []byte) (*x509.RevocationList, error) {
	raw := block(list, listKind)
	if raw == nil {
		return nil, fmt.Errorf("no list of revoked certificates in PEM: %w", driver.ErrBounds)
	}
	l, err := x509.ParseRevocationList(raw)
	if err != nil {
		return nil, fmt.Errorf("list of revoked certificates: %w", err)
	}
	if err := l.CheckSignatureFrom(a.cert); err != nil {
		return nil, fmt.Errorf("the list is another authority's, as of one that was replaced: "+
			"move it away (%w)", err)
	}
	return l, nil
}

// RevokeIn does so in the list of an authority's directory, and returns its path.
func (a *Authority) RevokeIn(dir string, serial *big.Int) (path string, err error) {
	path = filepath.Join(dir, RevokedFile)
	list, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return path, err
	}
	if list, err = a.Revoke(list, serial); err != nil {
		return path, fmt.Errorf("%s: %w", path, err)
	}
	return path, place(path, list, 0o644)
}

// Serial returns the number of a certificate in a file.
func Serial(path string) (*big.Int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	raw := block(text, "CERTIFICATE")
	if raw == nil {
		return nil, fmt.Errorf("%s holds no certificate in PEM: %w", path, driver.ErrBounds)
	}
	c, err := x509.ParseCertificate(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.SerialNumber, nil
}
