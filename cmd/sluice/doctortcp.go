// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
)

// tcpChecks says where tcp would listen, and whether others can read what passes.
func tcpChecks(t *tcpFlags) []machine.Check {
	c := machine.Check{Name: "tcp-privacy", State: machine.OK, Backends: []string{tcpName}}
	b, err := t.open()
	if errors.Is(err, driver.ErrUnavailable) {
		return nil // to open the backend says it, too
	}
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			c.Fix = "another port, or end the program that has this one: ss -ltnp"
		}
		c.State = machine.Missing
		c.Found = strings.NewReplacer("Config.Listen", "--tcp-listen", "tcp: config: Listen",
			"--tcp-listen").Replace(err.Error())
		c.Why = "the port and the certificates are those of --tcp-listen, --tcp-cert, --tcp-key " +
			"and --tcp-ca"
		return []machine.Check{c}
	}
	defer b.Close()
	places, secure, err := tcp.Places(b.Addr())
	if err != nil {
		return nil // of an address of its own it cannot be
	}
	at := strings.Join(places, ", ")
	switch {
	case secure:
		c.Found, c.Why = fmt.Sprintf("TLS 1.3 with certificates of both sides, at %s", at),
			"no third party reads or changes what passes"
	case t.listen == "":
		c.Found, c.Why = fmt.Sprintf("plain text, at %s: this host alone", at),
			"peers of other hosts need --tcp-listen and certificates"
	default:
		c.State, c.Found = machine.Limited, fmt.Sprintf("plain text, at %s", at)
		c.Why, c.Fix = "everybody on the network may read and change what passes",
			"say --tcp-cert, --tcp-key and --tcp-ca"
	}
	checks := []machine.Check{c}
	if secure {
		checks = append(checks, certificateCheck(t, time.Now()))
	}
	return checks
}

// renewal is how long before its end a certificate is worth a word.
const renewal = 14 * 24 * time.Hour

// certificateCheck looks at what peers are shown: by tcp, and by engines that introduce themselves.
func certificateCheck(t *tcpFlags, now time.Time) machine.Check {
	c := machine.Check{Name: "certificate", State: machine.OK, Backends: []string{tcpName}}
	id, err := identity.FromFiles(t.cert, t.key, t.ca)
	if err != nil {
		c.State, c.Found, c.Why = machine.Missing, err.Error(), "peers refuse it"
		return c
	}
	f := id.Facts()
	c.Found = fmt.Sprintf("of %q, by %q, for %s, until %s", f.Name, f.Issuer,
		strings.Join(f.Hosts, ", "), f.NotAfter.UTC().Format(time.DateOnly))
	c.Why = "peers of the same authority are served, no others"
	info, err := os.Stat(t.key)
	switch {
	case f.NotAfter.Sub(now) < renewal:
		c.State, c.Why, c.Fix = machine.Limited, "it ends soon", "issue a new one (sluice keys "+
			"issue --force): it is in use from the next handshake on"
	case err == nil && info.Mode().Perm()&0o007 != 0:
		c.State, c.Why, c.Fix = machine.Limited, "every user of this host can read its key",
			"chmod 600 "+t.key
	}
	return c
}
