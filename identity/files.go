// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"slices"
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
// Files of revocation lists may follow, in PEM and signed by those authorities (RFC 5280). What is
// on a list is refused from the next handshake on, also while another of the files cannot be used;
// connections that stand go on. How old a list is does not matter, but none that is in use gives
// way to one of a lower number, or to another one of the same number. A list of changes (delta) or
// of a part is refused. A list of another authority is an error here; later, as when an authority
// goes, it is told and passed over. docs/between-hosts.md has commands that make all of these.
func FromFiles(cert, key, ca string, revoked ...string) (*Identity, error) {
	s := &files{pair: piece[*tls.Certificate]{paths: []string{cert, key}, read: readPair},
		known: piece[[]*x509.Certificate]{paths: []string{ca}, read: readAuthorities},
		lists: make([]piece[[]list], len(revoked))}
	for i, path := range revoked {
		s.lists[i] = piece[[]list]{paths: []string{path}, read: readLists}
	}
	if err := s.renew(); err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	return &Identity{source: s}, nil
}

// files is a source that reads files again when they change.
type files struct {
	mu    sync.Mutex // guards what follows
	pair  piece[*tls.Certificate]
	known piece[[]*x509.Certificate] // the authorities
	lists []piece[[]list]

	now     *faces // in use; nil: no valid combination of files has been read
	shown   *tls.Certificate
	trusted []*x509.Certificate
	refused *revoked
	misfit  error // why the present values of pair and known are not in use
	odd     error // which lists are not in use, and why
	err     error // all errors of the last renew
}

// piece is a file, or two that belong together, with its last valid content.
type piece[T any] struct {
	paths []string
	read  func(paths []string) (T, error)
	seen  []os.FileInfo // of the files that value was read from
	value T

	odd   []os.FileInfo // of the files that could not be read last
	err   error         // the error of that
	again time.Time     // when to read them again, even if they have not changed
}

// rereadMin is the time between two reads of invalid files that do not change. Every connection,
// also of a stranger, causes a read, and a list may be long.
const rereadMin = time.Second

// renew reads the files if they have changed. If they are invalid, value stays as it is.
func (p *piece[T]) renew() (changed bool, err error) {
	seen := make([]os.FileInfo, len(p.paths))
	for i, path := range p.paths {
		if seen[i], err = os.Stat(path); err != nil {
			return false, err
		}
	}
	if slices.EqualFunc(seen, p.seen, same) {
		return false, nil
	}
	if p.err != nil && slices.EqualFunc(seen, p.odd, same) && time.Now().Before(p.again) {
		return false, p.err
	}
	value, err := p.read(p.paths)
	if p.odd, p.err = seen, err; err != nil {
		p.again = time.Now().Add(rereadMin)
		return false, err
	}
	p.seen, p.value = seen, value
	return true, nil
}

func same(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// current implements source.
func (s *files) current() *faces {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = s.renew()
	return s.now
}

// trouble implements source.
func (s *files) trouble() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// renew reads the files that have changed, and puts them into use. An invalid file does not prevent
// the use of the others; the error describes it.
func (s *files) renew() error {
	pair, pairErr := s.pair.renew()
	known, knownErr := s.known.renew()
	changed := pair || known
	wrong := []error{pairErr, knownErr}
	for i := range s.lists {
		list, err := s.lists[i].renew()
		changed = changed || list
		wrong = append(wrong, err)
	}
	if !changed && s.misfit != nil { // a certificate may have become valid with time
		s.misfit = s.fits(s.pair.value, pool(s.known.value), s.known.value)
		changed = s.misfit == nil
	}
	if changed {
		s.use()
	}
	return errors.Join(append(wrong, s.misfit, s.odd)...)
}

func (s *files) use() {
	if s.pair.value == nil || s.known.value == nil {
		return // at first: renew says why
	}
	roots := pool(s.known.value)
	if s.misfit = s.fits(s.pair.value, roots, s.known.value); s.misfit == nil {
		s.shown, s.trusted = s.pair.value, s.known.value
	}
	if s.shown == nil {
		return
	}
	var lists []list
	for _, p := range s.lists {
		lists = append(lists, p.value...)
	}
	s.refused, s.odd = newRevoked(s.refused, lists, s.trusted)
	roots = pool(s.trusted)
	s.now = newFaces(&tls.Config{Certificates: []tls.Certificate{*s.shown}, RootCAs: roots,
		ClientCAs: roots, VerifyConnection: s.refused.verify})
}

func pool(authorities []*x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	for _, a := range authorities {
		p.AddCert(a)
	}
	return p
}

// Bounds of the size of a file. An entry of a revocation list has about 40 bytes.
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

// readPair reads a certificate and its key.
func readPair(paths []string) (*tls.Certificate, error) {
	var text [2][]byte
	for i, path := range paths {
		var err error
		if text[i], err = readFile(path, fileMax); err != nil {
			return nil, err
		}
	}
	pair, err := tls.X509KeyPair(text[0], text[1])
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", paths[0], paths[1],
			&fileError{err})
	}
	return &pair, nil
}

func readAuthorities(paths []string) ([]*x509.Certificate, error) {
	text, err := readFile(paths[0], fileMax)
	if err != nil {
		return nil, err
	}
	list := certificates(text)
	if len(list) == 0 {
		return nil, fmt.Errorf("%s holds no certificate of an authority: %w", paths[0],
			driver.ErrBounds)
	}
	return list, nil
}

// certificates returns the certificates in a PEM file. It skips other blocks.
func certificates(text []byte) (list []*x509.Certificate) {
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if c, err := x509.ParseCertificate(b.Bytes); b.Type == "CERTIFICATE" && err == nil {
			list = append(list, c)
		}
	}
	return list
}

// fits verifies our own certificate as peers will verify it. So a mistake is found here, and the
// error names the file.
func (s *files) fits(pair *tls.Certificate, roots *x509.CertPool,
	authorities []*x509.Certificate) error {
	leaf, err := leafOf(pair)
	if err != nil {
		return fmt.Errorf("certificate %s: %w", s.pair.paths[0], err)
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
			return fmt.Errorf("certificate %s: %w", s.pair.paths[0],
				s.explain(err, leaf, authorities))
		}
	}
	return nil
}

func (s *files) explain(err error, leaf *x509.Certificate, authorities []*x509.Certificate) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &unknown):
		var names []string
		for _, a := range authorities {
			names = append(names, authorityName(a.Subject.CommonName, a.SubjectKeyId))
		}
		return &Error{fmt.Sprintf("it is signed by %s, which is not among those of %s: %s",
			authorityName(leaf.Issuer.CommonName, leaf.AuthorityKeyId), s.known.paths[0],
			strings.Join(names, ", ")),
			"give the authority that issued it", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return &Error{validity(leaf), "issue a new one, or set the clock", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage:
		return &Error{"it is not for both sides of a connection", "issue one for servers and " +
			"clients", err}
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

// fileError makes an error of a file's content a driver.ErrBounds, too.
type fileError struct{ error }

func (e *fileError) Unwrap() []error { return []error{e.error, driver.ErrBounds} }
