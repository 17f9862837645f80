// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBenchAll: each backend that works here has a row for each shape, beside what limits it; the
// others are named with the reason. Other makers' programs are left out, since each takes a second.
func TestBenchAll(t *testing.T) {
	o := withoutPrograms(t, "bench", "all", "--rounds", "1", "--seconds", "0.001", "--spread",
		"6MiB", "--json")
	require.Zero(t, o.status, "%+v", o)
	require.Empty(t, o.stderr)
	var got machineFigures
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &got))
	require.Positive(t, got.Machine.CPUs)
	require.NotEmpty(t, got.Machine.Kernel)
	require.NotEmpty(t, got.Copy)
	rows := map[string]int{}
	for _, r := range got.Results {
		rows[r.Backend]++
		require.Positive(t, r.P50us, "%+v", r)
		require.NotEmpty(t, r.Baselines, "%+v", r)
		if r.Backend == tcpName {
			require.Equal(t, "sockets", r.Baseline.Name)
		}
	}
	missing := map[string]bool{}
	for _, m := range got.Missing {
		missing[m.Backend] = true
		require.NotEmpty(t, m.Why)
	}
	for _, m := range makers {
		if missing[m.name] {
			require.True(t, m.cgo, "%s needs nothing", m.name)
			require.Zero(t, rows[m.name])
			continue
		}
		require.Equal(t, len(everyShape(1<<30)), rows[m.name], m.name)
	}
	require.True(t, missing[gdsName], "another command measures it")
}

// TestBenchAllWithoutADisk: the rest is measured all the same, unless --dir names that disk.
func TestBenchAllWithoutADisk(t *testing.T) {
	c, stdout, stderr := command(t, "bench", "all", "--rounds", "1", "--seconds", "0.001",
		"--spread", "6MiB")
	c.Env = append(c.Env, "TMPDIR=/no/where", "PATH=/nonexistent")
	require.NoError(t, c.Run(), stderr)
	require.Regexp(t, `^sluice .*\n.* CPUs, .*kernel .*\nhost copy: \w.*\n`, stdout)
	require.Regexp(t, `(?m)^posix is left out: look at --dir /no/where: no such file`, stdout)
	require.Regexp(t, `(?m)^gds is left out: .*sluice bench gds --dir DIR$`, stdout)
	require.Regexp(t, `(?m)^ *shm +write`, stdout)

	for _, name := range []string{"all", "posix"} {
		o := sluice(t, "bench", name, "--dir", "/no/where")
		require.Equal(t, outcome{statusFailed, "", "sluice bench " + name + ": look at --dir " +
			"/no/where: no such file or directory\n"}, o)
	}
	o := sluice(t, "bench", "all", "--dir", binary)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "write to --dir "+binary+": ")
}

// TestSoakBenchAllAsGoBench: the machine stands above the figures.
func TestSoakBenchAllAsGoBench(t *testing.T) {
	o := sluice(t, "bench", "all", "--rounds", "1", "--seconds", "0.01",
		"--spread", "6MiB", "--format", "gobench")
	require.Zero(t, o.status, "%+v", o)
	require.Regexp(t, `^# sluice .*\n# .* CPUs, .*kernel .*\n# host copy: \w.*\n`, o.stdout)
	require.Contains(t, o.stdout, "BenchmarkWrite/")
}

func TestBenchAllUsage(t *testing.T) {
	o := sluice(t, "bench", "all", "--seconds", "0")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "--seconds 0: want more than 0")
	o = sluice(t, "bench", "all", "--spread", "much")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "--spread: ")
}
