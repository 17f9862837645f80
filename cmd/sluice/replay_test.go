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

	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// smallModel has the smallest blocks of all presets: 4.1 MB.
const smallModel = "deepseek-v3.2-indexer"

// smallTrace has requests of a few blocks with shared prefixes.
func smallTrace(t *testing.T, requests int) string {
	t.Helper()
	var b strings.Builder
	for i := range requests {
		n := 1 + i%4
		ids := []string{"0"}
		for j := 1; j < n; j++ {
			ids = append(ids, fmt.Sprint(100*(i/2)+j))
		}
		fmt.Fprintf(&b, `{"timestamp":%d,"input_length":%d,"output_length":1,"hash_ids":[%s]}`+"\n",
			40*i, 512*n, strings.Join(ids, ","))
	}
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(b.String()), 0o644))
	return file
}

// replayKeys are what programs that read --json rely on: keys are only added.
var replayKeys = []string{"model", "prefill", "decode", "prefill_ranks", "decode_ranks", "route",
	"threads", "layers", "model_layers", "pool_bytes", "requests_shortened", "requests", "finished",
	"aborted", "failed", "retried", "tokens", "bytes", "gbps", "memcpy_gbps", "ratio", "request_ms",
	"layer_us", "checked_bytes", "mismatches", "first_mismatches", "digests", "prefix_hits",
	"prefix_tokens", "blocks_watched", "blocks_used_again", "leaked", "faults", "killed",
	"slowest_end_ms", "unexpected", "seconds"}

func replayReport(t *testing.T, args ...string) map[string]any {
	t.Helper()
	o := sluice(t, append([]string{"replay", "--json", "--model", smallModel}, args...)...)
	wantStory(t, o)
	r := decode(t, o.stdout)
	wantKeys(t, "report", r, replayKeys...)
	return r.(map[string]any)
}

// wantStory wants a replay that ended well, and that said nothing but what it did.
func wantStory(t *testing.T, o outcome) {
	t.Helper()
	require.Zero(t, o.status, "%+v", o)
	require.Regexp(t, `^replay [^ ]+: starting 2 processes, which prepare [0-9.]+ [MG]iB of memory `+
		`for \d+ of \d+ layers\nreplay [^ ]+: ready after [0-9.]+m?s: handing over [0-9]+ `+
		`request\(s\)\n(replay .*\n)*$`, o.stderr)
}

func wantNumbers(t *testing.T, r map[string]any, want map[string]float64) {
	t.Helper()
	for key, n := range want {
		if r[key] == n {
			continue
		}
		if key == "mismatches" || key == "leaked" {
			testkit.ErrorBroken(t, "%s: %v, want %v", key, r[key], n)
		} else {
			t.Errorf("%s is %v, want %v", key, r[key], n)
		}
	}
}

func TestReplay(t *testing.T) {
	r := replayReport(t, "--trace", smallTrace(t, 8), "--requests", "8", "--backend", "shm")
	// 20 blocks: 8 times block 0, and each second request has the ids of the one before, and one
	// more.
	const moved, reused = 9, 11
	wantNumbers(t, r, map[string]float64{"requests": 8, "finished": 8, "aborted": 0,
		"mismatches": 0, "leaked": 0, "prefix_hits": 7, "prefix_tokens": reused * 512,
		"bytes": moved * 61 * 132 * 512})
	wantKeys(t, "request_ms", r["request_ms"], "p50", "p99")
	wantKeys(t, "layer_us", r["layer_us"], "p50", "p99")
	wantKeys(t, "seconds", r["seconds"], "setup", "replay", "fill", "digest", "transfer", "memcpy")
	require.Equal(t, true, r["digests"])
	if r["route"] != "shm" || r["gbps"].(float64) <= 0 || r["memcpy_gbps"].(float64) <= 0 {
		t.Errorf("route %v, %v GB/s, memcpy %v GB/s", r["route"], r["gbps"], r["memcpy_gbps"])
	}
}

// TestReplayOfAShortTrace: only who asks for more than there are gets an error.
func TestReplayOfAShortTrace(t *testing.T) {
	file := smallTrace(t, 3)
	wantNumbers(t, replayReport(t, "--trace", file), map[string]float64{"requests": 3,
		"mismatches": 0})
	wantNumbers(t, replayReport(t, "--trace", file, "--requests", "0"),
		map[string]float64{"requests": 3})
}

func TestReplayAtThePaceOfTheTrace(t *testing.T) {
	r := replayReport(t, "--requests", "6", "--trace", smallTrace(t, 6), "--speed", "0.5")
	if took := r["seconds"].(map[string]any)["replay"].(float64); took < 0.4 {
		t.Errorf("6 requests 80 ms apart took %v s", took)
	}
}

// TestReplayOfEveryModel moves one block of each, and finds it again.
func TestReplayOfEveryModel(t *testing.T) {
	line := `{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[7]}` + "\n"
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(line+line), 0o644))
	for _, name := range layout.Names() {
		if slices.Contains(groupModels, name) {
			continue
		}
		spec, err := layout.LookupSpec(name)
		require.NoError(t, err)
		side, err := layout.NewSide(spec, layout.Placement{BlockTokens: 512})
		require.NoError(t, err)
		var bytes uint64 // of a block in all layers
		for _, v := range side.Views {
			bytes += uint64(v.Count) * uint64(v.Tokens) * v.Cell
		}
		r := replayReport(t, "--model", name, "--trace", file, "--requests", "2")
		wantNumbers(t, r, map[string]float64{"finished": 2, "mismatches": 0, "leaked": 0,
			"prefix_tokens": 512, "bytes": float64(bytes)})
		require.Equal(t, name, r["model"])
	}
}

func TestReplayOfGeneratedRequests(t *testing.T) {
	// of 10 and 2 blocks, one of them shared
	r := replayReport(t, "--requests", "2", "--seed", "54")
	wantNumbers(t, r, map[string]float64{"requests": 2, "mismatches": 0})
}

func TestReplayAsText(t *testing.T) {
	o := sluice(t, "replay", "--model", smallModel, "--requests", "2", "--trace", smallTrace(t, 2))
	wantStory(t, o)
	for _, want := range []string{"mismatches  0", "beside the decode's digests, memcpy", "filling",
		"route       shm"} {
		require.Contains(t, o.stdout, want)
	}
}
