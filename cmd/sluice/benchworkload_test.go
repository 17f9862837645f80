// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBenchWorkloadOverEachBackend(t *testing.T) {
	o := withoutPrograms(t, "bench", "--workload", "llama3.1-8b/tp8/pp4", "--tokens", "64",
		"--spread", "4MiB", "--rounds", "1", "--seconds", "0.002", "--json")
	if o.status != 0 {
		t.Fatalf("%+v", o)
	}
	over := map[any][]string{}
	for _, item := range decode(t, o.stdout).([]any) {
		r := item.(map[string]any)
		extra := r["extra"].(map[string]any)
		gbps, ratio := r["gbps"].(float64), r["ratio"].(float64)
		if gbps <= 0 || ratio != gbps/r["baseline"].(map[string]any)["gbps"].(float64) ||
			r["pages"] != true {
			t.Errorf("%v", r)
		}
		// 16 tokens of 512 bytes; 8 layers of 32, for one of 4 stages.
		layers := map[any]float64{65536.0: 1, 4096.0: 8}[r["size"]]
		if want := r["p50_us"].(float64) / 1e3 * layers; layers == 0 ||
			extra["handover-ms"] != want {
			t.Errorf("hand-over of %v ms, want %v: %v", extra["handover-ms"], want, r)
		}
		over[r["backend"]] = append(over[r["backend"]], r["workload"].(string))
	}
	steps := []string{"llama3.1-8b/tp8/pp4 all layers of a block", "llama3.1-8b/tp8/pp4 k+v of " +
		"blocks, one layer"}
	for _, backend := range []string{"shm", "tcp"} { // which need no library
		if !slices.Equal(over[backend], steps) {
			t.Errorf("%s: steps %q, want %q", backend, over[backend], steps)
		}
	}
	for _, backend := range []string{"ucx", "rdma"} {
		if _, ran := over[backend]; ran == strings.Contains(o.stderr, backend+" is left out") {
			t.Errorf("%s is neither measured nor said to be left out, or both: %s", backend,
				o.stderr)
		}
	}
}

func TestBenchWorkloadFormats(t *testing.T) {
	for format, wants := range map[string][]string{
		"text": {"write pages", "deepseek-v3.2/token latent of tokens, one layer, shm", "656B",
			"132B", "handover-ms", "memcpy"},
		"gobench": {"/workload=deepseek-v3.2,token_latent_of_tokens,_one_layer/",
			"/size=656/batch=32/by=shm-1", " handover-ms"},
	} {
		o := sluice(t, "bench", "--workload", "deepseek-v3.2/token", "--tokens", "32", "--backend",
			"shm", "--spread", "4MiB", "--rounds", "1", "--seconds", "0.002", "--format", format)
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

func TestBenchWorkloadSweepWithinAProcess(t *testing.T) {
	o := sluice(t, "bench", "--workload", "nixlbench-batch", "--backend", "mem", "--op", "read",
		"--operation-bytes", "1MiB", "--spread", "4MiB", "--rounds", "1", "--seconds", "0.002",
		"--json")
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%+v", o)
	}
	list := decode(t, o.stdout).([]any)
	for _, item := range list {
		if r := item.(map[string]any); r["op"] != "read" ||
			r["size"].(float64)*r["batch"].(float64) > 1<<20 {
			t.Errorf("%v", r)
		}
	}
	if len(list) != 6 { // 1, 8 and 64 of 4 KiB; 1 and 8 of 64 KiB; 1 of 1 MiB
		t.Errorf("%d shapes", len(list))
	}
}

func TestBenchWorkloadList(t *testing.T) {
	for _, args := range [][]string{nil, {"--json"}} {
		o := sluice(t, append([]string{"bench", "--workload", "list"}, args...)...)
		if o.status != 0 || o.stderr != "" {
			t.Fatalf("%+v", o)
		}
		for _, want := range []string{"nixlbench", "nixlbench-batch", "deepseek-v3.2", "80 layers",
			"/tpN"} {
			if !strings.Contains(o.stdout, want) {
				t.Errorf("no %q in:\n%s", want, o.stdout)
			}
		}
	}
}

// TestBenchWorkloadUnknown: the sentence ends with what helps, in one line.
func TestBenchWorkloadUnknown(t *testing.T) {
	for name, want := range map[string]string{
		"nosuch": `unknown workload "nosuch": there are reshape, nixlbench, .*; --workload list ` +
			`says what each is`,
		"llama3.1-8b/tp3": `workload "llama3.1-8b/tp3": .* 3 ranks.*`,
		"reshape/tp3":     `workload "reshape/tp3": neither .*, and no model "reshape"; .*`,
	} {
		o := sluice(t, "bench", "--workload", name)
		require.Equal(t, statusUsage, o.status)
		require.Regexp(t, `^sluice bench: `+want+`\nUsage: `, o.stderr)
		require.NotContains(t, o.stderr, "bad ")
	}
}
