// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/layout"
)

func explainGroups(prefill, decode, model string, more ...string) []string {
	return append([]string{"explain", "--prefill", prefill, "--decode", decode, "--model", model},
		more...)
}

func TestExplainPlan(t *testing.T) {
	o := ok(t, sluice(t, explainGroups("tp=8,layout=nhd,block=16",
		"tp=4,layout=hnd,block=64,pp=20+60", "llama3.1-70b")...))
	for _, want := range []string{"llama3.1-70b, 8192 tokens\n",
		"prefill: tp=8,layout=nhd,kv=apart,block=16: 8 ranks\n",
		"decode:  tp=4,pp=20+60,layout=hnd,kv=apart,block=64: 8 ranks\n",
		"rank 7 pushes to rank 3: 20 layers, patterns of a layer: 1; for 8192 tokens 83886080 " +
			"bytes, in a list 20480 descriptors; a NIC sends 20480 requests, and 10240 if",
		"rank 7 pushes to rank 7: 60 layers",
		"in all 2.5 GiB by 640 patterns, in lists 655360 descriptors\n"} {
		require.Contains(t, o.stdout, want)
	}
	require.Regexp(t, `the plan took [\d.]+ µs, .* take [\d.]+ µs \(median\)`, o.stdout)
	require.Equal(t, 16, strings.Count(o.stdout, " pushes to "))
	require.NotContains(t, o.stdout, "send nothing")

	o = ok(t, sluice(t, explainGroups("tp=8", "tp=4", "llama3.1-8b")...))
	require.Contains(t, o.stdout, "rank 0 pulls from rank 1: 32 layers")

	o = ok(t, sluice(t, explainGroups("tp=8,dp=2", "tp=1", "llama3.1-8b")...))
	require.Contains(t, o.stdout, ": 8 ranks in each of 2 data-parallel groups\ndecode: ")
	require.Contains(t, o.stdout, ": 1 rank\n")
}

// TestExplainPlanRefuses: what NewPlan says of groups that are unlike is printed as it is.
func TestExplainPlanRefuses(t *testing.T) {
	o := sluice(t, explainGroups("tp=8,window=ring", "tp=4,window=all", "gpt-oss-120b")...)
	require.Equal(t, outcome{statusFailed, "", `sluice explain: layer 0, part "k": window: sender ` +
		`has 128, receiver has 0: keep no more tokens on the receiver than the sender has, or all ` +
		"on the sender\n"}, o)
}

func TestExplainPlanUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"explain", "--prefill", "tp=8"}, []string{"go together", "--decode, --model"}},
		{[]string{"explain", "--model", "llama3.1-8b"},
			[]string{"--prefill, --decode are missing"}},
		{explainGroups("tp=8", "tq=8", "llama3.1-8b"), []string{`--decode`, `"tq"`, "tp, pp, dp"}},
		{explainGroups("tp=3", "tp=8", "llama3.1-8b"), []string{"prefill", "8 heads", "3 ranks"}},
	} {
		o := sluice(t, c.args...)
		require.Equal(t, statusUsage, o.status, c.args)
		require.Empty(t, o.stdout)
		for _, want := range c.want {
			require.Contains(t, o.stderr, want)
		}
	}
}

// TestGroupModels: a pair of processes refuses models with states.
func TestGroupModels(t *testing.T) {
	_, err := layout.LookupSpec("no-model")
	require.ErrorContains(t, err, strings.Join(layout.Names(), ", "))
	help := ok(t, sluice(t, "replay", "--help")).stdout
	for _, name := range groupModels {
		_, err := layout.LookupSpec(name)
		require.NoError(t, err)
		require.Contains(t, help, name)
		o := sluice(t, "replay", "--model", name)
		require.Equal(t, statusUsage, o.status)
		require.Contains(t, o.stderr, "--model "+name+" goes with --prefill and --decode alone\n")
	}
}
