// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"strings"
	"testing"

	"github.com/sluicehq/sluice/driver"
)

// check is one promise of the contract, tried.
type check struct {
	name    string
	wirings Wiring
	needs   driver.Can // bits of the Peer
	repeats bool       // for as long as the flag of the stress says
	meets   bool       // goroutines meet in it: run under the race detector, too
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
	if missing := s.lacks(c.needs); missing != "" {
		tb.Logf("not run: %s", missing)
		return
	}
	c.run(s)
}

// bits names what a Peer may take.
var bits = []struct {
	can  driver.Can
	name string
}{
	{driver.CanPattern, "CanPattern"}, {driver.CanNotify, "CanNotify"},
	{driver.CanDurable, "CanDurable"},
}

// can reports whether the Peer takes all that the bits say.
func (s *stage) can(all driver.Can) bool { return s.peer.Can()&all == all }

// lacks returns "" if the Peer has all bits, else what to log.
func (s *stage) lacks(all driver.Can) string {
	var names []string
	for _, b := range bits {
		if all&b.can != 0 && !s.can(b.can) {
			names = append(names, b.name)
		}
	}
	if names == nil {
		return ""
	}
	return "the peer lacks " + strings.Join(names, ", ")
}

// checks is the suite.
var checks = join(
	canChecks, lengthChecks, boundsChecks, faultChecks, onlyChecks, tokenChecks, patternChecks,
	nestChecks, durableChecks,
	notifyChecks, answerChecks, lastWordChecks,
	completionChecks, noPollChecks, cancelChecks, helpChecks, fenceChecks, besideChecks,
	parkedChecks, renewChecks, stressChecks, armChecks, allocChecks,
	connectChecks, lifecycleChecks, hammerChecks,
)

func join(lists ...[]check) (all []check) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}
