// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
)

// benchKeys are what programs that read --json rely on: keys are only added.
var benchKeys = []string{"backend", "op", "size", "batch", "pages", "threads", "gbps", "ops_per_s",
	"p50_us", "p99_us",
	"allocs_per_op", "baseline", "ratio", "baselines", "rounds", "ops", "route", "spread", "hot",
	"memory", "gather"}

func TestBenchJSON(t *testing.T) {
	cases := []struct {
		name      string
		args      []string
		baselines int
	}{
		{"write between processes", []string{"--backend", "shm", "--size", "64KiB", "--batch", "4"},
			3},
		{"read between processes", []string{"--backend", "shm", "--op", "read", "--size", "4096",
			"--batch", "2", "--threads", "2"}, 3},
		{"pages", []string{"--backend", "shm", "--size", "656", "--batch", "64", "--pages",
			"--spread", "4MiB"}, 3},
		{"automatic choice", []string{"--backend", "auto", "--size", "1MiB", "--batch", "2"}, 3},
		{"host memory", []string{"--backend", "shm", "--memory", "host", "--size", "4096",
			"--batch", "2"}, 3},
		{"within a process", []string{"--backend", "mem", "--size", "1", "--batch", "1"}, 2},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			o := sluice(t, append([]string{"bench", "--rounds", "2", "--seconds", "0.002",
				"--json"}, tc.args...)...)
			if o.status != 0 || o.stderr != "" {
				t.Fatalf("%+v", o)
			}
			list := decode(t, o.stdout).([]any)
			if len(list) != 1 {
				t.Fatalf("%d results", len(list))
			}
			wantKeys(t, "result", list[0], benchKeys...)
			r := list[0].(map[string]any)
			wantKeys(t, "baseline", r["baseline"], "name", "gbps", "p50_us")
			if r["baseline"].(map[string]any)["name"] != "memcpy" ||
				len(r["baselines"].([]any)) != tc.baselines {
				t.Errorf("baselines %v", r["baselines"])
			}
			gbps, ratio := r["gbps"].(float64), r["ratio"].(float64)
			if want := gbps / r["baseline"].(map[string]any)["gbps"].(float64); gbps <= 0 ||
				ratio != want {
				t.Errorf("gbps %v, ratio %v, want %v", gbps, ratio, want)
			}
			if r["memory"] != "host" {
				t.Errorf("memory %v, and no backend here has its own", r["memory"])
			}
			routes := []string{tc.args[1]}
			if tc.args[1] == "auto" {
				// what was measured decides, and others may use the machine
				routes = []string{"shm", "ucx"}
			}
			if route, _ := r["route"].(string); !slices.Contains(routes, route) {
				t.Errorf("route %v, want one of %q", r["route"], routes)
			}
		})
	}
}

func TestBenchSweepAsGoBench(t *testing.T) {
	o := sluice(t, "bench", "--backend", "mem", "--sweep", "--rounds", "1", "--seconds",
		"0.001", "--format", "gobench")
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	if n := strings.Count(o.stdout, "/by=mem-1 "); n != 10 {
		t.Errorf("%d sizes, want 10:\n%s", n, o.stdout)
	}
	if n := strings.Count(o.stdout, "/by=memcpy-1 "); n != 10 {
		t.Errorf("%d baselines, want 10", n)
	}
}

func TestBenchThatDoesNotFit(t *testing.T) {
	shapes := []bench.Shape{{Size: 64, Batch: 1, Threads: 1}, {Size: 1 << 20, Batch: 16,
		Threads: 2}}
	const need = 3 * 2 * 32 << 20
	err := fits(shapes, need-1, false, "--x")
	require.ErrorContains(t, err, "192 MiB")
	require.ErrorContains(t, err, ": use --x")
	for want, f := range map[string]benchFlags{"a smaller --spread": {table: true},
		"fewer --threads": {sweep: true}, "a smaller --spread, or fewer --threads": {sweep: true,
			pages: true}, "a smaller --size or --batch, or fewer --threads": {}} {
		require.Equal(t, want, f.smaller())
	}
	for _, available := range []uint64{need, 0} { // 0: the kernel does not say
		if err := fits(shapes, available, false, "--x"); err != nil {
			t.Errorf("%d bytes available: %v", available, err)
		}
	}
}

func TestBenchNotify(t *testing.T) {
	o := sluice(t, "bench", "--backend", "shm", "--notify", "--rounds", "1", "--seconds", "0.01",
		"--json")
	if o.status != 0 {
		t.Fatalf("%+v", o)
	}
	list := decode(t, o.stdout).([]any)
	if len(list) != 2 {
		t.Fatalf("%d results", len(list))
	}
	for i, op := range []string{"notify", "pingpong"} {
		wantKeys(t, op, list[i], benchKeys...)
		r := list[i].(map[string]any)
		if r["op"] != op || r["p50_us"].(float64) <= 0 {
			t.Errorf("%s: %v", op, r)
		}
	}
}
