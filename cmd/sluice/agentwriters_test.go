// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAgentNamesWriters: of a file and of memory that name their writers, these write, and every
// other member reads.
func TestAgentNamesWriters(t *testing.T) {
	dir := cluster(t, "agent", "prefill", "decode")
	path, content := randomFile(t, 4096)
	source, written := randomFile(t, 4096)
	written[0]++
	require.NoError(t, os.WriteFile(source, written, 0o600))
	a := startAgent(t, append(as(dir, "agent"), "--region", "model="+path+":rw=prefill",
		"--region", "kv=4KiB:rw=prefill,other")...)
	require.Contains(t, a.said, "at 0, prefill alone may write to it")
	require.Contains(t, a.said, "4KiB of memory, prefill and other alone may write to it")
	call := func(name string, args ...string) outcome {
		return sluice(t, append(append(args, as(dir, name)...), "--peer", a.at)...)
	}
	for _, region := range []string{"model", "kv"} {
		o := call("decode", "put", region, "--input", source)
		require.Equal(t, statusFailed, o.status, "%+v", o)
		require.Contains(t, o.stderr, "read-only")
	}
	require.Equal(t, string(content), ok(t, call("decode", "get", "model")).stdout)
	for _, region := range []string{"model", "kv"} {
		ok(t, call("prefill", "put", region, "--input", source))
		require.Equal(t, string(written), ok(t, call("decode", "get", region)).stdout)
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, written, got)

	for _, text := range []string{"kv=1MiB:rw=", "kv=1MiB:rw=a,"} {
		o := sluice(t, append([]string{"agent", "--listen", "127.0.0.1:0", "--region", text},
			as(dir, "agent")...)...)
		require.Equal(t, statusUsage, o.status, "%+v", o)
		require.Contains(t, o.stderr, "names of peers")
	}
	o := sluice(t, "agent", "--listen", "127.0.0.1:0", "--plaintext", "--region", "kv=1MiB:rw=a")
	require.Equal(t, statusUsage, o.status, "%+v", o)
	require.Contains(t, o.stderr, "peers have no names in plain text")
}
