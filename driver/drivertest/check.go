// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// check is one promise of the contract, tried.
type check struct {
	name    string
	wirings Wiring
	needs   []optional
	run     func(*stage)
}

// The sets of wirings that checks ask for.
const (
	everywhere = Self | Pair | Processes
	here       = Self | Pair // looks at both sides directly, or is about one side only
)

// perform runs the check on a stage of its own.
func (c check) perform(tb testing.TB, h Harness, w Wiring) {
	tb.Helper()
	s := newStage(tb, h, w)
	for _, o := range c.needs {
		if missing := s.lacks(o); missing != "" {
			tb.Logf("not run: %s", missing)
			return
		}
	}
	c.run(s)
}

// optional is an interface that a backend may have.
type optional uint8

const (
	notifier optional = iota
	counter
	pager
	persister
	canceler
	fencer
	armer
	watcher
	explainer
	helper
	allocator
)

// has reports whether the backend has the interface.
func (s *stage) has(o optional) (ok bool) {
	switch o {
	case notifier:
		_, ok = s.peer.(driver.Notifier)
	case counter:
		_, ok = s.peer.(driver.Counter)
	case pager:
		_, ok = s.peer.(driver.Pager)
	case persister:
		_, ok = s.peer.(driver.Persister)
	case canceler:
		_, ok = s.peer.(driver.Canceler)
	case fencer:
		_, ok = s.near.b.(driver.Fencer)
	case armer:
		_, ok = s.near.b.(driver.Armer)
	case watcher:
		_, ok = s.peer.(driver.Watcher)
	case explainer:
		_, ok = s.peer.(driver.Explainer)
	case helper:
		_, ok = s.peer.(driver.Helper)
	case allocator:
		ok = hasMemory(s.near.b)
	}
	return ok
}

// lacks returns "" if the backend has the interface, else what to log.
func (s *stage) lacks(o optional) string {
	if s.has(o) {
		return ""
	}
	return "the backend has no " + [...]string{
		"Notifier", "Counter", "Pager", "Persister", "Canceler", "Fencer", "Armer", "Watcher", "Explainer", "Helper", "Allocator, or no memory of its own",
	}[o]
}

// checks is the suite.
var checks = join(
	lengthChecks, boundsChecks, tokenChecks, pagesChecks, durableChecks, notifyChecks, countChecks, lastWordChecks,
	completionChecks, noPollChecks, cancelChecks, helpChecks, fenceChecks, besideChecks, armChecks, allocChecks,
	allocatorChecks, connectChecks, lifecycleChecks, hammerChecks,
)

func join(lists ...[]check) (all []check) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}
