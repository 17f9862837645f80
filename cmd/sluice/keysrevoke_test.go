// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRevokedMember: an agent that runs refuses a member whose certificate is revoked, says so in
// its log, and serves the others.
func TestRevokedMember(t *testing.T) {
	dir := cluster(t, "agent", "user", "other")
	list := filepath.Join(dir, "ca-revoked.pem")
	require.Contains(t, ok(t, sluice(t, "keys", "revoke", dir)).stdout, "no certificate is added")
	a := startAgent(t, append(as(dir, "agent"), "--region", "kv=4KiB", "--revoked", list)...)
	ls := func(name string) outcome {
		return sluice(t, append([]string{"ls", "--peer", a.at}, as(dir, name)...)...)
	}
	ok(t, ls("user"))

	said := ok(t, sluice(t, "keys", "revoke", dir, "user")).stdout
	serial, _, _ := strings.Cut(strings.TrimPrefix(said, "serial number "), " ")
	o := ls("user")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "not revoked")
	ok(t, ls("other"))

	said = ok(t, sluice(t, "keys", "issue", dir, "user", "--host", "127.0.0.1", "--force")).stdout
	require.Contains(t, said, "keys revoke "+dir+" --serial "+serial)
	ok(t, ls("user")) // with a new certificate
	require.Zero(t, sluice(t, "keys", "revoke", dir, "other").status)
	require.Equal(t, statusFailed, ls("other").status)
	a.awaitLog(t, "is revoked", 2)
	code, _ := a.end(t, syscall.SIGTERM)
	require.Zero(t, code)
	log := a.stderr.String()
	require.Contains(t, log, `certificate of "user", serial number `+serial+`, is revoked`)
	require.Contains(t, log, `certificate of "other"`)
	require.Equal(t, 2, strings.Count(log, "is revoked"))
}

// TestKeysAndAgentJSON: what programs read.
func TestKeysAndAgentJSON(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	wantKeys(t, "init", decode(t, ok(t, sluice(t, "keys", "init", dir, "--json")).stdout),
		"authority", "key_id", "valid_until", "cert", "key")
	issue := func(args ...string) any {
		args = append([]string{"keys", "issue", dir, "node", "--host", "127.0.0.1", "--json"},
			args...)
		return decode(t, ok(t, sluice(t, args...)).stdout)
	}
	first := issue()
	wantKeys(t, "issue", first, "name", "hosts", "serial", "valid_until", "cert", "key", "ca")
	second := issue("--force").(map[string]any)
	require.Equal(t, first.(map[string]any)["serial"], second["replaced_serial"])
	revoked := decode(t, ok(t, sluice(t, "keys", "revoke", dir, "node", "--json")).stdout)
	wantKeys(t, "revoke", revoked, "serial", "list")
	require.Equal(t, second["serial"], revoked.(map[string]any)["serial"])

	ok(t, sluice(t, "keys", "init", dir, "--force"))
	o := sluice(t, "keys", "revoke", dir, "--serial", "1")
	require.Contains(t, o.stderr, "another authority's")

	path, _ := randomFile(t, 100)
	c, _, _ := command(t, "agent", "--listen", "127.0.0.1:0", "--plaintext", "--json", "--region",
		"kv=4KiB", "--region", "f="+path)
	c.Stdout = nil
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill() })
	var said struct {
		ServingAt string `json:"serving_at"`
		Regions   []struct {
			Name     string
			Size     uint64
			ReadOnly bool `json:"read_only"`
		}
	}
	require.NoError(t, json.NewDecoder(out).Decode(&said))
	ok(t, sluice(t, "ls", "--plaintext", "--peer", said.ServingAt))
	require.Len(t, said.Regions, 2)
	require.Equal(t, uint64(100), said.Regions[1].Size)
	require.True(t, said.Regions[1].ReadOnly)
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	rest, err := io.ReadAll(out)
	require.NoError(t, err)
	require.Empty(t, strings.TrimSpace(string(rest)))
	require.Zero(t, status(t, c.Wait()))
}

func TestRevokeRefusesNonsense(t *testing.T) {
	dir := cluster(t)
	for want, args := range map[string][]string{
		"directory is missing": {},
		"want one of them":     {dir, "x", "--serial", "1"},
		"is not there":         {dir, "x"},
		"hexadecimal":          {dir, "--serial", "xyz"},
		"no authority":         {t.TempDir(), "--serial", "1"},
		"unexpected argument":  {dir, "x", "y"},
	} {
		o := sluice(t, append([]string{"keys", "revoke"}, args...)...)
		require.Equal(t, statusUsage, o.status, "%v", args)
		require.Contains(t, o.stderr, want)
	}
	o := sluice(t, "ls", "--plaintext", "--peer", "127.0.0.1:1", "--revoked", "x")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "--revoked and --plaintext")
}
