// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// smallSparse is a simulation that takes a moment.
var smallSparse = []string{"simulate", "sparse", "--layers", "2", "--steps", "2", "--warm", "2",
	"--context", "8192", "--ratio", "0.6"}

// jsonRows reads what printRows prints.
func jsonRows(t *testing.T, o outcome, keys ...string) (rows []map[string]any) {
	t.Helper()
	for line := range strings.Lines(ok(t, o).stdout) {
		row := decode(t, line)
		wantKeys(t, "a row", row, keys...)
		object, isObject := row.(map[string]any)
		require.True(t, isObject)
		rows = append(rows, object)
	}
	return rows
}

func TestSimulateSparse(t *testing.T) {
	rows := jsonRows(t, sluice(t, append(smallSparse, "--json")...), "overlap", "batch", "misses",
		"bytes", "stall_us", "step_us", "tokens_s", "gain_percent")
	require.Len(t, rows, 5)
	for i, name := range []string{"no pool", "none", "DA", "DBA", "chosen"} {
		require.Equal(t, name, rows[i]["overlap"])
		require.Positive(t, rows[i]["tokens_s"])
		if i > 0 {
			require.GreaterOrEqual(t, rows[i]["step_us"], rows[4]["step_us"], "chosen is best")
		}
	}
	require.Greater(t, rows[1]["batch"], rows[0]["batch"])
	require.Positive(t, rows[1]["misses"])

	rows = jsonRows(t, sluice(t, append(smallSparse, "--json", "--by", "step")...), "step",
		"misses", "fewest", "most")
	require.Len(t, rows, 2)
	rows = jsonRows(t, sluice(t, append(smallSparse, "--json", "--by", "layer")...), "layer",
		"misses")
	require.Len(t, rows, 2)

	table := ok(t, sluice(t, smallSparse...))
	require.True(t, strings.HasPrefix(table.stdout, "overlap  batch"), table.stdout)
	require.Contains(t, table.stderr, "2 layers of 4928 slots")
}

func TestSimulateSparseReport(t *testing.T) {
	svg := filepath.Join(t.TempDir(), "figures.svg")
	rows := jsonRows(t, sluice(t, "simulate", "sparse", "--report", "--layers", "3", "--steps",
		"3", "--svg", svg, "--json"), "figure", "report", "here", "off", "basis")
	require.Len(t, rows, 8)
	require.Contains(t, rows[5]["basis"], "fitted")
	require.Equal(t, "predicted", rows[7]["basis"])
	for i, row := range rows {
		require.Positive(t, row["here"])
		require.Equal(t, i >= 5, row["off"] != nil, "%v", row)
	}
	drawn, err := os.ReadFile(svg)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(drawn), "<svg "), string(drawn))
}

func TestSimulateSparseSeries(t *testing.T) {
	file := filepath.Join(t.TempDir(), "series.jsonl")
	write := func(text string) {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}
	write(seriesLine + "\n")
	rows := jsonRows(t, sluice(t, "simulate", "sparse", file, "--by", "layer", "--json"), "layer",
		"misses")
	require.EqualValues(t, 2, rows[0]["misses"], "it writes the last one itself")

	write(seriesLine + "\n{}\n")
	o := sluice(t, "simulate", "sparse", file)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "series line 2: want step, layer, context and entries")
	require.Contains(t, o.stderr, seriesLine)
	for name, want := range map[string]string{"/dev/zero": "line 1: longer", "/no/where": "no such",
		os.DevNull: "no step from 0 on", filepath.Dir(file): "directory"} {
		o := sluice(t, "simulate", "sparse", name)
		require.Equal(t, statusFailed, o.status)
		require.Contains(t, o.stderr, want)
		require.Contains(t, o.stderr, name)
	}
}

func TestSimulateSparseRefused(t *testing.T) {
	for flags, want := range map[string]string{
		"--ratio 0":                    "--ratio 0: want 0.001 to 1",
		"--ratio nan":                  "--ratio NaN",
		"--mtp 17":                     "--mtp 17: want 1 to 16",
		"--accepted 2.5":               "--accepted 2.5: want 0 to 2",
		"--context 2048":               "--context 2048: want 4096",
		"--steps 1":                    "--steps 1: want 2",
		"--slots 6400 --ratio 0.2":     "--slots and --ratio",
		"--memory 1KiB --layers 1":     "not one sequence",
		"--memory much":                "--memory",
		"--gather 2GiB":                "4GiB, 1GiB, or points",
		"--gather 10:5,20:3":           "must take longer",
		"--by card":                    "overlap, step or layer",
		"--svg x.svg":                  "--report",
		"--report --slots 6400":        "--slots beside --report",
		"recorded.jsonl --mtp 4":       "--mtp beside SERIES",
		"recorded.jsonl other.jsonl":   `"other.jsonl"`,
		"--fixed -1":                   "--fixed -1: want 0",
		"--json --by step --query inf": "--query +Inf",
		"--fixed 0 --query 0 --attention 0 --index 0": "a layer takes time",
	} {
		o := sluice(t, append([]string{"simulate", "sparse"}, strings.Fields(flags)...)...)
		require.Equal(t, statusUsage, o.status, "%s: %+v", flags, o)
		require.Contains(t, o.stderr, want)
		require.Empty(t, o.stdout)
	}
	o := sluice(t, "simulate", "dense")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "there are sparse")
}
