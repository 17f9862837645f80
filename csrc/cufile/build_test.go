// SPDX-License-Identifier: Apache-2.0

package cufile

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// compile builds a C file and fails the test with the compiler's words.
func compile(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("gcc %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// library builds a library from C.
func library(t *testing.T, text string) string {
	t.Helper()
	dir := t.TempDir()
	source, object := filepath.Join(dir, "fake.c"), filepath.Join(dir, "libcufile-fake.so.0")
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
