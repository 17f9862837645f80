// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// errRevoked is what crypto/x509 has no error for.
var errRevoked = errors.New("its authority has revoked it")

// revoked are the certificates that authorities have revoked, and those authorities: several
// may have one name.
type revoked map[string][]*x509.Certificate

// revokedKey names a certificate by the name of its authority and its number.
func revokedKey(issuer []byte, serial fmt.Stringer) string {
	return string(issuer) + " " + serial.String()
}

// add takes the lists of a file, each of which one of the authorities must have signed.
func (r revoked) add(path string, text []byte, authorities []*x509.Certificate) error {
	found := 0
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		list, err := x509.ParseRevocationList(b.Bytes)
		if err != nil {
			return fmt.Errorf("list of revoked certificates %s: %w", path,
				errors.Join(err, driver.ErrBounds))
		}
		at := slices.IndexFunc(authorities, func(a *x509.Certificate) bool {
			return list.CheckSignatureFrom(a) == nil && bytes.Equal(list.RawIssuer, a.RawSubject)
		})
		if at < 0 {
			return fmt.Errorf("list of revoked certificates %s: it is signed by %s, which is "+
				"none of our authorities: %w",
				path, authorityName(list.Issuer.CommonName, list.AuthorityKeyId), driver.ErrBounds)
		}
		for _, e := range list.RevokedCertificateEntries {
			key := revokedKey(list.RawIssuer, e.SerialNumber)
			r[key] = append(r[key], authorities[at])
		}
		found++
	}
	switch begun := bytes.Count(text, []byte("-----BEGIN ")); {
	case found == 0:
		return fmt.Errorf("%s holds no list of revoked certificates in PEM: %w", path,
			driver.ErrBounds)
	case found < begun: // a decoder passes over what is cut or damaged
		return fmt.Errorf("%s holds %d lists of revoked certificates, of which %d can be read: "+
			"write it anew: %w", path, begun, found, driver.ErrBounds)
	}
	return nil
}

// verify is for tls.Config.VerifyConnection.
func (r revoked) verify(s tls.ConnectionState) error {
	for _, c := range s.PeerCertificates {
		for _, a := range r[revokedKey(c.RawIssuer, c.SerialNumber)] {
			if c.CheckSignatureFrom(a) != nil {
				continue
			}
			return &Error{fmt.Sprintf("certificate of %q, serial number %x, is revoked",
				c.Subject.CommonName, c.SerialNumber),
				"issue a new one there, if it is to be a member (sluice keys issue)", errRevoked}
		}
	}
	return nil
}

// authorityName tells authorities of one name apart by the beginning of the identifier of their
// key.
func authorityName(name string, key []byte) string {
	if len(key) == 0 {
		return fmt.Sprintf("%q", name)
	}
	return fmt.Sprintf("%q (key %s)", name, KeyName(key))
}

// KeyName shortens the identifier of an authority's key (x509.Certificate.SubjectKeyId).
func KeyName(id []byte) string { return hex.EncodeToString(id[:min(4, len(id))]) }
