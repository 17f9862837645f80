// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"testing"
	"time"
)

// Failures performs one check over one wiring, and returns what it found instead of failing
// tb: for backends that are wrong on purpose, whose tests prove that the check can fail.
// A name that is no check fails tb.
func Failures(tb testing.TB, h Harness, w Wiring, name string) []string {
	tb.Helper()
	for _, c := range checks {
		if c.name == name && c.wirings&w != 0 {
			h = h.withDefaults()
			h.patience = min(h.Limit, 2*time.Second)
			r := &recorder{TB: tb}
			return r.run(func(tb testing.TB) { c.perform(tb, h, w) })
		}
	}
	tb.Fatalf("no check over %v is called %q", w, name)
	return nil
}
