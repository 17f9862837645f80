// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUsageErrors(t *testing.T) {
	cases := []struct {
		name string
		args []string
		want []string // in the message
	}{
		{"unknown command", []string{"transfer"}, []string{"transfer", "bench", "doctor", "explain",
			"replay"}},
		{"unknown flag", []string{"bench", "--bach", "3"}, []string{"--bach"}},
		{"superfluous word", []string{"doctor", "now"}, []string{`"now"`}},
		{"unknown model", []string{"replay", "--model", "gpt-5"}, []string{"gpt-5", "llama3.1-8b",
			"deepseek-v3.2"}},
		{"unknown backend", []string{"replay", "--backend", "smoke"}, []string{"smoke", "shm"}},
		{"an option of another backend", []string{"replay", "--backend", "shm:transports=tcp"},
			[]string{"--backend", `"transports" does not exist`, "ring_bytes"}},
		{"options of all backends", []string{"replay", "--backend", "auto:workers=2"},
			[]string{"auto takes no options"}},
		{"a value out of bounds", []string{"replay", "--backend", "tcp:conns=65"},
			[]string{"--backend tcp:conns=65", "64"}},
		{"certificates that are not there", []string{"replay", "--backend",
			"tcp:certificate=/no/c,key=/no/k,authority=/no/a"}, []string{"--backend tcp:",
			"/no/c"}},
		{"unknown memory", []string{"explain", "--local", "tape"}, []string{"tape", "dram", "file",
			"hbm"}},
		{"abort rate", []string{"replay", "--abort-rate", "1.5"}, []string{"1.5", "0 to 1"}},
		{"speed that is no number", []string{"replay", "--speed", "nan"}, []string{"--speed"}},
		{"a fault that is none", []string{"replay", "--fault", "slow,wet"},
			[]string{"--fault", "wet", "flapping"}},
		{"empty trace name", []string{"replay", "--trace", ""}, []string{"--trace", "empty"}},
		{"unknown command, --help", []string{"transfer", "--help"}, []string{"transfer", "bench"}},
		{"help for nothing", []string{"help", "transfer"}, []string{"transfer", "bench", "replay"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			o := sluice(t, tc.args...)
			if o.status != statusUsage || o.stdout != "" {
				t.Errorf("status %d, stdout %q", o.status, o.stdout)
			}
			for _, want := range append(tc.want, "Usage: sluice", "--help") {
				require.Contains(t, o.stderr, want)
			}
		})
	}
}

func TestHelpIsNoError(t *testing.T) {
	for _, args := range [][]string{{}, {"--help"}, {"bench", "--help"}, {"help"},
		{"help", "bench"}} {
		if o := sluice(t, args...); o.status != 0 || !strings.Contains(o.stdout, "Usage:") ||
			o.stderr != "" {
			t.Errorf("%v: %+v", args, o)
		}
	}
	if o := sluice(t, "--help"); strings.Contains(o.stdout, "peer ") {
		t.Errorf("the hidden command is shown:\n%s", o.stdout)
	}
}

func TestPeerIsNotForHands(t *testing.T) {
	if o := sluice(t, "peer", "replay-decode", "shm"); o.status != statusFailed ||
		!strings.Contains(o.stderr, "not by hand") {
		t.Errorf("%+v", o)
	}
	for _, args := range [][]string{{"peer"}, {"peer", "cook"}, {"peer", "replay-decode", "now"}} {
		if o := sluice(t, args...); o.status != statusUsage {
			t.Errorf("%v: %+v", args, o)
		}
	}
}

// TestFilesThatAreNoTrace: a binary, a directory, one without an end, none, and an empty one.
func TestFilesThatAreNoTrace(t *testing.T) {
	for file, want := range map[string]string{binary: "line 1", filepath.Dir(binary): "directory",
		"/dev/zero": "line 1: longer", "/no/where": "no such file", os.DevNull: "no requests"} {
		o := sluice(t, "replay", "--trace", file)
		if o.status != statusFailed || !strings.Contains(o.stderr, want) ||
			!strings.Contains(o.stderr, file) || len(o.stderr) > 300 {
			t.Errorf("%s: %+v", file, o)
		}
	}
}

// TestOutputThatCannotBeWritten: a full disk must not look like success.
func TestOutputThatCannotBeWritten(t *testing.T) {
	small := []string{"replay", "--model", smallModel, "--requests", "1", "--trace",
		smallTrace(t, 1)}
	for _, args := range [][]string{{"doctor"}, {"doctor", "--json"}, {"explain"},
		small, append(small, "--json"),
		{"bench", "--backend", "mem", "--seconds", "0.01", "--size", "64"}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		require.NoError(t, err)
		c, _, stderr := command(t, args...)
		c.Stdout = full
		if got := status(t, c.Run()); got != statusFailed ||
			!strings.Contains(stderr.String(), "no space left") {
			t.Errorf("%v: status %d, stderr %q", args, got, stderr)
		}
		full.Close()
	}
}

// TestSparseSurroundings: no environment, no temporary directory, no standard
// input, and few descriptors.
func TestSparseSurroundings(t *testing.T) {
	args := []string{"replay", "--model", smallModel, "--requests", "2", "--trace",
		smallTrace(t, 2)}
	c, stdout, stderr := command(t, "-c", "ulimit -n 64; exec <&-; exec \"$0\" \"$@\"", binary)
	c.Path, c.Args = "/bin/sh", append(append([]string{"sh"}, c.Args[1:]...), args...)
	c.Env = []string{"TMPDIR=/nonexistent"}
	if got := status(t, c.Run()); got != 0 || !strings.Contains(stdout.String(), "mismatches  0") {
		t.Errorf("status %d, stdout %q, stderr %q", got, stdout, stderr)
	}
}
