// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
)

// tcpName is the backend that tcpFlags are for.
const tcpName = "tcp"

// loopback is where tcp listens unless the command line says otherwise: plain text that
// leaves this host must be asked for.
const loopback = "127.0.0.1:0"

// tcpFlags are what a command line says about the tcp backend, and about nothing else.
type tcpFlags struct {
	listen        string
	plaintext     bool
	cert, key, ca string // files
	conns         int
}

func (t *tcpFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&t.listen, "tcp-listen", "", "of backend tcp alone: HOST:PORT or HOST:PORT-PORT "+
		"for peers; without it the loopback, in plain text unless there are certificates")
	s.BoolVar(&t.plaintext, "tcp-plaintext", false, "of backend tcp alone: everybody on the "+
		"network of --tcp-listen may read and change what passes")
	s.StringVar(&t.cert, "tcp-cert", "", "of backend tcp alone: file of the certificate "+
		"(PEM), for TLS")
	s.StringVar(&t.key, "tcp-key", "", "of backend tcp alone: file of its key (PEM)")
	s.StringVar(&t.ca, "tcp-ca", "", "of backend tcp alone: file of the authority whose "+
		"certificates peers show (PEM)")
	s.IntVar(&t.conns, "tcp-conns", 0, "of backend tcp alone: connections for data to a peer; 0: "+
		"what the backend thinks right")
}

// given names the flags that were set.
func (t *tcpFlags) given() []string {
	var names []string
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"--tcp-listen", t.listen != ""}, {"--tcp-plaintext", t.plaintext},
		{"--tcp-cert", t.cert != ""},
		{"--tcp-key", t.key != ""}, {"--tcp-ca", t.ca != ""}, {"--tcp-conns", t.conns != 0},
	} {
		if f.set {
			names = append(names, f.name)
		}
	}
	return names
}

func (t *tcpFlags) check(backend string) error {
	if names := t.given(); len(names) > 0 && backend != tcpName {
		return usagef("%s is of backend %s alone: say --backend %s, not %q", names[0], tcpName,
			tcpName, backend)
	}
	secure := t.cert != "" || t.key != "" || t.ca != ""
	switch {
	case secure && (t.cert == "" || t.key == "" || t.ca == ""):
		return usagef("--tcp-cert, --tcp-key and --tcp-ca go together: TLS is spoken by both sides")
	case secure && t.plaintext:
		return usagef("--tcp-plaintext and --tcp-cert: want one of them")
	case t.listen != "" && !secure && !t.plaintext:
		return usagef("--tcp-listen %s: say --tcp-cert, --tcp-key and --tcp-ca, or "+
			"--tcp-plaintext where the network is trusted", t.listen)
	case t.conns < 0:
		return usagef("--tcp-conns %d: want 1 or more, or 0 for what the backend thinks right",
			t.conns)
	}
	return nil
}

// config is the backend's.
func (t *tcpFlags) config() (tcp.Config, error) {
	cfg := tcp.Config{Listen: t.listen, Plaintext: t.cert == "", Conns: t.conns}
	if cfg.Listen == "" {
		cfg.Listen = loopback
	}
	if t.cert == "" {
		return cfg, nil
	}
	id, err := identity.FromFiles(t.cert, t.key, t.ca)
	if err != nil {
		return cfg, fmt.Errorf("--tcp-cert, --tcp-key and --tcp-ca: %w", err)
	}
	cfg.Identity = id
	return cfg, nil
}

// open opens the backend.
func (t *tcpFlags) open() (*tcp.Backend, error) {
	cfg, err := t.config()
	if err != nil {
		return nil, err
	}
	b, err := tcp.New(cfg)
	if err != nil {
		return nil, err
	}
	if err := reached(b); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// reached refuses a backend that this host itself does not reach: in a network namespace whose
// loopback is down a port can be opened all the same.
func reached(b *tcp.Backend) error {
	places, _, err := tcp.Places(b.Addr())
	if err != nil || len(places) == 0 {
		return err
	}
	conn, err := net.DialTimeout("tcp", places[0], time.Second)
	if err == nil {
		return conn.Close()
	}
	if !errors.Is(err, syscall.ENETUNREACH) && !errors.Is(err, syscall.EADDRNOTAVAIL) {
		return nil // it is slow, or full
	}
	return &driver.UnavailableError{Backend: tcpName, Reason: "this host does not reach its own " +
		"port: " + err.Error(), Fix: "ip link set lo up"}
}

// examine opens what each process will open.
func (t *tcpFlags) examine() error {
	b, err := t.open()
	switch {
	case err == nil:
		return b.Close()
	case errors.Is(err, driver.ErrBounds), errors.Is(err, os.ErrNotExist):
		return &usageError{err}
	}
	return err
}

// checkEnds refuses one port for the ends on this host, of which each listens.
func (t *tcpFlags) checkEnds() error {
	_, port, err := net.SplitHostPort(t.listen)
	if n, e := strconv.ParseUint(port, 10, 16); err == nil && e == nil && n != 0 {
		return usagef("--tcp-listen %s: each end on this host listens there: want HOST:PORT-PORT, "+
			"with a port for each, or HOST:0", t.listen)
	}
	return nil
}

// args are the flags once more, for a child process.
func (t *tcpFlags) args() []string {
	var list []string
	for _, f := range []struct{ name, value string }{
		{"tcp-listen", t.listen}, {"tcp-cert", t.cert}, {"tcp-key", t.key}, {"tcp-ca", t.ca},
	} {
		if f.value != "" {
			list = append(list, "--"+f.name+"="+f.value)
		}
	}
	if t.plaintext {
		list = append(list, "--tcp-plaintext")
	}
	return number(list, "tcp-conns", t.conns)
}
