// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package csrc

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// verbsSources are the files of the data plane for verbs.
func verbsSources(t testing.TB) []string {
	t.Helper()
	sources, err := filepath.Glob("verbs_*.c")
	if err != nil || len(sources) == 0 {
		t.Fatalf("no sources: %v", err)
	}
	return append(sources, "pieces.c")
}

// verbsCost builds testdata/verbs_cost.c.
func verbsCost(t testing.TB) string {
	t.Helper()
	sources := verbsSources(t)
	binary := filepath.Join(t.TempDir(), "cost")
	args := append([]string{"-O2", "-g", "-Wall", "-Wextra", "-Werror", "-I.", "-o", binary, "testdata/verbs_cost.c"}, sources...)
	if out, err := exec.Command("gcc", append(args, "-ldl", "-lpthread")...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	return binary
}

// TestVerbsCost sees to it that the measurement runs, and that it counts as it should.
func TestVerbsCost(t *testing.T) {
	out, err := exec.Command(verbsCost(t), "2", "250").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"write/8/rails=2", "64.00 requests/op", "69.00 requests/op"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// BenchmarkVerbsCost prints what our own code costs a batch, over one rail and over eight.
func BenchmarkVerbsCost(b *testing.B) {
	binary := verbsCost(b)
	for _, rails := range []string{"1", "8"} {
		c := exec.Command(binary, rails)
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		if err := c.Run(); err != nil {
			b.Fatal(err)
		}
	}
}
