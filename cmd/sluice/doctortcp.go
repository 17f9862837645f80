// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/options"
)

// tcpChecks says where tcp would listen, and whether others can read what passes.
func tcpChecks(spec backendSpec) []machine.Check {
	c := machine.Check{Name: "tcp-privacy", State: machine.OK, Backends: []string{"tcp"}}
	opened, err := spec.openOne(1)
	if errors.Is(err, driver.ErrUnavailable) {
		return nil // to open the backend says it, too
	}
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			c.Fix = "another port, or end the program that has this one: ss -ltnp"
		}
		c.State, c.Found = machine.Missing, sentence(err)
		c.Why = "the port and the certificates are those of --backend " + spec.text
		return []machine.Check{c}
	}
	b := opened.(*tcp.Backend)
	defer b.Close()
	places, secure, err := tcp.Places(b.Addr())
	if err != nil {
		return nil // of an address of its own it cannot be
	}
	var s byname.TCP
	if err := options.Set(&s, spec.words); err != nil {
		return nil // it has been opened with them
	}
	at := strings.Join(places, ", ")
	switch {
	case s.Certificate != "":
		c.Found, c.Why = fmt.Sprintf("TLS 1.3 with certificates of both sides, at %s", at),
			"no third party reads or changes what passes"
	case secure:
		c.Found, c.Why = fmt.Sprintf("TLS 1.3 by a key of its own, at %s", at),
			"peers know it by the description that names the key"
	case s.Listen == "":
		c.Found, c.Why = fmt.Sprintf("plain text, at %s: this host alone", at),
			"peers of other hosts need --backend tcp:listen=HOST:PORT with certificates"
	default:
		c.State, c.Found = machine.Limited, fmt.Sprintf("plain text, at %s", at)
		c.Why, c.Fix = "everybody on the network may read and change what passes",
			"leave plaintext out, or say certificate, key and authority"
	}
	checks := []machine.Check{c}
	if s.Certificate != "" {
		checks = append(checks, certificateCheck(&s, time.Now()))
	}
	return checks
}

// renewal is how long before its end a certificate is worth a word.
const renewal = 14 * 24 * time.Hour

// certificateCheck looks at what peers are shown: by tcp, and by engines that introduce themselves.
func certificateCheck(s *byname.TCP, now time.Time) machine.Check {
	c := machine.Check{Name: "certificate", State: machine.OK, Backends: []string{"tcp"}}
	id, err := identity.FromFiles(s.Certificate, s.Key, s.Authority)
	if err != nil {
		c.State, c.Found, c.Why = machine.Missing, err.Error(), "peers refuse it"
		return c
	}
	f := id.Facts()
	c.Found = fmt.Sprintf("of %q, by %q, for %s, until %s", f.Name, f.Issuer,
		strings.Join(f.Hosts, ", "), f.NotAfter.UTC().Format(time.DateOnly))
	c.Why = "peers of the same authority are served, no others"
	info, err := os.Stat(s.Key)
	switch {
	case f.NotAfter.Sub(now) < renewal:
		c.State, c.Why, c.Fix = machine.Limited, "it ends soon", "issue a new one: it is in "+
			"use from the next handshake on"
	case err == nil && info.Mode().Perm()&0o007 != 0:
		c.State, c.Why, c.Fix = machine.Limited, "every user of this host can read its key",
			"chmod 600 "+s.Key
	}
	return c
}
