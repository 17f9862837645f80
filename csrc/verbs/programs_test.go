// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// Go's race detector does not see into C: the thread sanitizer of the C compiler does.
func TestVerbsHasNoRaces(t *testing.T) {
	dir := t.TempDir()
	exe := filepath.Join(dir, "race")
	sources := sourceFiles(t)
	args := append([]string{"-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-I.",
		"-Itestdata/fakeverbs", "-o", exe,
		"testdata/race.c"}, sources...)
	if out, err := exec.Command("gcc", append(args, "-ldl", "-lpthread")...).
		CombinedOutput(); err != nil {
		if strings.Contains(string(out), "tsan") {
			drivertest.SkipIfUnavailable(t, &driver.UnavailableError{
				Backend: "rdma", Reason: "gcc has no thread sanitizer here",
				Fix: "apt-get install libtsan2"})
		}
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	library, control := standin.CompileVerbs(t, dir, "-fsanitize=thread")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, exe, library, control).CombinedOutput()
	if strings.Contains(string(out), "unexpected memory mapping") {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{
			Backend: "rdma", Reason: "the thread sanitizer does not run on this kernel",
			Fix: "sysctl vm.mmap_rnd_bits=28"})
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}

// runOverStandIn builds a program of testdata with the data plane, and runs it over the stand-in.
func runOverStandIn(t *testing.T, name string, flags ...string) {
	t.Helper()
	dir := t.TempDir()
	exe := filepath.Join(dir, name)
	args := append([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I.",
		"-Itestdata/fakeverbs", "-o", exe, "testdata/" + name + ".c"}, flags...)
	standin.Compile(t, append(append(args, sourceFiles(t)...), "-ldl", "-lpthread")...)
	library, control := standin.CompileVerbs(t, dir)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, exe, library, control).CombinedOutput()
	require.NoErrorf(t, err, "%s", out)
}

// TestRoomForMarkAndProbe has queue pairs fail and begin while the list of built requests is full.
func TestRoomForMarkAndProbe(t *testing.T) { runOverStandIn(t, "room") }

// TestTime moves the clock of the data plane: a standstill of our own process is no silence of a
// device.
func TestTime(t *testing.T) { runOverStandIn(t, "time", "-Wl,--wrap=sl_verbs_now") }

// sourceFiles are the files of the data plane for verbs.
func sourceFiles(t testing.TB) []string {
	t.Helper()
	sources, err := filepath.Glob("*.c")
	if err != nil || len(sources) == 0 {
		t.Fatalf("no sources: %v", err)
	}
	return sources
}
