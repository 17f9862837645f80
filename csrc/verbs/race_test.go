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

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
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
	library, control := fakeverbs.Compile(t, dir, "-fsanitize=thread")
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
