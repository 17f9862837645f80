// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

type word int

// source is a library without a call.
func source(t *testing.T, code string) Source[word] {
	t.Helper()
	file := filepath.Join(t.TempDir(), "empty.c")
	require.NoError(t, os.WriteFile(file, []byte(code), 0o600))
	return Source[word]{Name: "libempty", File: file, Words: []string{"delay", "pins", "copies"},
		Owner: "empty", First: 1, Last: 1}
}

func build(t *testing.T) *Library[word] {
	t.Helper()
	l, err := source(t, "int answer(void);\nint answer(void)\n{\n\treturn ANSWER;\n}\n").Build(
		"-DANSWER=42")
	require.NoError(t, err)
	t.Cleanup(l.Remove)
	return l
}

func TestSetIsSetBack(t *testing.T) {
	l := build(t)
	t.Run("set", func(t *testing.T) {
		l.Set(t, 0, 7)
		if l.Get(0) != 7 {
			t.Error("a word that was set is not there")
		}
	})
	if l.Get(0) != 0 {
		t.Errorf("%d: want what was before", l.Get(0))
	}
}

func TestInUse(t *testing.T) {
	l := build(t)
	l.Put(0, 1)
	l.Put(1, 3)
	l.Put(2, 4)
	if got, want := l.InUse(), map[string]uint64{"empty pins": 3}; !maps.Equal(got, want) {
		t.Errorf("in use %v, want %v", got, want)
	}
	if text, err := os.ReadFile(l.Panel); err != nil || len(text) != 12 || text[4]+text[7] != 3 {
		t.Errorf("the library would find %v, %v", text, err)
	}
}

func TestRemove(t *testing.T) {
	l := build(t)
	if _, err := os.Stat(l.Path); err != nil {
		t.Error(err)
	}
	l.Remove()
	if left, _ := os.ReadDir(l.dir); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

func TestWhatTheCompilerSays(t *testing.T) {
	_, err := source(t, "int answer(void) { return WRONG; }\n").Build()
	if err == nil || !strings.Contains(err.Error(), "stand-in of libempty") ||
		!strings.Contains(err.Error(), "WRONG") {
		t.Errorf("%v", err)
	}
}

func TestWordsOf(t *testing.T) {
	header := filepath.Join(t.TempDir(), "panel.h")
	text := "_Atomic unsigned before;\nstruct panel {\n\t_Atomic unsigned delay; /* a " +
		"*/\n\t_Atomic unsigned pins, copies;\n};\n_Atomic unsigned after;\n"
	require.NoError(t, os.WriteFile(header, []byte(text), 0o600))
	if got, err := WordsOf(header); err != nil ||
		!slices.Equal(got, []string{"delay", "pins", "copies"}) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := WordsOf(header + "x"); err == nil {
		t.Error("no header, and no error")
	}
}
