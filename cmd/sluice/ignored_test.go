// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNoFlagIsIgnored: a flag that would have no effect beside the others is refused, by name.
func TestNoFlagIsIgnored(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, os.WriteFile(trace, []byte(
		`{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}`+"\n"), 0o600))
	for _, c := range [][2]string{
		{"doctor --backend auto", "--backend"},
		{"replay --peer-backend shm", "--peer-backend"},
		{"explain --backend tcp:listen=x:1-y,plaintext=true", "--backend"},
		{"explain --backend shm --backend tcp", "--backend tcp: shm stands before it"},
		{"doctor --backend tcp --backend tcp:conns=2", "two of tcp"},
		{"replay --trace " + trace + " --seed 9", "--seed"},
		{"replay --model qwen3-8b --prefill tp=1 --decode tp=1 --backend tcp --threads 7",
			"--threads"},
		// An empty value says nothing, whatever the flag.
		{"replay --pool=", "--pool"},
	} {
		line, flag := c[0], c[1]
		o := sluice(t, strings.Fields(line)...)
		require.Equal(t, statusUsage, o.status, "%s: %+v", line, o)
		require.Empty(t, o.stdout, line)
		said, _, _ := strings.Cut(o.stderr, "\n")
		require.Contains(t, said, flag, line)
	}
}

// TestDoctorFailsForWhatItWasAskedAbout: a script may ask whether a backend works here.
func TestDoctorFailsForWhatItWasAskedAbout(t *testing.T) {
	o := sluice(t, "doctor", "--backend", "tcp:certificate=/no/c,key=/no/k,authority=/no/a")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "backend tcp does not work here")
	require.Contains(t, o.stdout, "name files that are there")
	require.Contains(t, o.stdout, "/no/c: no such file or directory; stat /no/a")
}
