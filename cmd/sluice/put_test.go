// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPutThatDoesNotFit: a file is refused before a byte is written, and of a pipe what fits is.
// Each error names the cure.
func TestPutThatDoesNotFit(t *testing.T) {
	path, content := randomFile(t, 8192)
	a := startAgent(t, "--plaintext", "--region", "kv=4KiB", "--region", "model="+path)
	with := func(args ...string) []string { return append(args, "--plaintext", "--peer", a.at) }
	kv := func() string { return ok(t, sluice(t, with("get", "kv")...)).stdout }
	refused := func(want string, code int, args ...string) {
		t.Helper()
		o := sluice(t, with(args...)...)
		require.Equal(t, code, o.status, o.stderr)
		require.Contains(t, o.stderr, want)
		require.Equal(t, strings.Repeat("\x00", 4096), kv(), "%v wrote", args)
	}
	refused("has 8192 bytes, and region kv room for 4096 from 0 on: nothing was written; say "+
		"--length 4096",
		statusUsage, "put", "kv", "--input", path)
	refused("room for 96 from 4000 on", statusUsage, "put", "kv", "--offset", "4000", "--input",
		path)
	refused("the input has 8192 bytes, --length 16384", statusUsage, "put", "kv", "--length",
		"16KiB", "--input", path)
	refused("--offset 5000 is past its end", statusUsage, "put", "kv", "--offset", "5000",
		"--input", path)
	refused("region kv ends at 4096: nothing was written; say a smaller --offset", statusUsage,
		"put", "kv", "--offset", "4096", "--input", path)
	refused("the name of a region is empty", statusUsage, "put", "", "--input", path)
	refused("is a directory", statusUsage, "put", "kv", "--input", filepath.Dir(path))
	refused("--region model=FILE:rw", statusFailed, "put", "model", "--input", path)

	file, err := os.Open(path)
	require.NoError(t, err)
	defer file.Close()
	_, err = file.Seek(8000, 0)
	require.NoError(t, err)
	c, _, stderr := command(t, with("put", "kv")...)
	c.Stdin = file // what is left of it fits
	require.Zero(t, status(t, c.Run()), stderr)
	require.Equal(t, string(content[8000:])+strings.Repeat("\x00", 4096-192), kv())

	c, _, stderr = command(t, with("put", "kv")...)
	c.Stdin = bytes.NewReader(content) // a pipe
	require.Equal(t, statusFailed, status(t, c.Run()))
	require.Contains(t, stderr.String(), "after 4096 bytes: region kv is full, and the input "+
		"goes on: say --length 4096")
	require.Equal(t, string(content[:4096]), kv())
	c, _, stderr = command(t, with("put", "kv")...)
	c.Stdin = bytes.NewReader(content[1:4097]) // exactly as much as there is room for
	require.Zero(t, status(t, c.Run()), stderr)
	require.Equal(t, string(content[1:4097]), kv())
}
