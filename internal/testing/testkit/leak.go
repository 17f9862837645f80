// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// patience is how long what is about to end may take. A goroutine that has been
// told to stop, or a socket that the kernel still closes, is no leak. On a busy
// machine either takes seconds.
const patience = 20 * time.Second

// CheckLeaks fails the test if, at its end, more descriptors, goroutines or bytes of
// hostmem exist than now; also are further counts by name, such as live objects
// of a backend. Call it first, so that its cleanup runs after all others. It
// counts for the whole process: a test that calls it, or anything beside it,
// must not be Parallel.
func CheckLeaks(t testing.TB, also ...func() map[string]uint64) {
	t.Helper()
	checkLeaks(t, patience, also)
}

// Leaks returns a function that lists what exists more than now, in words, once what is about to
// end has had that long.
func Leaks(within time.Duration) func() []string {
	warmUp()
	before := newSnapshot(nil, true)
	return func() []string { return settle(before, nil, true, within) }
}

// checked are the tests with a check that has not ended. A second check of the same test looks at
// its further counts alone: between the two the test has started what starts more and opens more
// while the second looks. The first, which ends last, sees it gone.
var checked sync.Map

func checkLeaks(t testing.TB, within time.Duration, also []func() map[string]uint64) {
	t.Helper()
	warmUp()
	_, inner := checked.LoadOrStore(t, true)
	before := newSnapshot(also, !inner)
	t.Cleanup(func() {
		t.Helper()
		if !inner {
			checked.Delete(t)
		}
		if grown := settle(before, also, !inner, within); len(grown) > 0 {
			ErrorBroken(t, "left behind by this test (close what you opened, wait for what "+
				"you started):\n%s", strings.Join(grown, "\n"))
		}
	})
}

// settle looks until nothing is left over or time is up.
func settle(before snapshot, also []func() map[string]uint64, whole bool,
	within time.Duration) []string {
	end := time.Now().Add(within)
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 50*time.Millisecond) {
		grown := newSnapshot(also, whole).since(before)
		if len(grown) == 0 || time.Now().After(end) {
			return grown
		}
		time.Sleep(pause)
		if !slices.ContainsFunc(grown, func(left string) bool {
			return !strings.Contains(left, ": pipe:[")
		}) {
			runtime.GC() // net keeps pipes for splice, until then; files would be closed by it, too
		}
	}
}

// snapshot lists the resources that the process has at one time.
type snapshot struct {
	descriptors map[int]string    // number to what it refers to
	goroutines  map[string]string // id to stack
	counts      map[string]uint64
}

// newSnapshot looks at the whole process, or at the further counts alone.
func newSnapshot(also []func() map[string]uint64, whole bool) snapshot {
	s := snapshot{counts: map[string]uint64{}}
	if whole {
		s.descriptors = descriptors()
		s.goroutines = goroutines()
		for name, n := range hostmem.InUse() {
			s.counts["bytes of hostmem for "+name] += n
		}
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
