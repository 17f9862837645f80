// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const head = "// " + spdx + "\n\n"

// good is a file that no rule minds.
const good = head + "// Package p does it.\npackage p\n"

// imports returns a file of package p that imports names.
func imports(names ...string) string {
	text := good
	for _, name := range names {
		text += "import _ \"" + name + "\"\n"
	}
	return text
}

func local(name string) string { return imports(module + "/" + name) }

func body(statement string) string { return good + "func f() {\n" + statement + "\n}\n" }

var cases = []struct {
	name, path, text string
	want             string // in the only message; "" for none
}{
	{"clean", "engine/a.go", good, ""},

	{"no licence", "engine/a.go", "// Package p does it.\npackage p\n", "no licence"},
	{"licence too late", "csrc/a.c", "#include <stdio.h>\n// " + spdx + "\n", "no licence"},
	{"licence in a header", "csrc/a.h", head, ""},
	{"licence as C likes it", "csrc/a.h", "/* " + spdx + " */\n", ""},
	{"licence as Go dislikes it", "engine/a.go", "/* " + spdx + " */\n\n// Package p does " +
		"it.\npackage p\n", "no licence"},
	{"script with an interpreter", "run.sh", "#!/bin/sh\n# " + spdx + "\n", ""},
	{"script without a licence", "run.sh", "#!/bin/sh\ntrue\n", "no licence"},
	{"kernel without a licence", "cuda/a.cu", "\n", "no licence"},

	{"long line", "engine/a.go", good + "// " + strings.Repeat("x", 98) + "\n", "101 columns"},
	{"line of 100 columns", "engine/a.go", good + "//" + strings.Repeat("é", 98) + "\n", ""},
	{"tabs", "csrc/a.c", head + strings.Repeat("\t", 13) + "\n", "104 columns"},
	{"long line of a raw string", "engine/a.go",
		body("_ = `\n" + strings.Repeat("x", 200) + "`"), ""},
	{"long directive", "engine/a.go", good + "//go:generate " + strings.Repeat("x", 100) + "\n",
		""},
	{"long line of a script", "run.sh", "# " + spdx + "\n# " + strings.Repeat("x", 100) + "\n",
		""},
	{"long line of a document", "README.md", strings.Repeat("x", 101) + "\n", "break the line"},
	{"long table, link and command", "README.md", "| " + strings.Repeat("x", 101) + "\n[a](" +
		strings.Repeat("x", 101) + ")\n```\n" + strings.Repeat("x", 101) + "\n```\n", ""},

	{"cgo in a backend", "backends/shm/a.go", imports("C"), "call a function of csrc"},
	{"cgo in csrc", "csrc/a.go", imports("C"), ""},
	{"engine knows a backend", "engine/a.go", local("backends/mem"), "the contract alone"},
	{"engine knows csrc", "engine/a.go", local("csrc"), "the contract alone"},
	{"engine knows the contract", "engine/a.go", local("driver"), ""},
	{"engine's test knows a backend", "engine/a_test.go", local("backends/mem"), ""},
	{"part of engine knows engine", "engine/route/a.go", local("engine"), ""},
	{"backend knows engine", "backends/shm/a.go", local("engine"), "knows nothing of it"},
	{"backend knows kv", "backends/shm/a.go", local("kv/layout"), "knows nothing of it"},
	{"backend knows cmd", "backends/shm/a.go", local("cmd/sluice"), "knows nothing of it"},
	{"backend knows bench", "backends/shm/a.go", local("bench"), "knows nothing of it"},
	{"backend knows csrc", "backends/shm/a.go", local("csrc"), ""},
	{"backend wraps a backend", "backends/fault/a.go", local("backends/mem"), ""},
	{"kv knows a backend", "kv/trace/a.go", local("backends/shm"), "built on package engine"},
	{"kv knows bench", "kv/trace/a.go", local("bench"), "built on package engine"},
	{"kv knows cmd", "kv/trace/a.go", local("cmd/sluice"), "built on package engine"},
	{"kv knows engine", "kv/trace/a.go", local("engine"), ""},
	{"kv knows csrc", "kv/handoff/a.go", local("csrc/copy"), "by package engine"},
	{"kv makes digests", "kv/layout/a.go", local("csrc/digest"), ""},
	{"kv looks entries up", "kv/sparse/a.go", local("csrc/sparse"), ""},
	{"kv knows S3", "kv/cache/a.go", local("kv/tier/object/s3"), "take an object.Bucket"},
	{"cmd knows S3", "cmd/sluice/a.go", local("kv/tier/object/s3"), ""},
	{"csrc knows engine", "csrc/a.go", local("engine"), "serves backends"},
	{"internal knows engine", "internal/proc/a.go", local("engine"), "below everything"},
	{"internal knows internal", "internal/testing/testkit/a.go", local("internal/hostmem"), ""},
	{"bench knows cmd", "bench/a.go", local("cmd/sluice"), "not the reverse"},
	{"library knows testkit", "kv/trace/a.go", local("internal/testing/testkit"), "for tests"},
	{"suite knows testkit", "driver/drivertest/a.go", local("internal/testing/testkit"), ""},
	{"suite knows engine", "driver/drivertest/a.go", local("engine"), "knows nothing of it"},
	{"contract imports a module", "driver/a.go", imports("golang.org/x/sys/unix"),
		"standard library alone"},
	{"contract imports this module", "driver/a.go", local("internal/proc"),
		"standard library alone"},
	{"contract imports time", "driver/a.go", imports("time"), ""},
	{"similar name", "engine/a.go", imports("example.com/sluice/csrc"), ""},

	{"cobra in a library", "kv/trace/a.go", imports("github.com/spf13/cobra"), "business of cmd"},
	{"cobra in cmd", "cmd/sluice/a.go", imports("github.com/spf13/cobra"), ""},
	{"testify in a backend", "backends/shm/a_test.go",
		imports("github.com/stretchr/testify/require"), ""},
	{"testify outside tests", "kv/trace/a.go", imports("github.com/stretchr/testify/require"),
		"return values and errors"},
	{"testify in kv", "kv/trace/a_test.go", imports("github.com/stretchr/testify/require"), ""},

	{"skip", "engine/a_test.go", body(`t.Skip("later")`), "SkipIfUnavailable"},
	{"skip in a helper", "driver/drivertest/a.go", body(`tb.Skipf("later")`), "SkipIfUnavailable"},
	{"the helper", "driver/drivertest/a.go", good + "// SkipIfUnavailable does.\nfunc " +
		"SkipIfUnavailable() { t.Skip(err) }\n", ""},
	{"the helper elsewhere", "kv/a.go", good + "// SkipIfUnavailable does.\nfunc " +
		"SkipIfUnavailable() { t.Skip(err) }\n", "make the test run"},
	{"another Skip", "engine/a.go", body(`scanner.Skip()`), ""},

	{"stopped process in the gate", "engine/a_test.go", good +
		"func TestA() { testkit.Freeze(p) }\n", "call it TestTimed"},
	{"stopped process", "engine/a_test.go", good +
		"func TestTimedA() { testkit.Freeze(p) }\nfunc TestSoakA() {}\nfunc TestMain() {}\n", ""},
}

func TestRules(t *testing.T) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f, err := NewFile(c.path, c.text)
			require.NoError(t, err)
			found := Check([]*File{f})
			switch {
			case c.want == "" && len(found) > 0:
				t.Errorf("%v, want nothing", found)
			case c.want != "" && len(found) != 1:
				t.Errorf("%d findings, want one: %v", len(found), found)
			case c.want != "" && !strings.Contains(found[0].String(), c.want):
				t.Errorf("%v, want it to say %q", found[0], c.want)
			}
		})
	}
}

func TestReadSkipsFixturesAndReportsBrokenFiles(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"engine/a.go":          good,
		"engine/broken.go":     "package",
		"engine/testdata/b.go": "package",
		".git/c.go":            "package",
		"build/d.go":           "package",
		"engine/data.bin":      "x",
		"Makefile":             "all:\n",
	} {
		name = filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
	}
	files, broken, err := Read(dir)
	require.NoError(t, err)
	if len(files) != 2 || len(broken) != 1 || broken[0].Path != "engine/broken.go" {
		t.Errorf("%d files, broken: %v", len(files), broken)
	}
}
