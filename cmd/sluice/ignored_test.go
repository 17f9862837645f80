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
		{"bench --notify --size 4MiB", "--size"},
		{"bench --notify --threads 3", "--threads"},
		{"bench --notify --plot x.svg", "--plot"},
		{"bench --sweep --batch 3", "--batch"},
		{"bench --table --gather", "--gather"},
		{"bench --backend auto --transports tcp", "--transports"},
		{"bench --backend auto --devices lo", "--devices"},
		{"bench --backend tcp --tcp-plaintext --tcp-listen 127.0.0.1:9", "--tcp-listen"},
		{"bench --workload list --tokens 5", "--tokens"},
		{"bench --workload list --backend tcp", "--backend"},
		{"bench --workload list --format gobench", "--format"},
		{"bench --workload nixlbench --tokens 5", "--tokens"},
		{"bench --workload nixlbench --spread 2GiB", "--spread"},
		{"bench --workload nixlbench --operation-bytes 64KiB", "--operation-bytes"},
		{"bench --workload nixlbench-batch --block-tokens 5", "--block-tokens"},
		{"bench --workload reshape --spread 2GiB", "--spread"},
		{"bench gather --sms 2", "--sms"},
		{"bench gather --neighbour 0", "--neighbour"},
		{"bench gather --save /no/where", "--save"},
		{"bench posix --dense 8 --op read", "--dense"},
		{"explain --backend tcp --tcp-plaintext --tcp-listen 127.0.0.1:99999", "--tcp-listen"},
		{"agent --listen :0 --plaintext --region a=1KiB --data 127.0.0.1:99999", "--data"},
		{"bench posix --dense 8", "--dense"},
		{"bench posix --durable", "--durable"},
		{"bench posix --load --durable", "--durable"},
		{"bench posix --load --seconds 9", "--seconds"},
		{"bench posix --load --bytes 9MiB", "--bytes"},
		{"bench posix --op read --load-bytes 9MiB", "--load-bytes"},
		{"doctor --tune x --workers 9", "--workers"},
		{"doctor --tune x --tcp-listen y", "--tcp-listen"},
		{"doctor --root / --transports tcp", "--transports"},
		{"explain --plaintext", "--plaintext"},
		{"explain --name foo", "--name"},
		{"explain --backend tcp --tcp-plaintext --tcp-listen x:1-y", "--tcp-listen"},
		{"replay --fault-side decode", "--fault-side"},
		{"replay --trace " + trace + " --seed 9", "--seed"},
		{"replay --speed 1 --overlap=false", "--overlap"},
		{"replay --model qwen3-8b --prefill tp=1 --decode tp=1 --backend tcp --threads 7",
			"--threads"},
		{"agent --backend shm --listen :0 --plaintext --region a=1KiB --data x:1", "--data"},
		{"agent --listen :0 --plaintext --region a=1KiB --data nonsense", "--data"},
		// An empty value says nothing, whatever the flag.
		{"keys revoke /no/where --serial=", "--serial"},
		{"explain --peer=", "--peer"},
		{"bench --backend tcp --tcp-cert=", "--tcp-cert"},
		{"replay --pool=", "--pool"},
		{"get kv --peer 127.0.0.1:1 --output=", "--output"},
		{"ls --peer 127.0.0.1:1 --plaintext --revoked=", "--revoked"},
		{"ls --peer 127.0.0.1:1 --plaintext --backend=", "--backend"},
	} {
		line, flag := c[0], c[1]
		o := sluice(t, strings.Fields(line)...)
		require.Equal(t, statusUsage, o.status, "%s: %+v", line, o)
		require.Empty(t, o.stdout, line)
		said, _, _ := strings.Cut(o.stderr, "\n")
		require.Contains(t, said, flag, line)
	}
}

// TestFlagsBesideOthers: the tool takes flags that have an effect, and those that switch off what
// is off by itself.
func TestFlagsBesideOthers(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink("target", link))
	for _, line := range []string{
		"bench --backend tcp --tcp-plaintext --tcp-listen 127.0.0.1:0 --size 4KiB --seconds 0.01",
		"bench --backend mem --hot=false --notify=false --size 4KiB --seconds 0.01",
		"bench gather --spread 16MiB --seconds 0.01 --save " + link,
		"bench posix --load --pages=false --load-bytes 1MiB",
	} {
		ok(t, sluice(t, append(strings.Fields(line), "--rounds", "1")...))
	}
	for _, line := range []string{"bench --workload list --json", "explain --plaintext=false",
		"doctor --tcp-listen 127.0.0.1:0 --tcp-plaintext", "explain --backend tcp --tcp-conns 2"} {
		ok(t, sluice(t, strings.Fields(line)...))
	}
}

// TestBackendsOfNoBuild: flags of a backend that is not in a build have no effect in it.
func TestBackendsOfNoBuild(t *testing.T) {
	want := statusOK
	if !withCgo {
		want = statusUsage
	}
	for _, line := range []string{"doctor --depth 4", "doctor --workers 2",
		"explain --workers 2"} {
		o := sluice(t, strings.Fields(line)...)
		require.Equal(t, want, o.status, "%s: %+v", line, o)
	}
}
