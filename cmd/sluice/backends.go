// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
)

// auto is the name that leaves the choice to the engine.
const auto = "auto"

// specHelp says what a backend may be on the command line.
const specHelp = `A backend is NAME or NAME:OPTION=VALUE,..., such as rdma:devices=mlx5_0,rails=1. An option is a
field of the backend's Config: RingBytes is ring_bytes. A comma ends a value only where OPTION=
follows it; write \, for a comma of a value that has a = behind it. An option that is a list may be
given again, as in advertise=HOST,advertise=HOST. tcp:certificate=FILE,key=FILE,authority=FILE speaks
TLS 1.3; without listen, plaintext and certificate tcp listens on the loopback, in plain text.`

// specForm is the form of a backendSpec, for help texts.
const specForm = "NAME[:OPTION=VALUE,...]"

// backendSpec is the value of a --backend: auto, or NAME[:OPTION=VALUE,...].
type backendSpec struct {
	text  string
	name  string
	words []string // options
	given bool     // by the command line
}

// autoSpec is the default of --backend.
func autoSpec() backendSpec { return backendSpec{text: auto, name: auto} }

// String implements pflag.Value. It is what Set takes again, in a child process too.
func (s *backendSpec) String() string { return s.text }

// Type implements pflag.Value.
func (s *backendSpec) Type() string { return specForm }

// Set implements pflag.Value.
func (s *backendSpec) Set(text string) error {
	name, words, err := byname.Split(text)
	switch {
	case err != nil:
		return err
	case s.given:
		return byname.Errorf("%s stands before it: want one", s.text)
	case name == auto && words != nil:
		return byname.Errorf("%s takes no options: name the backend that has them", auto)
	case name != auto && !slices.Contains(backendNames(driver.InProcess), name):
		return byname.Errorf("backend %q does not exist: there are %s", name,
			strings.Join(backendNames(driver.InProcess), ", "))
	case name != auto:
		if err := byname.Check(text); err != nil {
			return err
		}
	}
	*s = backendSpec{text, name, words, true}
	return nil
}

// backendSpecs are the values of a --backend that may be given several times.
type backendSpecs []backendSpec

// String implements pflag.Value.
func (l *backendSpecs) String() string { return "" }

// Type implements pflag.Value.
func (l *backendSpecs) Type() string { return specForm }

// Set implements pflag.Value.
func (l *backendSpecs) Set(text string) error {
	var s backendSpec
	err := s.Set(text)
	*l = append(*l, s)
	return err
}

// of returns what the command line says about a backend.
func (l backendSpecs) of(name string) backendSpec {
	for _, s := range slices.Backward(l) {
		if s.name == name {
			return s
		}
	}
	return backendSpec{text: name, name: name}
}

// backendNames lists what --backend takes, for peers that far apart.
func backendNames(reach driver.Reach) []string {
	names := []string{auto}
	for _, b := range byname.All() {
		if b.Reach >= reach {
			names = append(names, b.Name)
		}
	}
	return names
}

// checkReach refuses a backend whose peers cannot be that far apart.
func (s *backendSpec) checkReach(reach driver.Reach) error {
	if !slices.Contains(backendNames(reach), s.name) {
		return usagef("backend %q stays within one process: there are %s", s.name,
			strings.Join(backendNames(reach), ", "))
	}
	return nil
}

// isBuilt reports whether this build has it.
func isBuilt(b byname.Backend) bool { return withCgo || !b.Cgo }

// opensPort reports whether a backend opens a port on the network, which peers of the same host do
// not need.
func opensPort(b byname.Backend) bool { return b.Reach == driver.Network }

// open opens the backend, or with auto all that reach as far and work here, without those that open
// a port for peers of the same host. It is an error when none does.
func (s *backendSpec) open(threads int, reach driver.Reach) ([]driver.Backend, error) {
	if s.name != auto {
		b, err := s.openOne(threads)
		if err != nil {
			return nil, err
		}
		return []driver.Backend{b}, nil
	}
	var list []driver.Backend
	var errs []error
	for _, known := range byname.All() {
		if known.Reach < reach || opensPort(known) && reach <= driver.SameHost {
			continue
		}
		one := backendSpec{text: known.Name, name: known.Name}
		b, err := one.openOne(threads)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, b)
	}
	if len(list) == 0 {
		return nil, errors.Join(errs...)
	}
	return list, nil
}

// openOne opens one backend. threads is how many of mem and shm copy, unless its options say so.
func (s *backendSpec) openOne(threads int) (driver.Backend, error) {
	words := s.words
	switch s.name {
	case "mem", "shm":
		words = append([]string{fmt.Sprintf("workers=%d", threads)}, words...)
	case "tcp":
		words = tcpWords(words)
	}
	b, err := byname.Open(s.name, words)
	if err == nil {
		return b, nil
	}
	var missing *driver.UnavailableError
	var wrong *byname.Error
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("%w: take another port, or a range for the processes of this host, as in "+
			"listen=HOST:PORT-PORT (ss -ltnp names who has it)", err)
	}
	switch {
	case errors.As(err, &missing): // it needs no more words
		return nil, missing
	case errors.As(err, &wrong), len(s.words) > 0 && (errors.Is(err, driver.ErrBounds) ||
		errors.Is(err, os.ErrNotExist)):
		return nil, &usageError{fmt.Errorf("--backend %s: %w", s.text, err)}
	}
	return nil, fmt.Errorf("open backend %s: %w", s.name, err)
}

// tcpWords adds what this tool has tcp do unless it is told otherwise: to listen on the loopback,
// and there in plain text.
func tcpWords(words []string) []string {
	if says(words, "listen") {
		return words
	}
	more := []string{"listen=127.0.0.1:0"}
	if !says(words, "plaintext", "certificate", "key", "authority") {
		more = append(more, "plaintext=true")
	}
	return append(more, words...)
}

// says reports whether words set one of these options.
func says(words []string, options ...string) bool {
	return slices.ContainsFunc(words, func(w string) bool {
		name, _, _ := strings.Cut(w, "=")
		return slices.Contains(options, name)
	})
}

// try opens a backend as a child process will, and finds before anything is started what would fail
// in it, or be ignored. With auto there is nothing to find.
func (s *backendSpec) try() error {
	if s.name == auto {
		return nil
	}
	b, err := s.openOne(1)
	if err != nil {
		return err
	}
	return b.Close()
}

func closeAll(list []driver.Backend) error {
	var errs []error
	for _, b := range list {
		errs = append(errs, b.Close())
	}
	return errors.Join(errs...)
}
