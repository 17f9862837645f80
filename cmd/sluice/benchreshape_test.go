// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// reshapeOf is a small hand-over.
func reshapeOf(more ...string) []string {
	return append([]string{"bench", "--workload", "reshape", "--model", "gpt-oss-120b",
		"--prefill", "tp=8,layout=nhd", "--decode", "tp=2,pp=2,layout=hnd,block=64", "--tokens",
		"200", "--rounds", "1"}, more...)
}

func TestBenchReshape(t *testing.T) {
	for _, backend := range []string{"shm", "mem", "tcp"} { // which need no library
		o := ok(t, sluice(t, reshapeOf("--backend", backend, "--scale", "9", "--json")...))
		list := decode(t, o.stdout).([]any)
		require.Len(t, list, 1)
		r := list[0].(map[string]any)
		wantKeys(t, "result", r, append([]string{"workload", "extra", "notes"}, benchKeys...)...)
		require.Equal(t, "reshape", r["op"])
		require.Equal(t, backend, r["route"])
		require.Equal(t, "reshape-loop", r["baseline"].(map[string]any)["name"])
		require.Equal(t, r["gbps"].(float64)/r["baseline"].(map[string]any)["gbps"].(float64),
			r["ratio"])
		// Of layers 0 to 3 two look back 128 tokens; all have K and V of 8 heads of 128 bytes.
		require.Equal(t, float64(2*(128+200)*2*8*128), r["size"])
		notes := r["notes"].([]any)
		require.Len(t, notes, 2)
		require.Contains(t, notes[0], "4 of 36 layers, in ")
		require.Equal(t, "the digests of 10496 cells agree after the engine, and after the loop",
			notes[1])
		require.Equal(t, "reshape gpt-oss-120b, 200 tokens, tp=8,layout=nhd,kv=apart,block=16 to "+
			"tp=2,pp=2,layout=hnd,kv=apart,block=64", r["workload"])
		require.Positive(t, r["extra"].(map[string]any)["descriptors"])
	}
	o := ok(t, sluice(t, reshapeOf()...)) // over shm, with all layers
	require.Regexp(t, `shm +reshape .* reshape-loop `, o.stdout)
	require.NotContains(t, o.stdout, "of 36 layers")
	require.Regexp(t, ` 1 x [0-9.]+ MiB: \d+ descriptors, \d+ patterns\n`, o.stdout)
}

// TestBenchReshapeRefuses: what NewPlan says of groups that are unlike is printed as it is.
func TestBenchReshapeRefuses(t *testing.T) {
	o := sluice(t, reshapeOf("--decode", "tp=2,window=all")...)
	require.Equal(t, outcome{statusFailed, "", `sluice bench: layer 0, part "k": window: sender ` +
		`has 128, receiver has 0: keep no more tokens on the receiver than the sender has, or all ` +
		"on the sender\n"}, o)
}

func TestBenchReshapeUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"bench", "--workload", "reshape"}, []string{"--prefill, --decode, --model are"}},
		{[]string{"bench", "--workload", "nixlbench", "--scale", "2"},
			[]string{"--scale", "reshape alone"}},
		{[]string{"bench", "--prefill", "tp=2"}, []string{"--prefill", "reshape alone"}},
		{reshapeOf("--op", "read"), []string{"reshape", "--op"}},
		{reshapeOf("--size", "64"), []string{"--workload", "--size"}},
		{reshapeOf("--tokens", "0"), []string{"--tokens 0"}},
		{reshapeOf("--scale", "-1"), []string{"--scale -1"}},
		{reshapeOf("--decode", "tp=3"), []string{"decode", "8 heads"}},
		{reshapeOf("--decode", "tq=3"), []string{"--decode", "there are tp, pp"}},
		{reshapeOf("--model", "gpt-5"), []string{"--model", "gpt-5", "llama3.1-8b"}},
		{reshapeOf("--backend", "posix"), []string{"posix"}},
		{reshapeOf("--threads", "99"), []string{"99"}},
	} {
		o := sluice(t, c.args...)
		require.Equal(t, statusUsage, o.status, c.args)
		for _, want := range c.want {
			require.Contains(t, o.stderr, want)
		}
	}
	require.Contains(t, ok(t, sluice(t, "bench", "--workload", "list")).stdout, "reshape ")
}
