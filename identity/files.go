// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// FromFiles makes an Identity of three files in PEM: a certificate (and those between it and
// the authority, if there are any), its key, and the certificates of the authorities whose
// members peers may be. The files are looked at before each handshake, and read again when
// they have changed; files that do not fit together, as while they are being replaced, leave
// those of before in use (Facts.RenewError).
//
// Files of revocation lists may follow, in PEM and signed by those authorities (RFC 5280; sluice
// keys revoke makes one). What is on a list is refused from the next handshake on; connections
// that stand go on. How old a list is does not matter, but none that is in use gives way to one of
// a lower number. A list of another authority is an error here; later, as when an authority goes,
// it is told and passed over.
func FromFiles(cert, key, ca string, revoked ...string) (*Identity, error) {
	s := &files{paths: append([]string{cert, key, ca}, revoked...)}
	seen, err := s.look()
	if err == nil {
		err = s.read()
	}
	if err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	s.seen = seen
	return &Identity{source: s}, nil
}

// files is a source that follows files.
type files struct {
	paths []string // certificate, key, authority, then lists of what is revoked

	mu   sync.Mutex // guards what follows
	seen []os.FileInfo
	now  *faces
	err  error // why what has changed is not in use
	odd  error // what was passed over of what is in use

	refused *revoked
}

// current implements source.
func (s *files) current() *faces {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen, err := s.look()
	if err != nil {
		s.err = err
		return s.now
	}
	if same(seen, s.seen) {
		s.err = s.odd
		return s.now
	}
	s.err = s.read()
	if s.err == nil || errors.Is(s.err, errForeign) { // else the next handshake tries again
		s.seen, s.odd = seen, s.err
	}
	return s.now
}

// trouble implements source.
func (s *files) trouble() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *files) look() ([]os.FileInfo, error) {
	seen := make([]os.FileInfo, len(s.paths))
	for i, path := range s.paths {
		var err error
		if seen[i], err = os.Stat(path); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

func same(a, b []os.FileInfo) bool {
	for i := range a {
		if !os.SameFile(a[i], b[i]) || a[i].Size() != b[i].Size() ||
			!a[i].ModTime().Equal(b[i].ModTime()) {
			return false
		}
	}
	return true
}

// What is read of a file at most: certificates are small, an entry of a list has some 40 bytes.
const (
	fileMax = 1 << 20
	listMax = 64 << 20
)

func readFile(path string, most int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > most {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are read: %w", path, info.Size(), most,
			driver.ErrBounds)
	}
	return os.ReadFile(path)
}

// read puts what the files hold into use. With errForeign it has done so.
func (s *files) read() error {
	text := make([][]byte, len(s.paths))
	for i, path := range s.paths {
		most := int64(fileMax)
		if i >= 3 {
			most = listMax
		}
		var err error
		if text[i], err = readFile(path, most); err != nil {
			return err
		}
	}
	pair, err := tls.X509KeyPair(text[0], text[1])
	if err != nil {
		return fmt.Errorf("certificate %s with key %s: %w", s.paths[0], s.paths[1],
			&fileError{err})
	}
	authorities := certificates(text[2])
	if len(authorities) == 0 {
		return fmt.Errorf("%s holds no certificate of an authority: %w", s.paths[2],
			driver.ErrBounds)
	}
	roots := x509.NewCertPool()
	for _, a := range authorities {
		roots.AddCert(a)
	}
	if err := s.fits(&pair, roots, authorities); err != nil {
		return err
	}
	refused, odd := newRevoked(), error(nil)
	for i, list := range text[3:] {
		err := refused.add(s.paths[3+i], list, authorities)
		if err != nil && !errors.Is(err, errForeign) {
			return err
		}
		odd = errors.Join(odd, err)
	}
	if s.refused != nil {
		if err := refused.follows(s.refused, authorities); err != nil {
			return err
		}
	}
	s.refused = refused
	s.now = newFaces(&tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots,
		ClientCAs: roots, VerifyConnection: refused.verify})
	return odd
}

// certificates reads those of a file in PEM; what is none is passed over.
func certificates(text []byte) (list []*x509.Certificate) {
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if c, err := x509.ParseCertificate(b.Bytes); b.Type == "CERTIFICATE" && err == nil {
			list = append(list, c)
		}
	}
	return list
}

// fits has our own certificate verified as peers will verify it, so that a mistake is found
// here, with the names of files.
func (s *files) fits(pair *tls.Certificate, roots *x509.CertPool,
	authorities []*x509.Certificate) error {
	leaf, err := leafOf(pair)
	if err != nil {
		return fmt.Errorf("certificate %s: %w", s.paths[0], err)
	}
	among := x509.NewCertPool()
	for _, raw := range pair.Certificate[1:] {
		if c, err := x509.ParseCertificate(raw); err == nil {
			among.AddCert(c)
		}
	}
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth,
		x509.ExtKeyUsageClientAuth} {
		_, err = leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: among,
			KeyUsages: []x509.ExtKeyUsage{usage}})
		if err != nil {
			return fmt.Errorf("certificate %s: %w", s.paths[0], s.misfit(err, leaf, authorities))
		}
	}
	return nil
}

func (s *files) misfit(err error, leaf *x509.Certificate, authorities []*x509.Certificate) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &unknown):
		var names []string
		for _, a := range authorities {
			names = append(names, authorityName(a.Subject.CommonName, a.SubjectKeyId))
		}
		return &Error{fmt.Sprintf("it is signed by %s, which is not among those of %s: %s",
			authorityName(leaf.Issuer.CommonName, leaf.AuthorityKeyId), s.paths[2],
			strings.Join(names, ", ")),
			"give the authority that issued it", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return &Error{validity(leaf), "issue a new one (sluice keys issue), or set the clock", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return &Error{"it is not for both sides of a connection", "issue one for servers and " +
			"clients (sluice keys issue)", err}
	}
	return err
}

func validity(c *x509.Certificate) string {
	now := time.Now()
	if now.Before(c.NotBefore) {
		return fmt.Sprintf("it is valid from %s on, and here it is %s",
			c.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return fmt.Sprintf("it was valid until %s", c.NotAfter.UTC().Format(time.RFC3339))
}

// fileError is what is wrong with a file, and driver.ErrBounds.
type fileError struct{ error }

func (e *fileError) Unwrap() []error { return []error{e.error, driver.ErrBounds} }
