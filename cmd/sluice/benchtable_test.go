// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluicehq/sluice/bench"
	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

var quickTable = []string{"bench", "--backend", "shm", "--table", "--rounds", "1", "--seconds",
	"0.001", "--spread", "6MiB"}

// withoutPrograms runs a command that finds no programs.
func withoutPrograms(t *testing.T, args ...string) outcome {
	t.Helper()
	c, stdout, stderr := command(t, args...)
	c.Env = append(c.Env, "PATH=/nonexistent")
	return outcome{status(t, c.Run()), stdout.String(), withoutProgress(stderr)}
}

// TestBenchTable: a row for each shape, the bare loop beside it where there is UCX, and
// a word about the ucx_perftest that is missing.
func TestBenchTable(t *testing.T) {
	o := withoutPrograms(t, append(slices.Clone(quickTable), "--json")...)
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	var ops []string
	for _, v := range decode(t, o.stdout).([]any) {
		r := v.(map[string]any)
		op := fmt.Sprint(r["op"])
		ops = append(ops, op)
		if r["lane"] != "shm" || r["p50_us"].(float64) <= 0 {
			t.Errorf("%v", r)
		}
		if op != "write" && op != "read" && op != "pingpong" {
			continue
		}
		notes := fmt.Sprint(r["notes"])
		if !strings.Contains(notes, "ucx-utils") {
			t.Errorf("%s: notes %s do not say which package has ucx_perftest", op, notes)
		}
		loop := strings.Contains(fmt.Sprint(r["baselines"]), bench.LoopName)
		if missing := strings.Contains(o.stdout, bench.LoopName+
			" was not measured"); op != "pingpong" && loop == missing {
			t.Errorf("%s: bare loop %v, said to be missing %v", op, loop, missing)
		}
	}
	want := append(slices.Repeat([]string{"write", "read"}, 5), "write", "write", "pingpong",
		"register", "describe")
	if !slices.Equal(ops, want) {
		t.Errorf("rows %v, want %v", ops, want)
	}
}

func TestSoakBenchTableBesidePerfTest(t *testing.T) {
	needPerfTest(t)
	o := sluice(t, append(slices.Clone(quickTable), "--format", "gobench")...)
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	wants := []string{"/lane=shm/size=656/batch=2048/by=ucx-loop-1 ", " ratio-ucx-loop"}
	if !ucp.Native {
		wants = []string{bench.LoopName + " was not measured"}
	} else if strings.Contains(o.stdout, "was not measured") {
		t.Errorf("something was not measured:\n%s", o.stdout)
	}
	for _, want := range append(wants,
		"BenchmarkWrite/hot/lane=shm/size=65536/batch=32/by=shm-1 ",
		"BenchmarkRead/hot/lane=shm/size=16777216/batch=1/by=ucx_perftest-1 ",
		"BenchmarkWrite/pages/spread=2686976/lane=shm/size=656/batch=2048/by=ucx_perftest-1 ",
		"/by=ucx_perftest-am_lat-1 ", " desc-bytes",
	) {
		if !strings.Contains(o.stdout, want) {
			t.Errorf("no %q in:\n%s", want, o.stdout)
		}
	}
}

func needPerfTest(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("ucx_perftest")
	if err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "ucx_perftest",
			Reason: err.Error(), Fix: "apt-get install ucx-utils"})
	}
	return path
}

// TestInterruptedTableLeavesNothing: Ctrl-C while ucx_perftest runs.
func TestInterruptedTableLeavesNothing(t *testing.T) {
	needPerfTest(t)
	c, _, stderr := command(t, "bench", "--backend", "shm", "--table", "--rounds", "3", "--seconds",
		"30", "--spread", "6MiB")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var children []int
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		children = childrenOf(c.Process.Pid)
		if slices.ContainsFunc(children, isPerfTest) {
			break
		}
		if time.Since(start) > 2*time.Minute {
			t.Fatalf("no ucx_perftest among %v: %s", children, stderr)
		}
	}
	if err := c.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if got := status(t, c.Wait()); got != statusInterrupted {
		t.Errorf("status %d: %s", got, stderr)
	}
	wantGone(t, children)
}

func isPerfTest(pid int) bool {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.HasPrefix(string(name), "ucx_perftest")
}
