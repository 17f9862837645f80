// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// Library is a C library that is opened at run time, once in the life of the process.
type Library struct {
	Backend string // the name in errors
	System  string // what Load opens when it is given no path
	// Open opens the library at a path, or says why it cannot and what to do.
	Open func(path string) (reason, fix string)

	mu   sync.Mutex
	path string // empty: not loaded
}

// Load opens the library at a path; "" is the one of the system. If it cannot be used, or another
// one is open already, the error is a *driver.UnavailableError, and a later call may try again.
func (l *Library) Load(path string) error {
	if path == "" {
		path = l.System
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch l.path {
	case path:
		return nil
	case "":
	default:
		return l.Unavailable(fmt.Sprintf("%s is open already, and a process has one %s: %s is not "+
			"opened", l.path, l.System, path), "give the same path everywhere")
	}
	if reason, fix := l.Open(path); reason != "" {
		return l.Unavailable(reason, fix)
	}
	l.path = path
	return nil
}

// Loaded returns a *driver.UnavailableError unless Load has succeeded.
func (l *Library) Loaded() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.path == "" {
		return l.Unavailable(l.System+" is not open", "call Load first")
	}
	return nil
}

// Unavailable returns a *driver.UnavailableError of the backend that calls the library.
func (l *Library) Unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: l.Backend, Reason: reason, Fix: fix}
}
