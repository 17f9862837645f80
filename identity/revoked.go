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
	"math/big"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// errRevoked is what crypto/x509 has no error for.
var errRevoked = errors.New("its authority has revoked it")

// errForeign is for a list of an authority that is not ours. It concerns no certificate that we
// would take.
var errForeign = errors.New("none of our authorities has signed it")

// revoked are the certificates that authorities have revoked.
type revoked struct {
	by      map[string][]*x509.Certificate // the authorities: several may have one name
	numbers map[string]*big.Int            // of the latest list of each authority, by its key
}

func newRevoked() *revoked {
	return &revoked{by: map[string][]*x509.Certificate{}, numbers: map[string]*big.Int{}}
}

// revokedKey names a certificate by the name of its authority and its number.
func revokedKey(issuer []byte, serial fmt.Stringer) string {
	return string(issuer) + " " + serial.String()
}

// add takes the lists of a file. It passes over those that none of the authorities has signed,
// and answers with errForeign then.
func (r *revoked) add(path string, text []byte, authorities []*x509.Certificate) error {
	var foreign error
	found := 0
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		list, err := x509.ParseRevocationList(b.Bytes)
		if err != nil {
			return fmt.Errorf("list of revoked certificates %s: %w", path, &fileError{err})
		}
		at := slices.IndexFunc(authorities, func(a *x509.Certificate) bool {
			return list.CheckSignatureFrom(a) == nil && bytes.Equal(list.RawIssuer, a.RawSubject)
		})
		found++
		if at < 0 {
			foreign = fmt.Errorf("list of revoked certificates %s: it is signed by %s, which is "+
				"none of our authorities: take it out: %w",
				path, authorityName(list.Issuer.CommonName, list.AuthorityKeyId),
				&fileError{errForeign})
			continue
		}
		r.take(list, authorities[at])
	}
	switch begun := bytes.Count(text, []byte("-----BEGIN ")); {
	case found == 0:
		return fmt.Errorf("%s holds no list of revoked certificates in PEM: %w", path,
			driver.ErrBounds)
	case found < begun: // a decoder passes over what is cut or damaged
		return fmt.Errorf("%s holds %d lists of revoked certificates, of which %d can be read: "+
			"write it anew: %w", path, begun, found, driver.ErrBounds)
	}
	return foreign
}

func (r *revoked) take(list *x509.RevocationList, authority *x509.Certificate) {
	for _, e := range list.RevokedCertificateEntries {
		key := revokedKey(list.RawIssuer, e.SerialNumber)
		r.by[key] = append(r.by[key], authority)
	}
	key := string(authority.RawSubjectPublicKeyInfo)
	if n := r.numbers[key]; list.Number != nil && (n == nil || n.Cmp(list.Number) < 0) {
		r.numbers[key] = list.Number
	}
}

// follows refuses lists that are older than those of before, or gone while their authority is
// not: what is revoked stays so.
func (r *revoked) follows(before *revoked, authorities []*x509.Certificate) error {
	for _, a := range authorities {
		was := before.numbers[string(a.RawSubjectPublicKeyInfo)]
		is := r.numbers[string(a.RawSubjectPublicKeyInfo)]
		if was != nil && (is == nil || is.Cmp(was) < 0) {
			return fmt.Errorf("the list of what %s has revoked has number %v, and that in use has "+
				"%v: give one that is as new, or open the identity anew: %w",
				authorityName(a.Subject.CommonName, a.SubjectKeyId), is, was, driver.ErrBounds)
		}
	}
	return nil
}

// verify is for tls.Config.VerifyConnection. A peer need not send what lies between it and an
// authority of ours where we have that: the chains hold it.
func (r *revoked) verify(s tls.ConnectionState) error {
	err := r.check(s.PeerCertificates)
	for i, chain := range s.VerifiedChains {
		refused := r.check(chain)
		if refused == nil {
			break
		}
		if i+1 == len(s.VerifiedChains) && err == nil {
			err = refused
		}
	}
	return err
}

func (r *revoked) check(list []*x509.Certificate) error {
	for _, c := range list {
		for _, a := range r.by[revokedKey(c.RawIssuer, c.SerialNumber)] {
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
