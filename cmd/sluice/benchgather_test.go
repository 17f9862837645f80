// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
	"github.com/sluicehq/sluice/cuda"
)

func TestBenchGatherJSON(t *testing.T) {
	for _, args := range [][]string{{}, {"--op", "scatter", "--threads", "2"}, {"--device", "cpu", "--size", "132"}} {
		o := sluice(t, append([]string{"bench", "gather", "--rounds", "2", "--spread", "6MiB", "--json"}, args...)...)
		if o.status != 0 || o.stderr != "" {
			t.Fatalf("%+v", o)
		}
		list := decode(t, o.stdout).([]any)
		if len(list) != 1 {
			t.Fatalf("%d results", len(list))
		}
		r := list[0].(map[string]any)
		notes := r["notes"]
		delete(r, "notes")
		wantKeys(t, "result", r, benchKeys...)
		if !cuda.Native && notes == nil {
			t.Error("no word about the loop that stands for the twin")
		}
		op := "gather"
		if strings.Contains(strings.Join(args, " "), "scatter") {
			op = "scatter"
		}
		gbps, ratio := r["gbps"].(float64), r["ratio"].(float64)
		baseline := r["baseline"].(map[string]any)
		if r["backend"] != "cpu" || r["op"] != op || baseline["name"] != "memcpy" || gbps <= 0 || ratio != gbps/baseline["gbps"].(float64) {
			t.Errorf("%v", r)
		}
	}
}

func TestBenchGatherFormats(t *testing.T) {
	for format, wants := range map[string][]string{
		"text":    {"gather pages of 6 MiB", "656B", "memcpy-huge"},
		"gobench": {"BenchmarkGather/pages/spread=6291040/size=656/batch=2048/by=cpu-1 ", "/by=memcpy-1 ", " ratio"},
	} {
		o := sluice(t, "bench", "gather", "--rounds", "1", "--spread", "6MiB", "--format", format)
		if o.status != 0 || o.stderr != "" {
			t.Fatalf("%+v", o)
		}
		for _, want := range wants {
			if !strings.Contains(o.stdout, want) {
				t.Errorf("no %q in:\n%s", want, o.stdout)
			}
		}
	}
}

// TestBenchGatherWithoutACard names cause and cure.
func TestBenchGatherWithoutACard(t *testing.T) {
	o := sluice(t, "bench", "gather", "--device", "cuda", "--spread", "6MiB", "--library", "/nonexistent/libcuda.so.1")
	want := []string{"cuda backend unavailable", "/nonexistent/libcuda.so.1", "to mend"}
	if !cuda.Native {
		want = []string{"cuda backend unavailable", "cgo"}
	}
	for _, w := range want {
		if o.status != statusFailed || o.stdout != "" || !strings.Contains(o.stderr, w) {
			t.Errorf("no %q: %+v", w, o)
		}
	}
}

// TestBenchGatherOverTheStandIn goes the whole way of --device cuda, with a software stand-in
// of the driver in its place.
func TestBenchGatherOverTheStandIn(t *testing.T) {
	if !cuda.Native {
		backendtest.SkipIfUnavailable(t, &backends.UnavailableError{Backend: "cuda", Reason: "built without cgo", Fix: "CGO_ENABLED=1"})
	}
	library := filepath.Join(t.TempDir(), "libcuda-standin.so")
	build := exec.Command("gcc", "-std=c11", "-O2", "-Wno-unknown-pragmas", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", library,
		"../../cuda/testdata/libcuda_standin.c")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for op, kernel := range map[string]string{"gather": cuda.KernelBulk, "scatter": cuda.KernelBulk} {
		o := sluice(t, "bench", "gather", "--device", "cuda", "--library", library, "--op", op,
			"--rounds", "1", "--spread", "6MiB", "--batch", "512", "--json")
		if o.status != 0 || o.stderr != "" {
			t.Fatalf("%+v", o)
		}
		r := decode(t, o.stdout).([]any)[0].(map[string]any)
		wantKeys(t, "result", r, append([]string{"extra", "notes"}, benchKeys...)...)
		if r["op"] != op || r["backend"] != "cuda" || r["route"] != kernel || !strings.Contains(r["notes"].([]any)[0].(string), "stand-in") ||
			r["baseline"].(map[string]any)["name"] != "copy-engine" || len(r["baselines"].([]any)) != 2 {
			t.Errorf("%v", r)
		}
	}
}

func TestBenchGatherUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--device", "tpu"}, "there are cpu, cuda"},
		{[]string{"--op", "read"}, "there are gather, scatter"},
		{[]string{"--size", "130"}, "a multiple of 4"},
		{[]string{"--size", "5 apples"}, "KiB"},
		{[]string{"--spread", "99TiB"}, "spread"},
		{[]string{"--spread", "much"}, "KiB"},
		{[]string{"--batch", "0"}, "batch 0"},
		{[]string{"--threads", "65"}, "1 to 64"},
		{[]string{"--seconds", "0"}, "--seconds"},
		{[]string{"--rounds", "-1"}, "--rounds"},
		{[]string{"--format", "xml"}, "gobench"},
		{[]string{"--device", "cuda", "--sms", "0"}, "--sms 0"},
		{[]string{"--device", "cuda", "--threads", "2"}, "one at a time"},
		{[]string{"--library", "x.so"}, "--device cuda alone"},
		{[]string{"now"}, `"now"`},
	} {
		o := sluice(t, append([]string{"bench", "gather"}, c.args...)...)
		if o.status != statusUsage || o.stdout != "" || !strings.Contains(o.stderr, c.want) || !strings.Contains(o.stderr, "Usage: sluice bench gather") {
			t.Errorf("%v: %+v", c.args, o)
		}
	}
}
