// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write testdata/layout.txt anew, after "+
	"SLUICE_ABI_VERSION was raised or something was appended")

// TestLayout compares what a compiler makes of sluice.h with the committed list, which is what
// programs were built with, and with what Go reads.
func TestLayout(t *testing.T) {
	const list = "testdata/layout.txt"
	now := layoutOf(t, "gcc", "-std=c11")
	if _, err := exec.LookPath("g++"); err == nil {
		if cpp := layoutOf(t, "g++", "-std=c++17", "-x", "c++"); cpp != now {
			t.Errorf("C++ sees another layout:\n%s", cpp)
		}
	}
	b, err := os.ReadFile(list)
	require.NoError(t, err)
	if was := string(b); was != now && *update {
		if err := checkUpdate(was, now); err != "" {
			t.Fatal(err)
		}
		require.NoError(t, os.WriteFile(list, []byte(now), 0o666))
	} else if was != now {
		t.Errorf("the layout has changed, and programs that are built would break:%s\nundo it, "+
			"or raise SLUICE_ABI_VERSION and run with -update", changes(was, now))
	}
	for name, want := range goLayout() {
		if !strings.Contains("\n"+now, "\n"+name+" "+want+"\n") {
			t.Errorf("Go has %s at %q, C has not", name, want)
		}
	}
}

// layoutOf is what the program says about the header.
func layoutOf(t *testing.T, compiler string, flags ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "layout")
	require.NoError(t, command(compiler, append(flags, "-Wall", "-Werror", "-I.", "-o", program,
		"testdata/layout.c")...))
	out, err := exec.Command(program).Output()
	require.NoError(t, err)
	return string(out)
}

// checkUpdate refuses a list that breaks programs under the version that they were built with.
func checkUpdate(was, now string) string {
	version, _, _ := strings.Cut(now, "\n")
	if !strings.HasPrefix(was, version+"\n") {
		return ""
	}
	for line := range strings.Lines(was) {
		name, _, _ := strings.Cut(line, " ")
		// a struct may grow
		whole := !strings.Contains(name, ".") && !strings.HasPrefix(name, "SLUICE_")
		if !whole && !strings.Contains("\n"+now, "\n"+line) {
			return "raise SLUICE_ABI_VERSION: " + strings.TrimSpace(line) + " is not so any more"
		}
	}
	return ""
}

func changes(was, now string) string {
	var b strings.Builder
	for line := range strings.Lines(was) {
		if !strings.Contains("\n"+now, "\n"+line) {
			b.WriteString("\n- " + strings.TrimSpace(line))
		}
	}
	for line := range strings.Lines(now) {
		if !strings.Contains("\n"+was, "\n"+line) {
			b.WriteString("\n+ " + strings.TrimSpace(line))
		}
	}
	return b.String()
}

// TestLayoutRefused: the guard of -update itself.
func TestLayoutRefused(t *testing.T) {
	was := "SLUICE_ABI_VERSION 1\nsluice_desc 24\nsluice_desc.local 0 8\nSLUICE_READ 1\n"
	for name, c := range map[string]struct {
		now string
		ok  bool
	}{
		"appended": {"SLUICE_ABI_VERSION 1\nsluice_desc 32\nsluice_desc.local 0 " +
			"8\nsluice_desc.more 24 8\nSLUICE_READ 1\n", true},
		"moved": {"SLUICE_ABI_VERSION 1\nsluice_desc 24\nsluice_desc.local 8 " +
			"8\nSLUICE_READ 1\n", false},
		"other value": {"SLUICE_ABI_VERSION 1\nsluice_desc 24\nsluice_desc.local 0 " +
			"8\nSLUICE_READ 2\n", false},
		"new version": {"SLUICE_ABI_VERSION 2\nsluice_desc 24\nsluice_desc.local 8 " +
			"8\nSLUICE_READ 1\n", true},
	} {
		if got := checkUpdate(was, c.now); (got == "") != c.ok {
			t.Errorf("%s: %q", name, got)
		}
	}
}
