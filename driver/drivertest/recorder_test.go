// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"time"
)

// failures performs one check over one wiring, and returns what it found instead of failing tb. No
// wait is longer than limit.
func failures(tb testing.TB, h Harness, w Wiring, name string, limit time.Duration) []string {
	tb.Helper()
	h.limit, h.awaitLate = limit, settled
	i := slices.IndexFunc(checks, func(c check) bool { return c.name == name })
	if i < 0 || checks[i].wirings&w == 0 {
		tb.Fatalf("no check over %v is called %q", wiringNames[w], name)
	}
	r := &recorder{TB: tb}
	r.guarded(func() { checks[i].perform(r, h.withDefaults(), w) })
	for n := len(r.cleanups); n > 0; n = len(r.cleanups) {
		last := r.cleanups[n-1]
		r.cleanups = r.cleanups[:n-1]
		r.guarded(last)
	}
	return r.failures
}

// recorder is a testing.TB that keeps failures instead of reporting them.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	failures []string
	cleanups []func()
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
