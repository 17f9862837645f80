// SPDX-License-Identifier: Apache-2.0

// Package leak finds what a test leaves behind: descriptors, goroutines and
// memory outside the Go heap. Only tests import it.
package leak

import (
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// patience is how long what is about to end may take. A goroutine that has been
// told to stop, or a socket that the kernel still closes, is no leak.
const patience = 2 * time.Second

// Check fails the test if, at its end, more descriptors, goroutines or bytes of
// hostmem exist than now; also are further counts by name, such as live objects
// of a backend. Call it first, so that its cleanup runs after all others. It
// counts for the whole process: a test that calls it, or anything beside it,
// must not be Parallel.
func Check(t testing.TB, also ...func() map[string]uint64) {
	t.Helper()
	check(t, func() bool { return false }, also)
}

// CheckBut is Check, but for descriptors where a library keeps some, as kept reports at the end.
func CheckBut(t testing.TB, kept func() bool) {
	t.Helper()
	check(t, kept, nil)
}

func check(t testing.TB, kept func() bool, also []func() map[string]uint64) {
	t.Helper()
	warmUp()
	before := take(also)
	t.Cleanup(func() {
		t.Helper()
		if kept() {
			before.descriptors = descriptors()
		}
		if grown := settle(before, also, patience); len(grown) > 0 {
			t.Errorf("left behind by this test (close what you opened, wait for what you "+
				"started):\n%s",
				strings.Join(grown, "\n"))
		}
	})
}

// settle looks until nothing is left over or time is up.
func settle(before snapshot, also []func() map[string]uint64, within time.Duration) []string {
	end := time.Now().Add(within)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 50*time.Millisecond) {
		grown := take(also).since(before)
		if len(grown) == 0 || time.Now().After(end) {
			return grown
		}
		time.Sleep(pause)
	}
}

// snapshot is what exists at one time.
type snapshot struct {
	descriptors map[int]string    // number to what it refers to
	goroutines  map[string]string // id to stack
	counts      map[string]uint64
}

func take(also []func() map[string]uint64) snapshot {
	s := snapshot{
		descriptors: descriptors(),
		goroutines:  goroutines(),
		counts:      map[string]uint64{},
	}
	for name, n := range hostmem.InUse() {
		s.counts["bytes of hostmem for "+name] += n
	}
	for _, f := range also {
		for name, n := range f() {
			s.counts[name] += n
		}
	}
	return s
}

// since lists, in words and in order, what s has more than before.
func (s snapshot) since(before snapshot) []string {
	grown := grownDescriptors(before.descriptors, s.descriptors)
	grown = append(grown, grownGoroutines(before.goroutines, s.goroutines)...)
	return append(grown, grownCounts(before.counts, s.counts)...)
}
