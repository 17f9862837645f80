// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package hack

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// report is gpu-check.json.
type report struct {
	Card  string
	Steps []struct{ Name, Status string }
	Bench []struct {
		Name, Args string
		Report     bench.Report
	}
	GDS []struct {
		Mode   string
		Report bench.Report
	}
}

func read(t *testing.T, out string) (r report) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(out, "gpu-check.json"))
	require.NoError(t, err)
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return r
}

// TestGPUCheck goes the whole way of the script, with a software stand-in of the driver: built
// here, run in a folder without source, where tools of NVIDIA's may be missing and nothing else is.
// The tests that the script runs are left out, as they run in their own packages, too.
func TestGPUCheck(t *testing.T) {
	tests := []string{"tests", "digest", "gds-tests", "backend", "backend-processes"}
	gpuCheck(t, tests)
}

// TestSoakGPUCheck has the script run the tests.
func TestSoakGPUCheck(t *testing.T) {
	said := gpuCheck(t, []string{"backend-processes"})
	require.Contains(t, said, "--- PASS: TestSummerOnDeviceSumsAsTheCPU")
	require.Contains(t, said, "cpu-GB/s")
}

// gpuCheck skips some steps of the script, checks its report, and returns what the steps said.
func gpuCheck(t *testing.T, skipped []string) string {
	have(t, "gcc", "apt-get install gcc libc6-dev")
	have(t, "timeout", "apt-get install coreutils")
	dir, out := filepath.Join(t.TempDir(), "built"), filepath.Join(t.TempDir(), "out")
	library, err := standin.BuildCUDA()
	require.NoError(t, err)
	t.Cleanup(library.Remove)
	cufile, err := standin.BuildCuFile()
	require.NoError(t, err)
	t.Cleanup(cufile.Remove)
	script(t, 0, nil, "./gpu-check", "build", dir)

	env := []string{"SLUICE_LIBCUDA=" + library.Path, "GPU_CHECK_ARGS=--seconds 0.01 --size 656 " +
		"--batch 300 --pages --spread 4MiB",
		"GPU_CHECK_LIMIT=4600", "GPU_CHECK_SKIP=^(" + strings.Join(skipped, "|") + ")$",
		"SLUICE_LIBCUFILE=" + cufile.Path,
		"STANDIN_LIBCUDA=" + library.Path,
		"CUFILE_LOGFILE_PATH=" + filepath.Join(t.TempDir(), "cufile.log"),
		"GPU_CHECK_GDS=--size 64KiB --batch 4 --seconds 0.01 --dir " + t.TempDir()}
	t.Cleanup(func() {
		if text, err := os.ReadFile(filepath.Join(out, "gpu-check.txt")); t.Failed() && err == nil {
			t.Logf("what the steps said:\n%s", text)
		}
	})
	script(t, 0, env, filepath.Join(dir, "gpu-check"), "run", out)
	r := read(t, out)
	checkSteps(t, r, skipped)
	checkFigures(t, r)
	text, err := os.ReadFile(filepath.Join(out, "gpu-check.txt"))
	require.NoError(t, err)
	require.Contains(t, string(text), "software stand-in")
	if left, _ := filepath.Glob(filepath.Join(out, "step*")); left != nil {
		t.Errorf("left behind: %v", left)
	}

	// A machine without a driver, and no time: a failure that is told, and a report all the same.
	none := filepath.Join(t.TempDir(), "none")
	script(t, 1, []string{"SLUICE_LIBCUDA=/nonexistent.so", "SLUICE_LIBCUFILE=/nonexistent.so",
		"GPU_CHECK_LIMIT=0"}, filepath.Join(dir, "gpu-check"), "run", none)
	for _, s := range read(t, none).Steps {
		if s.Status != "no time left" && s.Status != "missing" {
			t.Errorf("%+v", s)
		}
	}
	return string(text)
}

func checkSteps(t *testing.T, r report, skipped []string) {
	t.Helper()
	steps := map[string]string{}
	for _, s := range r.Steps {
		steps[s.Name] = s.Status
	}
	for _, name := range skipped {
		require.Equal(t, "skipped", steps[name], name)
	}
	for _, name := range []string{"smoke", "tests", "digest", "gds-tests", "gds as-it-is",
		"gds compat"} {
		if steps[name] != "ok" && !slices.Contains(skipped, name) {
			t.Errorf("%s: %q", name, steps[name])
		}
	}
	for _, name := range []string{"card", "ptxas gather_sm80", "ptxas digest_sm80",
		"ptxas sparse_sm80", "memcheck", "backend"} {
		if steps[name] != "ok" && steps[name] != "missing" && !slices.Contains(skipped, name) {
			t.Errorf("%s: %q", name, steps[name])
		}
	}
}

// checkFigures: no figure of a stand-in is called a card's.
func checkFigures(t *testing.T, r report) {
	t.Helper()
	if len(r.Bench) != 8 || len(r.GDS) != 2 {
		t.Fatalf("%d and %d measurements, want 8 and 2", len(r.Bench), len(r.GDS))
	}
	rows := func(about string, report *bench.Report) {
		measured := 0
		for _, row := range report.Rows {
			if row.GBps > 0 {
				measured++
			}
		}
		if measured < 2 {
			t.Errorf("%s: %+v", about, report.Rows)
		}
		for _, known := range report.Peers {
			if !strings.Contains(known.Version+known.Settings, "stand-in") {
				t.Errorf("%s: %+v", about, known)
			}
		}
	}
	for _, b := range r.Bench {
		rows(b.Args, &b.Report)
	}
	for _, b := range r.GDS {
		rows(b.Mode, &b.Report)
	}
}

func TestGPUCheckUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"run"}, {"prepare", "x"}, {"run", "x", "y"}} {
		if out := script(t, 2, nil, "./gpu-check", args...); !strings.Contains(out,
			"gpu-check run OUT") {
			t.Errorf("%v: %s", args, out)
		}
	}
}
