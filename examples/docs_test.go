// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestREADME runs the program that the README prints.
func TestREADME(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "```go\n")
	require.True(t, found, "the README has no program")
	program, _, closed := strings.Cut(rest, "```\n")
	require.True(t, closed)
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, []byte(program), 0o600))
	want(t, command(t, "go", "run", file), "layer 0: keys and values\n")
}
