// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

func TestBenchGatherJSON(t *testing.T) {
	for _, args := range [][]string{{}, {"--op", "scatter", "--threads", "2"},
		{"--device", "cpu", "--size", "132"}} {
		o := sluice(t, append([]string{"bench", "gather", "--rounds", "2", "--spread", "6MiB",
			"--json"}, args...)...)
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
		if r["backend"] != "cpu" || r["op"] != op || baseline["name"] != "memcpy" || gbps <= 0 ||
			ratio != gbps/baseline["gbps"].(float64) {
			t.Errorf("%v", r)
		}
	}
}

func TestBenchGatherFormats(t *testing.T) {
	for format, wants := range map[string][]string{
		"text": {"gather pages of 6 MiB", "656B", "memcpy-huge"},
		"gobench": {"BenchmarkGather/pages/spread=6291040/size=656/batch=2048/by=cpu-1 ",
			"/by=memcpy-1 ", " ratio"},
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
	o := sluice(t, "bench", "gather", "--device", "cuda", "--spread", "6MiB", "--library",
		"/nonexistent/libcuda.so.1")
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
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "cuda",
			Reason: "built without cgo", Fix: "CGO_ENABLED=1"})
	}
	libcuda, err := standInCUDA()
	require.NoError(t, err)
	library := libcuda.Path
	saved := filepath.Join(t.TempDir(), "gather.json")
	for _, c := range []struct {
		op, sms  string
		variants []string
	}{
		{"gather", "2", []string{"async", "rows", "staged", "loop"}},
		{"scatter", "2", []string{"async", "rows", "staged", "loop"}},
		{"gather", "0", []string{"staged", "loop"}},
	} {
		o := sluice(t, "bench", "gather", "--device", "cuda", "--library", library, "--op", c.op,
			"--sms", c.sms, "--neighbour", "1",
			"--rounds", "1", "--seconds", "0.01", "--spread", "6MiB", "--batch", "512", "--save",
			saved, "--json")
		if o.status != 0 || o.stderr != "" {
			t.Fatalf("%+v", o)
		}
		if text, err := os.ReadFile(saved); err != nil || string(text) != o.stdout {
			t.Errorf("saved %q, %v, printed %q", text, err, o.stdout)
		}
		checkOnDevice(t, decode(t, o.stdout).([]any), c.op, c.sms, c.variants)
	}
	o := sluice(t, "bench", "gather", "--device", "cuda", "--library", library, "--neighbour", "0",
		"--in-flight", "64KiB",
		"--rounds", "1", "--spread", "6MiB", "--batch", "100")
	if o.status != 0 || !strings.Contains(o.stdout, "stand-in") ||
		strings.Contains(o.stdout, "step-p99") {
		t.Errorf("%+v", o)
	}
	if o := sluice(t, "bench", "gather", "--device", "cuda", "--library", library, "--spread",
		"6MiB", "--batch", "10", "--size", "130"); o.status != statusUsage {
		t.Errorf("130 bytes: %+v", o)
	}
}

// checkOnDevice looks at the batch and 200 entries alone; 2,048 are more than the batch.
func checkOnDevice(t *testing.T, list []any, op, sms string, variants []string) {
	t.Helper()
	if len(list) != 2 {
		t.Fatalf("%d results", len(list))
	}
	for i, want := range [][]string{{"copy-engine", map[string]string{"gather": "copy-engine-d2h",
		"scatter": "copy-engine-h2d"}[op]}, {"copy-engine", "replay"}} {
		if sms == "0" && i == 1 {
			want = want[:1] // nothing to replay
		}
		r := list[i].(map[string]any)
		keys := append([]string{"notes"}, benchKeys...)
		if i == 0 || sms != "0" {
			keys = append(keys, "extra")
		}
		wantKeys(t, "result", r, keys...)
		var names []string
		for _, b := range r["baselines"].([]any) {
			names = append(names, b.(map[string]any)["name"].(string))
			if b.(map[string]any)["gbps"].(float64) <= 0 {
				t.Errorf("%v", b)
			}
		}
		if want := append(want, variants...); !slices.Equal(names, want) {
			t.Errorf("%s, row %d: beside %v, want %v", op, i, names, want)
		}
		// Figures of a stand-in are never called a card's.
		if r["op"] != op || r["backend"] != "stand-in" ||
			!slices.Contains(variants, r["route"].(string)) || r["gbps"].(float64) <= 0 ||
			!strings.Contains(fmt.Sprint(r["notes"]), "not of a card") {
			t.Errorf("%v", r)
		}
	}
	extra := list[0].(map[string]any)["extra"].(map[string]any)
	route := list[0].(map[string]any)["route"].(string)
	for _, unit := range []string{"t0-us", "step-p99-us-alone", "step-p99-us-beside-" + route,
		"step-p99-slower-percent-beside-" + route, "step-p99-us-beside-copy-engine"} {
		if _, there := extra[unit]; !there {
			t.Errorf("no %s in %v", unit, extra)
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
		{[]string{"--batch", "-1"}, "--batch -1"},
		{[]string{"--batch", "300000"}, "1 to 262144"},
		{[]string{"--threads", "65"}, "1 to 64"},
		{[]string{"--seconds", "0"}, "--seconds"},
		{[]string{"--rounds", "-1"}, "--rounds"},
		{[]string{"--format", "xml"}, "gobench"},
		{[]string{"--device", "cuda", "--sms", "-1"}, "--sms -1"},
		{[]string{"--device", "cuda", "--in-flight", "some"}, "KiB"},
		{[]string{"--device", "cuda", "--neighbour", "2000"}, "0 to 1024"},
		{[]string{"--in-flight", "64KiB"}, "--device cuda alone"},
		{[]string{"--device", "cuda", "--threads", "2"}, "one at a time"},
		{[]string{"--library", "x.so"}, "--device cuda alone"},
		{[]string{"now"}, `"now"`},
	} {
		o := sluice(t, append([]string{"bench", "gather"}, c.args...)...)
		if o.status != statusUsage || o.stdout != "" || !strings.Contains(o.stderr, c.want) ||
			!strings.Contains(o.stderr, "Usage: sluice bench gather") {
			t.Errorf("%v: %+v", c.args, o)
		}
	}
}
