// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// checkLeaks finds what a test leaves behind.
func checkLeaks(tb testing.TB, h *Harness) {
	tb.Helper()
	testkit.CheckLeaksWithin(tb, min(h.limit, 20*time.Second))
}

// recorder is a testing.TB that keeps failures instead of reporting them: for the second process,
// and for tests that must see a check fail.
type recorder struct {
	testing.TB // may be nil: what is not overridden is not used
	mu         sync.Mutex
	failures   []string
	cleanups   []func()
}

func (r *recorder) fail(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, text)
}

// The methods of testing.TB that checks use.

func (r *recorder) Name() string                      { return "recorded" }
func (r *recorder) Helper()                           {}
func (r *recorder) Log(...any)                        {}
func (r *recorder) Logf(string, ...any)               {}
func (r *recorder) Error(args ...any)                 { r.fail(fmt.Sprintln(args...)) }
func (r *recorder) Errorf(format string, args ...any) { r.fail(fmt.Sprintf(format, args...)) }

func (r *recorder) FailNow() {
	r.fail("failed")
	runtime.Goexit()
}

func (r *recorder) Fatal(args ...any) {
	r.Error(args...)
	runtime.Goexit()
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Skip(args ...any) {
	r.fail("skipped: " + fmt.Sprint(args...))
	runtime.Goexit()
}

func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.failures) > 0
}

func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

// guarded runs f in a goroutine that Fatal may end.
func (r *recorder) guarded(f func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				r.fail(fmt.Sprintf("panic: %v\n%s", p, debug.Stack()))
			}
		}()
		f()
	}()
	<-ended
}

// end runs the cleanups, and returns the failures.
func (r *recorder) end(run func(func())) []string {
	for n := len(r.cleanups); n > 0; n = len(r.cleanups) {
		last := r.cleanups[n-1]
		r.cleanups = r.cleanups[:n-1]
		run(last)
	}
	return r.failures
}
