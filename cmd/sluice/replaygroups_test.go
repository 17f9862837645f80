// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// groupsArgs are a small replay between two unlike groups.
func groupsArgs(more ...string) []string {
	return append([]string{"replay", "--model", "llama3.1-8b", "--prefill", "tp=4,block=16",
		"--decode", "tp=2,pp=2,layout=hnd,block=64", "--backend", "shm", "--scale", "16"}, more...)
}

func TestReplayGroups(t *testing.T) {
	o := ok(t, sluice(t, groupsArgs("--json", "--tokens", "300", "--requests", "4")...))
	require.Regexp(t, `^replay llama3.1-8b: starting 8 processes, which prepare .* for 2 of 32 `+
		`layers\nreplay llama3.1-8b: ready after .*: handing over 4 request\(s\)\n$`, o.stderr)
	r := decode(t, o.stdout)
	wantKeys(t, "report", r, replayKeys...)
	wantNumbers(t, r.(map[string]any), map[string]float64{"requests": 4, "finished": 4,
		"mismatches": 0, "bytes": 4 * 300 * 2 * 4096, "layers": 2,
		"leaked": 0, "requests_shortened": 0})
}

func TestReplayGroupsWithAKilledRank(t *testing.T) {
	o := ok(t, sluice(t, groupsArgs("--abort-rate", "0.5", "--prefix-hits", "0.5", "--kill",
		"decode", "--fault", "slow", "--requests", "4")...))
	require.Contains(t, o.stdout, " 2 failed\nmismatches  0 of ")
	require.Regexp(t, `\nprefixes    2 requests, of which [1-9](.*\n)*faults      [1-9]`, o.stdout)
	require.Regexp(t, `killed      decode rank [0-3]; the last rank ended its requests after`,
		o.stdout)
}

func TestReplayGroupsUsage(t *testing.T) {
	for want, args := range map[string][]string{
		"--kill goes with --prefill": {"replay", "--kill", "decode"},
		"--decode is missing":        {"replay", "--prefill", "tp=2"},
		"--speed does not go with":   groupsArgs("--speed", "1"),
		"--pool does not go with":    groupsArgs("--pool", "1GiB"),
		"--fault-side":               groupsArgs("--fault-side", "all"),
		"--prefix-hits 2":            groupsArgs("--prefix-hits", "2"),
		"want prefill or decode":     groupsArgs("--kill", "both"),
		"--abort-rate 2":             groupsArgs("--abort-rate", "2"),
		"--scale 0":                  groupsArgs("--scale", "0"),
		"--tokens 0":                 groupsArgs("--tokens", "0"),
		"--tokens and --trace":       groupsArgs("--tokens", "1", "--trace", "file"),
		"too few for 1 and 2 stages": groupsArgs("--scale", "32"),
		"there are tp, pp":           groupsArgs("--prefill", "cp=2"),
	} {
		o := sluice(t, args...)
		require.Equal(t, statusUsage, o.status, "%v: %s", args, o.stderr)
		require.Contains(t, o.stderr, want)
	}
}
