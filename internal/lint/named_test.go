// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	aTest  = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	aCheck = regexp.MustCompile(`\{"(\w+)", (?:anyWiring|twoBackends|oneProcess|Processes), `)
	// named is a test that a text names, "…" or ".*" behind the beginning of several.
	named = regexp.MustCompile(`\b(Test[A-Z]\w*)(…|\.\*)?`)
	// word is what a cell of the table of proofs says: a tier, a package, the suite, or a test
	// without the first part of its name.
	word = regexp.MustCompile("(timed|soak)[:,] |`([a-z/]+)`|\\b(suite)\\b|([A-Z][a-z]\\w*)(…)?")
)

// known are the tests of each package of the module; those of driver are the suite's checks.
func known(t *testing.T) map[string][]string {
	t.Helper()
	files, _, err := Read(root(t))
	require.NoError(t, err)
	all := map[string][]string{}
	for _, f := range files {
		pattern, dir, prefix := aTest, f.dir(), ""
		if f.dir() == suite && !f.isTest() {
			pattern, dir, prefix = aCheck, "suite", "Test"
		}
		for _, m := range pattern.FindAllStringSubmatch(f.Text, -1) {
			all[dir] = append(all[dir], prefix+m[1])
			all[""] = append(all[""], prefix+m[1])
		}
	}
	return all
}

// has reports whether there is a test of that name, or of that beginning.
func has(tests []string, name string, several bool) bool {
	return slices.ContainsFunc(tests, func(test string) bool {
		return test == name || several && strings.HasPrefix(test, name)
	})
}

// TestNamedTestsExist looks for what documents, scripts and the Makefile call a test.
func TestNamedTestsExist(t *testing.T) {
	all := known(t)[""]
	for _, pattern := range []string{"*.md", "*/*.md", "Makefile", "hack/*", "hack/guest/*"} {
		names, err := filepath.Glob(filepath.Join(root(t), pattern))
		require.NoError(t, err)
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil || path.Ext(name) == ".go" {
				continue // a folder
			}
			for _, m := range named.FindAllStringSubmatch(string(text), -1) {
				tier := slices.Contains([]string{"TestTimed", "TestSoak", "TestReal",
					"TestSoakReal"}, m[1])
				if !tier && !has(all, m[1], m[2] != "") {
					t.Errorf("%s: there is no %s", name, m[0])
				}
			}
		}
	}
}

// TestProofsAreOfTheTierThatTheyAreSaidToBe reads the last table of docs/promises.md.
func TestProofsAreOfTheTierThatTheyAreSaidToBe(t *testing.T) {
	all := known(t)
	text, err := os.ReadFile(filepath.Join(root(t), "docs", "promises.md"))
	require.NoError(t, err)
	found := 0
	for row := range strings.Lines(string(text)) {
		cells := strings.Split(row, " | ")
		if len(cells) != 4 || cells[1] == "model" {
			continue
		}
		for i, cell := range cells[2:] {
			tier, in := "Test", ""
			for _, m := range word.FindAllStringSubmatch(cell, -1) {
				switch {
				case m[1] == "timed":
					tier, in = "TestTimed", ""
				case m[1] == "soak":
					tier, in = "TestSoak", ""
				case m[2] != "":
					in = m[2]
				case m[3] != "":
					in = "suite"
				default:
					found++
					checks := in == "suite" || tier == "TestSoak" // which runs them for longer
					if i == 1 && tier == "Test" || !has(all[in], tier+m[4], m[5] != "") &&
						!(checks && has(all["suite"], "Test"+m[4], m[5] != "")) {
						t.Errorf("%s: there is no %s%s in %q", cells[0], tier, m[4], in)
					}
				}
			}
		}
	}
	require.Greater(t, found, 100, "the table is not where it was")
}
