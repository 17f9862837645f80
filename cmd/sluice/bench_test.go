// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
)

// benchRows are the rows of transfers of a run, by participant.
func benchRows(t *testing.T, o outcome) map[string]map[string]any {
	t.Helper()
	require.Zero(t, o.status, "%+v", o)
	rows := map[string]map[string]any{}
	for _, row := range decode(t, o.stdout).(map[string]any)["rows"].([]any) {
		if row := row.(map[string]any); row["kind"] == bench.KindTransfer {
			rows[row["peer"].(string)] = row
		}
	}
	return rows
}

// TestBenchMeasuresBesideABaseline: on each lane that a machine without cards has.
func TestBenchMeasuresBesideABaseline(t *testing.T) {
	dir := t.TempDir()
	for base, args := range map[string][]string{
		"memcpy":      {"--size", "4096", "--batch", "2", "--threads", "2"},
		"memcpy-huge": {"--lane", "process", "--op", "read", "--beside", "memcpy-huge"},
		"sockets":     {"--backend", "tcp", "--size", "656", "--batch", "64", "--pages"},
		"pread":       {"--lane", "file", "--dir", dir, "--beside", "pread", "--op", "read"},
	} {
		args = append(args, "--seconds", "0.01", "--json")
		if strings.Contains(strings.Join(args, " "), "pages") {
			args = append(args, "--spread", "4MiB")
		}
		rows := benchRows(t, sluice(t, append([]string{"bench"}, args...)...))
		if len(rows) != 2 || rows[base]["yardstick"] != true || rows[base]["gbps"].(float64) <= 0 {
			t.Errorf("%v: %v", args, rows)
		}
		for name, row := range rows {
			if name == base {
				continue
			}
			for _, key := range []string{"kind", "lane", "peer", "op", "size", "batch", "where",
				"gbps", "descs_per_s", "p50_us", "p99_us", "cpu_s_per_gb", "rounds", "ops",
				"ours"} {
				require.Contains(t, row, key, name)
			}
			if ratio := row["ratios"].(map[string]any)[base].(float64); ratio <= 0 {
				t.Errorf("%v: %v", args, row)
			}
		}
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestBenchWritesBoth: JSON to the file and text to the standard output.
func TestBenchWritesBoth(t *testing.T) {
	file := filepath.Join(t.TempDir(), "report.json")
	o := ok(t, sluice(t, "bench", "--backend", "mem", "--seconds", "0.01", "--size", "64",
		"--json="+file))
	require.Contains(t, o.stdout, "sluice-mem")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var report bench.Report
	require.NoError(t, json.Unmarshal(text, &report))
	require.NotEmpty(t, report.Rows)
}

// TestBenchOfWhatIsNotThere: rows say why, and so does the error of a run without figures of ours.
func TestBenchOfWhatIsNotThere(t *testing.T) {
	o := sluice(t, "bench", "--lane", "file", "--dir", t.TempDir(), "--backend", "posix:threads=-1",
		"--beside", "none", "--seconds", "0.01", "--size", "4096")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "sluice-posix measured nothing: ")
	require.Contains(t, o.stdout, "sluice-posix has no figures")
	peers := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(peers, "scripts"), 0o700))
	o = sluice(t, "bench", "--peers", peers, "--beside", "nixl", "--seconds", "0.01",
		"--size", "4096")
	rows := o.stdout
	require.Zero(t, o.status, "%+v", o)
	require.Contains(t, rows, "nixl has no figures: ")
}

// TestBenchOfACache stores, by a process that another one serves, and by its own.
func TestBenchOfACache(t *testing.T) {
	rows := benchRows(t, sluice(t, "bench", "--lane", "cache-shm", "--size", "64KiB", "--batch",
		"4", "--beside", "memcpy,sluice-cache-own", "--seconds", "0.01", "--json"))
	require.Len(t, rows, 3)
	for _, ours := range []string{"sluice-cache", "sluice-cache-own"} {
		require.Positive(t, rows[ours]["ratios"].(map[string]any)["memcpy"], rows)
	}
	require.Contains(t, rows["sluice-cache-own"]["note"], "holds up its caller")
	c := newCacheBench()
	c.SetArgs([]string{"--backend", "shm"})
	c.SilenceErrors, c.SilenceUsage = true, true
	require.ErrorContains(t, c.ExecuteContext(t.Context()), "of one lane, and there are 3")
}

func TestBenchUsage(t *testing.T) {
	for line, want := range map[string]string{
		"--lane sea":                            `unknown lane "sea": there are process, host, tcp, `,
		"--backend shm:wheels=4":                `option "wheels" does not exist`,
		"--backend smoke":                       `unknown backend "smoke": there are mem, shm, tcp`,
		"--backend shm --backend tcp":           "say which by --lane",
		"--beside fio":                          "on lane host there are sluice-foreign, memcpy",
		"--op move":                             `operation "move", want write, read, durable or match`,
		"--size apples":                         `--size: size "apples" is not a number`,
		"--spread 2GiB":                         "--spread is the memory of --pages",
		"--seconds nan":                         "--seconds",
		"--workload all --size 4KiB":            "--workload all has shapes of its own",
		"--workload some":                       "there are all and quick",
		"--lane tcp --backend shm":              "lane tcp takes tcp or ucx",
		"--dir /tmp":                            "--dir is of lanes file, weights, gpufile and",
		"--lane cache --backend shm":            "say which by --lane",
		"--lane weights --batch 3":              "takes no --batch",
		"--lane file --dir /no/where --size 64": "",
	} {
		o := sluice(t, append([]string{"bench"}, strings.Fields(line)...)...)
		status := statusUsage
		if want == "" {
			status, want = statusFailed, "/no/where"
		}
		if o.status != status || !strings.Contains(o.stderr, want) || o.stdout != "" {
			t.Errorf("%s: %+v", line, o)
		}
	}
}

// TestBenchFailsForWrongBytes: also where other shapes have figures.
func TestBenchFailsForWrongBytes(t *testing.T) {
	good := bench.Row{Kind: bench.KindTransfer, Peer: "sluice-shm", Ours: true}
	wrong, missing, other := good, good, good
	wrong.Reason, wrong.Wrong = "the bytes that arrived are not those that were sent", true
	missing.Reason = "no room"
	other.Ours, other.Reason, other.Wrong = false, "nonsense", true
	require.NoError(t, failed(&bench.Report{Rows: []bench.Row{missing, good, other}}))
	require.ErrorContains(t, failed(&bench.Report{Rows: []bench.Row{missing}}), "measured nothing")
	require.ErrorContains(t, failed(&bench.Report{Rows: []bench.Row{good, wrong, good}}),
		"not those that were sent")
}
