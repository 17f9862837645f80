// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
)

// tcpChecks says where tcp would listen, and who can read what passes.
func tcpChecks(t *tcpFlags) []machine.Check {
	c := machine.Check{Name: "tcp-privacy", State: machine.OK, Backends: []string{tcpName}}
	b, err := t.open()
	if err != nil {
		c.State, c.Found, c.Why = machine.Missing, err.Error(), "the port and the certificates are those of --tcp-listen, --tcp-cert, --tcp-key and --tcp-ca"
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
		c.Found, c.Why = fmt.Sprintf("TLS 1.3 with certificates of both sides, at %s", at), "nobody else reads or changes what passes"
	case t.listen == "":
		c.Found, c.Why = fmt.Sprintf("plain text, at %s: this host alone", at), "peers of other hosts need --tcp-listen and certificates"
	default:
		c.State, c.Found = machine.Limited, fmt.Sprintf("plain text, at %s", at)
		c.Why, c.Fix = "everybody on the network may read and change what passes", "say --tcp-cert, --tcp-key and --tcp-ca"
	}
	return []machine.Check{c}
}
