// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/standin"
)

// TestRepository checks this module.
func TestRepository(t *testing.T) {
	files, found, err := Read(root(t))
	require.NoError(t, err)
	if len(files) < 10 {
		t.Fatalf("found %d files only: the search for the module is broken", len(files))
	}
	for _, finding := range append(found, Check(files)...) {
		t.Error(finding)
	}
}

// TestPromisesNameEachBackend: each table of docs/promises.md has a row for it.
func TestPromisesNameEachBackend(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root(t), "docs", "promises.md"))
	require.NoError(t, err)
	folders, err := os.ReadDir(filepath.Join(root(t), "backends"))
	require.NoError(t, err)
	names := []string{"staged"}
	for _, f := range folders {
		// fault wraps the others, byname opens them
		if f.IsDir() && f.Name() != "fault" && f.Name() != "byname" {
			names = append(names, f.Name())
		}
	}
	tables := strings.Split(string(text), "\n|---")
	if len(tables) != 6 {
		t.Fatalf("%d tables, want 5", len(tables)-1)
	}
	for i, table := range tables[1:] {
		for _, name := range names {
			if !regexp.MustCompile(`(?m)^\|[^|]*\b` + name + `\b`).MatchString(table) {
				t.Errorf("table %d has no row for %s", i+1, name)
			}
		}
	}
}

// root returns the folder of go.mod.
func root(t *testing.T) string {
	t.Helper()
	dir, err := standin.Root()
	require.NoError(t, err)
	return dir
}
