// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"bufio"
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const (
	testBytes = 4 << 20
	testKey   = 7
)

// fill writes bytes that depend on a seed.
func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// compile builds a C file and fails the test with the compiler's words.
func compile(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// buildLibrary builds a library from C.
func buildLibrary(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	source, object := filepath.Join(dir, "fake.c"), filepath.Join(dir, "libibverbs-fake.so.1")
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	compile(t, "-shared", "-fPIC", "-o", object, source)
	return object
}

// facts builds a file of facts and returns what it prints, by name.
func facts(t *testing.T, source string, args ...string) map[string]string {
	t.Helper()
	exe := filepath.Join(t.TempDir(), "facts")
	compile(t, append(args, "-Wall", "-Wextra", "-I.", "-o", exe, source)...)
	out, err := exec.Command(exe).Output()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), " = ")
		if !ok {
			name, value, _ = strings.Cut(lines.Text(), " at ")
		}
		all[name] = value
	}
	return all
}
