// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
)

// recorder is a testing.TB that keeps failures instead of reporting them: for
// code that wants a TB in the second process, and for the tests of the suite,
// which must see a check fail. What it does not override is the embedded TB's;
// that may be nil.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	failures []string
	skips    []string
	cleanups []func()
}

// panicked begins the failure of a check that panicked.
const panicked = "panic: "

func (r *recorder) fail(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, strings.TrimSpace(text))
}

// The methods of testing.TB that checks use.

func (r *recorder) Name() string                      { return "recorded" }
func (r *recorder) Helper()                           {}
func (r *recorder) Log(...any)                        {}
func (r *recorder) Logf(string, ...any)               {}
func (r *recorder) Fail()                             { r.fail("failed") }
func (r *recorder) Error(args ...any)                 { r.fail(fmt.Sprintln(args...)) }
func (r *recorder) Errorf(format string, args ...any) { r.fail(fmt.Sprintf(format, args...)) }

func (r *recorder) FailNow() {
	r.Fail()
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
	r.mu.Lock()
	r.skips = append(r.skips, fmt.Sprint(args...))
	r.mu.Unlock()
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

// run calls f as a test would be called, cleans up, and returns the failures.
func (r *recorder) run(f func(testing.TB)) []string {
	r.guarded(func() { f(r) })
	for last := r.popCleanup(); last != nil; last = r.popCleanup() {
		r.guarded(last)
	}
	return r.tidy()
}

// tidy runs what cleanups are left in this goroutine and returns the failures.
func (r *recorder) tidy() []string {
	for last := r.popCleanup(); last != nil; last = r.popCleanup() {
		last()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failures
}

func (r *recorder) popCleanup() func() {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.cleanups)
	if n == 0 {
		return nil
	}
	last := r.cleanups[n-1]
	r.cleanups = r.cleanups[:n-1]
	return last
}

// guarded runs f in a goroutine that Fatal may end.
func (r *recorder) guarded(f func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				r.fail(fmt.Sprintf(panicked+"%v\n%s", p, debug.Stack()))
			}
		}()
		f()
	}()
	<-ended
}
