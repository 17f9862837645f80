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

// errRevoked is what crypto/x509 has no error for.
var errRevoked = errors.New("its authority has revoked it")

// list is a list of what an authority has revoked, and the file that holds it.
type list struct {
	*x509.RevocationList
	path string
}

// readLists reads those of a file.
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
		if err := whole(l); err != nil {
			return nil, fmt.Errorf("list of revoked certificates %s: %w", path, err)
		}
		lists = append(lists, list{l, path})
	}
	switch begun := bytes.Count(text, []byte("-----BEGIN ")); {
	case len(lists) == 0:
		return nil, fmt.Errorf("%s holds no list of revoked certificates in PEM: %w", path,
			driver.ErrBounds)
	case len(lists) < begun: // a decoder passes over what is cut or damaged
		return nil, fmt.Errorf("%s holds %d lists of revoked certificates, of which %d can be "+
			"read: write it anew: %w", path, begun, len(lists), driver.ErrBounds)
	}
	return lists, nil
}

// whole refuses what is a list of changes, of some of an authority's certificates, or of those of
// others: an extension that is critical says so.
func whole(l *x509.RevocationList) error {
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

// compare orders the lists of one authority: by number or, where they have none, by date.
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

// follow reports whether lists may take the place of those before. What is revoked stays so:
// the latest must be later than the latest before, or the same.
func follow(lists, before []list) bool {
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

// revoked are the certificates that authorities have revoked.
type revoked struct {
	by    map[string][]*x509.Certificate // the authorities: several may have one name
	lists map[string][]list              // in use, by authority
}

// revokedKey names a certificate by the name of its authority and its number.
func revokedKey(issuer []byte, serial fmt.Stringer) string {
	return string(issuer) + " " + serial.String()
}

// newRevoked takes the lists that authorities have signed into use. The lists of an authority
// that may not follow those in use before, if there were any, leave these in use. The error says
// so, and which lists none of the authorities has signed.
func newRevoked(before *revoked, lists []list, authorities []*x509.Certificate) (*revoked, error) {
	if before == nil {
		before = &revoked{}
	}
	r := &revoked{by: map[string][]*x509.Certificate{}, lists: map[string][]list{}}
	var odd []error
	name := func(a *x509.Certificate) string {
		return string(a.RawSubject) + string(a.RawSubjectPublicKeyInfo)
	}
	for _, l := range lists {
		at := slices.IndexFunc(authorities, func(a *x509.Certificate) bool {
			return l.CheckSignatureFrom(a) == nil && bytes.Equal(l.RawIssuer, a.RawSubject)
		})
		if at < 0 {
			odd = append(odd, fmt.Errorf("list of revoked certificates %s: it is signed by %s, "+
				"which is none of our authorities: take it out: %w", l.path,
				authorityName(l.Issuer.CommonName, l.AuthorityKeyId), driver.ErrBounds))
			continue // it concerns no certificate that we would take
		}
		key := name(authorities[at])
		r.lists[key] = append(r.lists[key], l)
	}
	taken := map[string]bool{}
	for _, a := range authorities {
		key := name(a)
		if taken[key] {
			continue // its certificate was renewed, and both are there
		}
		taken[key] = true
		if was := before.lists[key]; !follow(r.lists[key], was) {
			odd = append(odd, fmt.Errorf("the list in use of what %s has revoked has number %v, "+
				"and the files hold none that may follow it: give one of a higher number, or open "+
				"the identity anew: %w", authorityName(a.Subject.CommonName, a.SubjectKeyId),
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
	return r, errors.Join(odd...)
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
				"issue a new one there, if it is to be a member", errRevoked}
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
