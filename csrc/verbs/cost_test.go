// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// sourceFiles are the files of the data plane for verbs.
func sourceFiles(t testing.TB) []string {
	t.Helper()
	sources, err := filepath.Glob("*.c")
	if err != nil || len(sources) == 0 {
		t.Fatalf("no sources: %v", err)
	}
	return sources
}

// costOf builds testdata/cost.c.
func costOf(t testing.TB) string {
	t.Helper()
	sources := sourceFiles(t)
	binary := filepath.Join(t.TempDir(), "cost")
	args := append([]string{"-O2", "-g", "-Wall", "-Wextra", "-Werror", "-I.", "-o", binary,
		"testdata/cost.c"}, sources...)
	if out, err := exec.Command("gcc", append(args, "-ldl", "-lpthread")...).
		CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	return binary
}

// TestCost sees to it that the measurement runs, and that it counts as it should.
func TestCost(t *testing.T) {
	out, err := exec.Command(costOf(t), "2", "250").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"write/8/rails=2", "64.00 requests/op", "69.00 requests/op"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// BenchmarkCost prints what our own code costs a batch, over one rail and over eight.
func BenchmarkCost(b *testing.B) {
	binary := costOf(b)
	for _, rails := range []string{"1", "8"} {
		c := exec.Command(binary, rails)
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		if err := c.Run(); err != nil {
			b.Fatal(err)
		}
	}
}
