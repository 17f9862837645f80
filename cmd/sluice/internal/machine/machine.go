// SPDX-License-Identifier: Apache-2.0

// Package machine finds out what a Linux machine offers each backend: limits,
// pages, kernel interfaces and libraries, and what would mend what is missing.
package machine

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// Source is where the facts come from. The zero value is the running machine; tests give a
// directory that holds proc/ and sys/ of another one.
type Source struct {
	Root     string    // in front of every path; "" is the running machine
	Backends []Backend // in the order of the report
	Known    []Check   // that the caller has made
	// MemFD and ProcessVM make system calls; nil: ask the running kernel.
	MemFD, ProcessVM func() error

	memory hostmem.Machine // read once by Examine
}

// Backend is a backend that Examine reports on.
type Backend struct {
	Name  string
	Built bool         // this build has it
	Open  func() error // tries to open it; nil: it is not tried
}

func (s *Source) path(p string) string { return filepath.Join("/", s.Root, p) }

// text reads a small file without its white space at the ends; "" when there is
// none.
func (s *Source) text(p string) string {
	b, err := os.ReadFile(s.path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number reads a file that holds one number.
func (s *Source) number(p string) (uint64, bool) {
	n, err := strconv.ParseUint(s.text(p), 10, 64)
	return n, err == nil
}

func (s *Source) glob(pattern string) []string {
	found, _ := filepath.Glob(s.path(pattern)) // the only error is a bad pattern
	return found
}

// field returns the value behind "name:" in a file of such lines.
func (s *Source) field(p, name string) string {
	for line := range strings.Lines(s.text(p)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
