// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// Error is why two sides do not trust each other, and what mends it. It is os.ErrPermission.
type Error struct {
	Cause, Fix string
	Err        error // of crypto/tls or crypto/x509
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%v)", e.Cause, e.Fix, e.Err) }

// Unwrap implements the interface of package errors.
func (e *Error) Unwrap() []error { return []error{e.Err, os.ErrPermission} }

// Explain adds cause and cure to what a handshake, or the first read after one, failed with:
// the side that began a connection learns only by reading that its certificate was refused. other
// names the other side. Errors that it does not know are returned as they are.
func (i *Identity) Explain(err error, other string) error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return err
	}
	if e := i.ofTheirs(err, other); e != nil {
		return e
	}
	if e := i.ofOurs(err, other); e != nil {
		return e
	}
	return err
}

// ofTheirs explains an error that this side has found in the certificate of the other.
func (i *Identity) ofTheirs(err error, other string) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var host x509.HostnameError
	var record tls.RecordHeaderError
	switch {
	case errors.As(err, &unknown):
		return &Error{fmt.Sprintf("certificate of %s is signed by another authority%s", other,
			i.authorities(unknown.Cert)),
			"issue those of both sides by one authority, and give both its certificate", err}
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return &Error{fmt.Sprintf("certificate of %s%s: %s", other, named(invalid.Cert),
			validity(invalid.Cert)),
			"issue a new one there, or set the clocks", err}
	case errors.As(err, &invalid):
		return &Error{fmt.Sprintf("certificate of %s%s may not be used so", other,
			named(invalid.Cert)),
			"issue one for servers and clients", err}
	case errors.As(err, &host):
		return &Error{fmt.Sprintf("certificate of %s is for %s, not for %q", other,
			strings.Join(namesOf(host.Certificate), ", "), host.Host),
			fmt.Sprintf("issue one for %s, too, or dial one of its names", host.Host), err}
	case errors.As(err, &record):
		return &Error{fmt.Sprintf("%s does not speak TLS", other), "give it a certificate, or " +
			"ask both sides for plain text", err}
	case strings.Contains(err.Error(), "client didn't provide a certificate"):
		return &Error{fmt.Sprintf("%s shows no certificate", other), "give it one of our authority",
			err}
	case strings.Contains(err.Error(), "protocol version not supported"),
		strings.Contains(err.Error(), "unsupported versions"):
		return &Error{fmt.Sprintf("%s does not speak TLS 1.3", other),
			"it must: only so do both sides prove their identity", err}
	}
	return nil
}

// authorities names that of a certificate, and ours.
func (i *Identity) authorities(c *x509.Certificate) string {
	if c == nil {
		return ""
	}
	text := ": " + authorityName(c.Issuer.CommonName, c.AuthorityKeyId)
	if i.source == nil {
		return text
	}
	if own := i.source.current().leaf; own != nil {
		text += ", ours is " + authorityName(own.Issuer.CommonName, own.AuthorityKeyId)
	}
	return text
}

func named(c *x509.Certificate) string {
	if c == nil || c.Subject.CommonName == "" {
		return ""
	}
	return fmt.Sprintf(" (%q)", c.Subject.CommonName)
}

// ofOurs explains an error that the other side has found in our certificate: an alert, of which
// crypto/tls shows the text alone.
func (i *Identity) ofOurs(err error, other string) error {
	text := err.Error()
	if !strings.Contains(text, "remote error: tls: ") {
		return nil
	}
	f := i.Facts()
	who := "our certificate"
	if !f.NotAfter.IsZero() {
		who = fmt.Sprintf("our certificate (%q, signed by %s, valid until %s)", f.Name,
			authorityName(f.Issuer, f.IssuerKey), f.NotAfter.UTC().Format(time.DateOnly))
	}
	fix := ""
	switch {
	case strings.Contains(text, "unknown certificate authority"):
		fix = "it knows another authority: issue those of both sides by one"
	case strings.Contains(text, "expired certificate"):
		fix = "issue a new one, or set the clocks"
	case strings.Contains(text, "certificate required"):
		return &Error{fmt.Sprintf("%s asks for a certificate, and we show none", other),
			"set Certificates, or GetClientCertificate", err}
	case strings.Contains(text, "bad certificate"), strings.Contains(text, "unknown certificate"),
		strings.Contains(text, "unsupported certificate"):
		fix = "it must be for servers and clients, of the authority that both sides know, and " +
			"not revoked"
	case strings.Contains(text, "protocol version not supported"):
		return &Error{fmt.Sprintf("%s does not speak TLS 1.3", other),
			"it must: only so do both sides prove their identity", err}
	default:
		return nil
	}
	if f.RenewError != nil {
		fix += fmt.Sprintf("; the files have changed here but cannot be used: %v", f.RenewError)
	}
	return &Error{fmt.Sprintf("%s refuses %s", other, who), fix, err}
}
