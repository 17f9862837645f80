// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// errRevoked is the Error.Err of a revoked certificate: crypto/x509 has no such error.
var errRevoked = errors.New("its authority has revoked it")

// list is a certificate revocation list, and the file that it was read from.
type list struct {
	*x509.RevocationList
	path string
}

// readLists reads all lists of one file, paths[0].
func readLists(paths []string) (lists []list, err error) {
	path := paths[0]
	text, err := readFile(path, listMax)
	if err != nil {
		return nil, err
	}
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		l, err := x509.ParseRevocationList(b.Bytes)
		if err != nil {
			return nil, fmt.Errorf("list of revoked certificates %s: %w", path, &fileError{err})
		}
		if err := checkComplete(l); err != nil {
			return nil, fmt.Errorf("list of revoked certificates %s: %w", path, err)
		}
		lists = append(lists, list{l, path})
	}
	switch begun := bytes.Count(text, []byte("-----BEGIN ")); {
	case len(lists) == 0:
		return nil, fmt.Errorf("%s holds no list of revoked certificates in PEM: %w", path,
			driver.ErrBounds)
	case len(lists) < begun: // pem.Decode skips blocks that are cut off or damaged
		return nil, fmt.Errorf("%s holds %d lists of revoked certificates, of which %d can be "+
			"read: write it anew: %w", path, begun, len(lists), driver.ErrBounds)
	}
	return lists, nil
}

// checkComplete refuses a list that is not the complete list of one authority: a delta list, a list
// of only some of the certificates, or an indirect list, with entries of other authorities. Each of
// these has a critical extension (RFC 5280).
func checkComplete(l *x509.RevocationList) error {
	critical := func(list []pkix.Extension) int {
		return slices.IndexFunc(list, func(x pkix.Extension) bool { return x.Critical })
	}
	if i := critical(l.Extensions); i >= 0 {
		return fmt.Errorf("it has the critical extension %v, as lists of changes and of parts "+
			"have: give the whole list of its authority: %w", l.Extensions[i].Id,
			driver.ErrNotSupported)
	}
	for _, e := range l.RevokedCertificateEntries {
		if critical(e.Extensions) >= 0 {
			return fmt.Errorf("what it says of %x is of another authority: give each its own "+
				"list: %w", e.SerialNumber, driver.ErrNotSupported)
		}
	}
	return nil
}

// compare orders the lists of one authority by their number. A list without a number comes before
// those with one; two without are ordered by date.
func (l list) compare(o list) int {
	switch {
	case l.Number != nil && o.Number != nil:
		return l.Number.Cmp(o.Number)
	case l.Number != nil:
		return 1
	case o.Number != nil:
		return -1
	}
	return l.ThisUpdate.Compare(o.ThisUpdate)
}

// mayReplace reports whether the lists of an authority may replace those in use, before. It
// prevents an older list from lifting a revocation: the latest of lists must be later than the
// latest of before. If both have the same order, lists must contain all of the latest of before.
func mayReplace(lists, before []list) bool {
	if len(lists) == 0 || len(before) == 0 {
		return len(before) == 0
	}
	latest, was := slices.MaxFunc(lists, list.compare), slices.MaxFunc(before, list.compare)
	if order := latest.compare(was); order != 0 {
		return order > 0
	}
	for _, b := range before {
		if b.compare(was) == 0 && !slices.ContainsFunc(lists, func(l list) bool {
			return bytes.Equal(l.Raw, b.Raw)
		}) {
			return false
		}
	}
	return true
}

// revoked holds the certificates that our authorities have revoked.
type revoked struct {
	// the authorities that have revoked a certificate, by revokedKey; more than one if
	// authorities have the same name
	by    map[string][]*x509.Certificate
	lists map[string][]list // in use, by name and public key of the authority
}

// revokedKey identifies a certificate by its issuer's name and its serial number.
func revokedKey(issuer []byte, serial fmt.Stringer) string {
	return string(issuer) + " " + serial.String()
}

// newRevoked returns the certificates that lists revoke, given the lists in use before, or nil.
//
// It ignores a list that none of the authorities has signed. If the new lists of an authority may
// not replace those in use, these stay in use. The error tells both; the result is valid anyway.
func newRevoked(before *revoked, lists []list, authorities []*x509.Certificate) (*revoked, error) {
	if before == nil {
		before = &revoked{}
	}
	r := &revoked{by: map[string][]*x509.Certificate{}, lists: map[string][]list{}}
	var unused []error
	name := func(a *x509.Certificate) string {
		return string(a.RawSubject) + string(a.RawSubjectPublicKeyInfo)
	}
	for _, l := range lists {
		at := slices.IndexFunc(authorities, func(a *x509.Certificate) bool {
			return l.CheckSignatureFrom(a) == nil && bytes.Equal(l.RawIssuer, a.RawSubject)
		})
		if at < 0 {
			unused = append(unused, fmt.Errorf("list of revoked certificates %s: it is signed "+
				"by %s, which is none of our authorities: take it out: %w", l.path,
				authorityName(l.Issuer.CommonName, l.AuthorityKeyId), driver.ErrBounds))
			continue // we accept no certificate of that authority anyway
		}
		key := name(authorities[at])
		r.lists[key] = append(r.lists[key], l)
	}
	seen := map[string]bool{}
	for _, a := range authorities {
		key := name(a)
		if seen[key] {
			continue // two certificates of one authority: its certificate was renewed
		}
		seen[key] = true
		if was := before.lists[key]; !mayReplace(r.lists[key], was) {
			unused = append(unused, fmt.Errorf("the list in use of what %s has revoked has "+
				"number %v, and the files hold none that may follow it: give one of a higher "+
				"number, or open the identity anew: %w",
				authorityName(a.Subject.CommonName, a.SubjectKeyId),
				slices.MaxFunc(was, list.compare).Number, driver.ErrBounds))
			r.lists[key] = was
		}
		for _, l := range r.lists[key] {
			for _, e := range l.RevokedCertificateEntries {
				serial := revokedKey(l.RawIssuer, e.SerialNumber)
				r.by[serial] = append(r.by[serial], a)
			}
		}
	}
	return r, errors.Join(unused...)
}

// verify refuses a connection whose peer has a revoked certificate; it is a
// tls.Config.VerifyConnection. It checks the certificates that the peer sent, and the verified
// chains: these may contain intermediate certificates that the peer did not send because we have
// them. At least one chain must be free of revoked certificates.
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

// check returns an *Error if any certificate of a list is revoked.
func (r *revoked) check(list []*x509.Certificate) error {
	for _, c := range list {
		for _, a := range r.by[revokedKey(c.RawIssuer, c.SerialNumber)] {
			if c.CheckSignatureFrom(a) != nil {
				continue
			}
			return &Error{fmt.Sprintf("certificate of %q, serial number %x, is revoked",
				c.Subject.CommonName, c.SerialNumber),
				"issue a new one there, if it is to be a member", errRevoked}
		}
	}
	return nil
}

// authorityName returns the name of an authority for messages, with the first bytes of its key
// identifier, since authorities may have the same name.
func authorityName(name string, key []byte) string {
	if len(key) == 0 {
		return fmt.Sprintf("%q", name)
	}
	return fmt.Sprintf("%q (key %s)", name, KeyName(key))
}

// KeyName returns the first 4 bytes of a key identifier (x509.Certificate.SubjectKeyId) in hex.
func KeyName(id []byte) string { return hex.EncodeToString(id[:min(4, len(id))]) }
