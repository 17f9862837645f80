// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// simulated runs the command, and returns its rows.
func simulated(t *testing.T, words ...string) (rows []map[string]any, o outcome) {
	t.Helper()
	o = ok(t, sluice(t, append([]string{"simulate", "trace", "--json"}, words...)...))
	for line := range strings.Lines(o.stdout) {
		row := decode(t, line)
		wantKeys(t, "a row", row, simulatedColumns...)
		object, isObject := row.(map[string]any)
		require.True(t, isObject)
		rows = append(rows, object)
	}
	return rows, o
}

func TestSimulateTrace(t *testing.T) {
	rows, o := simulated(t, "--requests", "300", "--prefill", "5")
	require.Len(t, rows, 3)
	for k, name := range []string{"none", "local", "pool"} {
		require.Equal(t, name, rows[k]["case"])
		require.Positive(t, rows[k]["served"])
		require.Positive(t, rows[k]["tbt_p50_ms"])
		if k > 0 { // each has more hits, and needs less computing, than the one before
			require.Greater(t, rows[k]["hits"], rows[k-1]["hits"])
			require.Less(t, rows[k]["prefill_s"], rows[k-1]["prefill_s"])
		}
	}
	require.Positive(t, rows[2]["copied"])
	require.Contains(t, o.stderr, "300 requests over 5 prefill instances")

	table := ok(t, sluice(t, "simulate", "trace", "--requests", "5", "--case", "pool"))
	require.True(t, strings.HasPrefix(table.stdout, "case  served"), table.stdout)

	// The requests of a file, and nothing that can be served: there are no times.
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(traceLine), 0o600))
	rows, _ = simulated(t, file, "--case", "local", "--ttft", "1us")
	require.EqualValues(t, 1, rows[0]["refused_ttft"])
	require.Nil(t, rows[0]["hits"])
	require.Nil(t, rows[0]["ttft_mean_s"])
	require.EqualValues(t, 0, rows[0]["within"])
	rows, _ = simulated(t, file, "--case", "local", "--ttft", "1us", "--admit-all")
	require.EqualValues(t, 1, rows[0]["served"])
	require.Positive(t, rows[0]["ttft_p99_s"])
	require.Nil(t, rows[0]["tbt_p50_ms"]) // of one token
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(traceLine, `th":1`, `th":2`, 1)),
		0o600))
	rows, _ = simulated(t, file, "--case", "none", "--tbt", "0", "--step-time", "1e12,0,1e12")
	require.InDelta(t, 514e9, rows[0]["tbt_p50_ms"], 1e3, "513 tokens, and the fixed part")
}

func TestSimulateTraceCurves(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "curves.jsonl")
	write := func(text string) { require.NoError(t, os.WriteFile(file, []byte(text), 0o600)) }
	requests := filepath.Join(folder, "trace.jsonl")
	require.NoError(t, os.WriteFile(requests, []byte(traceLine), 0o600))
	write(`{"tokens":1024,"ms":3000}`)
	rows, o := simulated(t, requests, "--case", "none", "--curves", file)
	require.InDelta(t, 1.5, rows[0]["ttft_mean_s"], 1.5) // by which part is not said
	require.Contains(t, o.stderr, "at most 0 % off")

	write(`{"tokens":1024,"ms":3000}` + "\n{}")
	for name, want := range map[string]string{file: "line 2: want tokens", "/no/where": "no such",
		os.DevNull: "no points", folder: "directory"} {
		o := sluice(t, "simulate", "trace", requests, "--curves", name)
		require.Equal(t, statusFailed, o.status)
		require.Contains(t, o.stderr, want)
		require.Contains(t, o.stderr, name)
	}
}

// TestSimulateEnds: who waits for what comes from a pipe, or for its writer, may leave.
func TestSimulateEnds(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, words := range [][]string{{"trace"}, {"sparse"}, {"trace", "--requests", "1",
		"--curves"}} {
		c, stdout, stderr := command(t, append(append([]string{"simulate"}, words...), pipe)...)
		require.NoError(t, c.Start())
		w, err := os.OpenFile(pipe, os.O_WRONLY, 0) // when the command has opened it
		require.NoError(t, err)
		require.NoError(t, c.Process.Signal(syscall.SIGINT))
		require.Equal(t, statusInterrupted, status(t, c.Wait()))
		require.Empty(t, stdout.String())
		require.Contains(t, stderr.String(), "interrupted")
		require.NoError(t, w.Close())
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	time.AfterFunc(time.Millisecond, func() { cancel(gone) })
	_, err := openInput(ctx, pipe)
	require.ErrorIs(t, err, gone)
}

func TestSimulateTraceRefused(t *testing.T) {
	for flags, want := range map[string]string{
		"--prefill 0":                "--prefill: 0, want 1 to 256",
		"--decode 257":               "--decode: 257, want 1 to 256",
		"--cache 511":                "--cache: 511, want 512",
		"--rate nan":                 "--rate: NaN",
		"--rate 0":                   "--rate: 0, want 0.001 to 1e+06",
		"--threshold -1":             "--threshold: -1, want 0",
		"--speed 0":                  "--speed: 0, want",
		"--latency -1s":              "--latency: -1s, want 0s to 1h0m0s",
		"--requests 0":               "--requests 0: want from 1",
		"--policy fifo":              "s3fifo, lru and arc",
		"--case all":                 "--case all: there are [none local pool random queue]",
		"--prefill-time 1,2":         "--prefill-time: want three parts with commas between, not 2",
		"--step-time 0,0,1":          "decode takes no time",
		"one.jsonl two.jsonl":        `"two.jsonl"`,
		"--requests 2000000":         "--requests 2000000: want from 1",
		"--prefill-time -1,2,3":      "prefill has a part of -1000 ns",
		"--case pool --ttft forever": "--ttft",
	} {
		o := sluice(t, append([]string{"simulate", "trace"}, strings.Fields(flags)...)...)
		require.Equal(t, statusUsage, o.status, flags)
		require.Contains(t, o.stderr, want, flags)
	}
	o := sluice(t, "simulate", "trace", "/no/where")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "no such file")
}
