// SPDX-License-Identifier: Apache-2.0

package examples

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// TestREADME runs the program that the README prints.
func TestREADME(t *testing.T) {
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, []byte(printed(t, "../README.md", "go")), 0o600))
	want(t, command(t, "go", "run", file), "layer 0: keys and values\n")
}

// TestHintEnvelope gives the envelope that docs/cache.md prints to a cache, which has none of its
// blocks.
func TestHintEnvelope(t *testing.T) {
	b, err := shm.New(shm.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "node", Backends: []driver.Backend{b}})
	require.NoError(t, err)
	defer e.Close()
	dir, err := os.MkdirTemp("/dev/shm", "kv")
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	c, err := cache.Open(t.Context(), cache.Config{Engine: e,
		Memory: cache.MemoryConfig{Path: filepath.Join(dir, "kv"), Bytes: 8 << 20}})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	space, err := c.Namespace("model", cache.NamespaceOptions{})
	require.NoError(t, err)
	outcomes, err := space.HintEnvelope([]byte(printed(t, "../docs/cache.md", "json")))
	require.NoError(t, err)
	require.Len(t, outcomes, 2)
	for _, o := range outcomes {
		require.Equal(t, cache.ActionApplied, o.Status, o.Reason)
		require.Equal(t, 2, o.Missing)
	}
}

// printed returns the first block of a language that a file has.
func printed(t *testing.T, file, language string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(text), "```"+language+"\n")
	require.True(t, found, "%s has no block of %s", file, language)
	block, _, closed := strings.Cut(rest, "```\n")
	require.True(t, closed)
	return block
}
