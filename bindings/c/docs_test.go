// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDocs runs the program that docs/c.md shows.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile("../../docs/c.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "```c\n")
	program, _, closed := strings.Cut(rest, "```\n")
	if !found || !closed {
		t.Fatal("docs/c.md has no program in C")
	}
	source := filepath.Join(t.TempDir(), "readme.c")
	require.NoError(t, os.WriteFile(source, []byte(program), 0o666))
	out, err := exec.Command(compile(t, source)).CombinedOutput()
	if err != nil || string(out) != "keys and values\n" {
		t.Errorf("%v: %q", err, out)
	}
}
