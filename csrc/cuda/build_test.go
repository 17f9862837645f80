// SPDX-License-Identifier: Apache-2.0

package cuda

import (
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
	source, object := filepath.Join(dir, "fake.c"), filepath.Join(dir, "libcuda-fake.so.1")
	if err := os.WriteFile(source, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	compile(t, "-shared", "-fPIC", "-o", object, source)
	return object
}
