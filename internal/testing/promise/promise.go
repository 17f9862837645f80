// SPDX-License-Identifier: Apache-2.0

// Package promise tells a broken promise apart from a test that was late.
package promise

import "testing"

// Mark begins every message of Broken and Breaks. A test whose output has it is never tried again:
// a busy machine delays a test, but it does not make a byte land behind an Abort.
const Mark = "BROKEN PROMISE: "

// Broken fails the test and ends it. Call it where bytes landed that must not, an outcome changed,
// or something was left behind.
func Broken(t testing.TB, format string, args ...any) {
	t.Helper()
	t.Fatalf(Mark+format, args...)
}

// Breaks fails the test, which goes on.
func Breaks(t testing.TB, format string, args ...any) {
	t.Helper()
	t.Errorf(Mark+format, args...)
}
