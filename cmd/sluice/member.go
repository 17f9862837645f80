// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
)

// memberFlags say which identity we show to other engines, and by which backends they reach us.
type memberFlags struct {
	cert, key, ca string // files
	revoked       []string
	checkHost     bool
	plaintext     bool
	backends      []string
	name          string
}

func (m *memberFlags) register(c *cobra.Command) {
	m.registerIdentity(c)
	m.registerBackends(c)
}

// registerBackends is the part that names backends.
func (m *memberFlags) registerBackends(c *cobra.Command) {
	c.Flags().StringSliceVar(&m.backends, "backend", memberBackends, "by which this side "+
		"and its peers reach each other, with commas: shm (this host), "+
		"tcp (secured as the rest), ucx, rdma (not encrypted)")
}

var memberBackends = []string{"shm", tcpName}

// registerIdentity is the part that tells the peer which program this is.
func (m *memberFlags) registerIdentity(c *cobra.Command) {
	m.backends = memberBackends
	s := c.Flags()
	s.StringVar(&m.cert, "cert", "", "file of our certificate (PEM); see sluice keys")
	s.StringVar(&m.key, "key", "", "file of its key (PEM)")
	s.StringVar(&m.ca, "ca", "", "file of the authority whose members peers must be (PEM)")
	s.StringArrayVar(&m.revoked, "revoked", nil, "file of certificates that the authority has "+
		"revoked, which is followed (PEM); see sluice keys revoke")
	s.BoolVar(&m.checkHost, "check-host", false, "the peer that we dial must have a "+
		"certificate for that name or address, too")
	s.BoolVar(&m.plaintext, "plaintext", false, "no certificates: everybody on the network may "+
		"connect, read and change what passes")
	host, _ := os.Hostname() // empty is a name like any other
	s.StringVar(&m.name, "name", host, "how we are called in messages to people")
}

func (m *memberFlags) check() error {
	named := 0
	for _, f := range []string{m.cert, m.key, m.ca} {
		if f != "" {
			named++
		}
	}
	switch {
	case named == 0 && !m.plaintext:
		return usagef("say --cert, --key and --ca (sluice keys makes them), or --plaintext where " +
			"the network is trusted")
	case named > 0 && m.plaintext:
		return usagef("--plaintext and --cert: want one of them")
	case named > 0 && named < 3:
		return usagef("--cert, --key and --ca go together: TLS is spoken by both sides")
	case len(m.revoked) > 0 && m.plaintext:
		return usagef("--revoked and --plaintext: without certificates there is none to refuse")
	case m.checkHost && m.plaintext:
		return usagef(
			"--check-host and --plaintext: without certificates there is nothing to check")
	}
	return m.checkBackends()
}

func (m *memberFlags) checkBackends() error {
	names := strings.TrimPrefix(backendNames(driver.SameHost), auto+", ")
	if len(m.backends) == 0 {
		return usagef("--backend: want some of %s", names)
	}
	for i, name := range m.backends {
		if !slices.Contains(strings.Split(names, ", "), name) {
			return usagef("--backend %q: want some of %s", name, names)
		}
		if slices.Contains(m.backends[:i], name) {
			return usagef("--backend %s is there twice", name)
		}
	}
	return nil
}

// identity reads the files; nil: plain text.
func (m *memberFlags) identity() (*identity.Identity, error) {
	if m.plaintext {
		return nil, nil
	}
	id, err := identity.FromFiles(m.cert, m.key, m.ca, m.revoked...)
	if errors.Is(err, driver.ErrBounds) || errors.Is(err, os.ErrNotExist) ||
		errors.Is(err, os.ErrPermission) {
		flags := "--cert, --key, --ca"
		if len(m.revoked) > 0 {
			flags += ", --revoked"
		}
		return nil, &usageError{fmt.Errorf("%s: %w", flags, err)}
	}
	if err == nil && m.checkHost {
		id = id.CheckHost()
	}
	return id, err
}

// open opens an engine with the backends of the command line, and those of extra.
func (m *memberFlags) open(listen string, change func(*engine.Config), extra ...string) (
	*engine.Engine, error) {
	id, err := m.identity()
	if err != nil {
		return nil, err
	}
	cfg := engine.Config{Name: m.name, Identity: id, Plaintext: m.plaintext}
	for _, name := range append(m.backends[:len(m.backends):len(m.backends)], extra...) {
		b, err := openMember(name, tcp.Config{Listen: listen, Identity: id, Plaintext: m.plaintext})
		if err != nil {
			return nil, errors.Join(err, closeAll(cfg.Backends))
		}
		cfg.Backends = append(cfg.Backends, b)
	}
	if change != nil {
		change(&cfg)
	}
	return engine.Open(cfg)
}

func openMember(name string, t tcp.Config) (driver.Backend, error) {
	if name == tcpName {
		return asBackend(tcp.New(t))
	}
	m, err := findMaker(name, driver.InProcess)
	if err != nil {
		return nil, err
	}
	return openBackend(m, openOptions{threads: 1})
}

// privacy says whether others can read what passes, a line each.
func (m *memberFlags) privacy(id *identity.Identity) string {
	var b strings.Builder
	if id == nil {
		b.WriteString("plain text: everybody on the network may connect, and read and change " +
			"what passes\n")
	} else {
		f := id.Facts()
		fmt.Fprintf(&b, "TLS 1.3: we are %q, valid until %s; peers are programs with a "+
			"certificate of %q\n", f.Name, f.NotAfter.UTC().Format(time.RFC3339), f.Issuer)
	}
	for _, name := range m.backends {
		if name == rdmaName || name == ucxName {
			fmt.Fprintf(&b, "%s: its data is not encrypted; memory is opened by tokens, which "+
				"only such peers are given\n", name)
		}
	}
	return b.String()
}

// ownAddress is the address of this host from which another one is reached.
func ownAddress(peer string) (string, error) {
	c, err := net.Dial("udp", peer) // sends nothing
	if err != nil {
		return "", err
	}
	defer c.Close()
	host, _, err := net.SplitHostPort(c.LocalAddr().String())
	return host, err
}
