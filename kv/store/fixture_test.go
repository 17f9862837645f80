// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"reflect"
	"testing"
)

// What a test goes on only with. The words say what was tried.

func noError(tb testing.TB, err error, words ...any) {
	tb.Helper()
	if err != nil {
		tb.Fatal(append(words, err)...)
	}
}

func errorIs(tb testing.TB, err, want error, words ...any) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatal(append(words, "got", err, "want", want)...)
	}
}

func equal(tb testing.TB, want, got any, words ...any) {
	tb.Helper()
	if !reflect.DeepEqual(want, got) {
		tb.Fatal(append(words, "got", got, "want", want)...)
	}
}

func isTrue(tb testing.TB, ok bool, words ...any) {
	tb.Helper()
	if !ok {
		tb.Fatal(words...)
	}
}

func isFalse(tb testing.TB, ok bool, words ...any) {
	tb.Helper()
	isTrue(tb, !ok, words...)
}
