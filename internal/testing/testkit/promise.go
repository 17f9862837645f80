// SPDX-License-Identifier: Apache-2.0

package testkit

import "testing"

// BrokenPromise begins every message of FatalBroken and ErrorBroken, which tell a broken promise
// apart from a test that was late. A test whose output has it is never tried again:
// a busy machine delays a test, but it does not make a byte land behind an Abort.
const BrokenPromise = "BROKEN PROMISE: "

// FatalBroken fails the test and ends it. Call it where bytes landed that must not, an outcome
// changed, or something was left behind.
func FatalBroken(t testing.TB, format string, args ...any) {
	t.Helper()
	t.Fatalf(BrokenPromise+format, args...)
}

// ErrorBroken fails the test, which goes on.
func ErrorBroken(t testing.TB, format string, args ...any) {
	t.Helper()
	t.Errorf(BrokenPromise+format, args...)
}
