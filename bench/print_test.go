// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func sample() Result {
	r := Result{Backend: "shm", Op: "write", Size: 656, Batch: 2048, Pages: true, Spread: 1 << 30,
		Threads: 2,
		GBps:    8, OpsPerS: 6000, P50us: 160, P99us: 200, Rounds: 5, Ops: 30000, Route: "shm"}
	r.SetBaselines([]Baseline{{Name: "memcpy", GBps: 5, P50us: 260}, {Name: "process_vm_writev",
		GBps: 1}})
	return r
}

// TestJSONKeys is the interface that other programs read.
func TestJSONKeys(t *testing.T) {
	b, err := json.Marshal(sample())
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(b, &got))
	want := []string{"allocs_per_op", "backend", "baseline", "baselines", "batch", "gather", "gbps",
		"hot", "memory", "op", "ops", "ops_per_s",
		"p50_us", "p99_us", "pages", "ratio", "rounds", "route", "size", "spread", "threads"}
	if keys := slices.Sorted(maps.Keys(got)); !slices.Equal(keys, want) {
		t.Errorf("keys %v\nwant %v", keys, want)
	}
	baseline := got["baseline"].(map[string]any)
	if keys := slices.Sorted(maps.Keys(baseline)); !slices.Equal(keys,
		[]string{"gbps", "name", "p50_us"}) {
		t.Errorf("baseline keys %v", keys)
	}
	if got["ratio"] != 1.6 {
		t.Errorf("ratio = %v, want gbps over that of the first baseline", got["ratio"])
	}
}

func TestRatioWithoutBaseline(t *testing.T) {
	r := Result{GBps: 3}
	r.SetBaselines(nil)
	if r.Ratio != 0 {
		t.Errorf("ratio %v", r.Ratio)
	}
}

// benchLine is what golang.org/x/perf/benchfmt takes: a name, a count, then
// pairs of value and unit.
var benchLine = regexp.MustCompile(`^Benchmark[A-Z]\S*-\d+\s+\d+(\s+[0-9.]+ \S+)+$`)

func TestGoBenchFormat(t *testing.T) {
	var out strings.Builder
	require.NoError(t, GoBench(&out, []Result{sample()}))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 6 {
		t.Fatalf("want 3 lines of configuration and 3 of results:\n%s", out.String())
	}
	for _, line := range lines[3:] {
		if !benchLine.MatchString(line) {
			t.Errorf("not a benchmark line: %q", line)
		}
	}
	if !strings.HasPrefix(lines[3], "BenchmarkWrite/pages/size=656/batch=2048/by=shm-2 ") {
		t.Errorf("name: %q", lines[3])
	}
	if !strings.Contains(lines[3], " 8000.00 MB/s") {
		t.Errorf("rate: %q", lines[3])
	}
}

func TestTextHasARowForEachBaseline(t *testing.T) {
	var out strings.Builder
	require.NoError(t, Text(&out, []Result{sample(), {Backend: "mem", Op: "read"}}))
	if n := strings.Count(out.String(), "\n"); n != 4 {
		t.Errorf("%d lines, want a head and 3 rows:\n%s", n, out.String())
	}
	for _, want := range []string{"write pages", "process_vm_writev", "1.600", "8.000"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
}

// TestNamesTellShapesApart: what benchstat takes for one benchmark must be one.
func TestNamesTellShapesApart(t *testing.T) {
	pages := sample()
	small := pages
	small.Spread = 5 << 20
	hot := Result{Op: "write", Size: 64, Batch: 2, Threads: 1, Hot: true}
	lane := hot
	lane.Lane = "tcp"
	seen := map[string]bool{}
	for i, r := range []Result{pages, small, hot, lane, {Op: "write", Size: 64, Batch: 2,
		Threads: 1}} {
		name := goBenchName(&r, "shm")
		if seen[name] {
			t.Errorf("shape %d is called %s as another one is", i, name)
		}
		seen[name] = true
	}
}

func TestFiguresAndNotesArePrinted(t *testing.T) {
	r := sample()
	r.Extra = map[string]float64{"desc-bytes": 63724, "over-loop-ns/piece": -3.5}
	r.Notes = []string{"ucx_perftest was not measured: it is not there"}
	var text, lines strings.Builder
	require.NoError(t, Text(&text, []Result{r}))
	require.NoError(t, GoBench(&lines, []Result{r}))
	for out, wants := range map[string][]string{
		text.String(): {"63724 desc-bytes, -3.5 over-loop-ns/piece",
			"not measured: it is not there"},
		lines.String(): {" 63724.0 desc-bytes", " 8.000 ratio-process_vm_writev",
			"\n# Write/pages/"},
	} {
		for _, want := range wants {
			if !strings.Contains(out, want) {
				t.Errorf("no %q in:\n%s", want, out)
			}
		}
	}
}

func TestRatioOfTimes(t *testing.T) {
	r := Result{P50us: 2}
	if got := r.RatioTo(&Baseline{P50us: 3}); got != 1.5 {
		t.Errorf("ratio %v of times alone", got)
	}
}
