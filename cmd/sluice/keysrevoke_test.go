// SPDX-License-Identifier: Apache-2.0

package main

import (
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
	code, _ := a.end(t, syscall.SIGTERM)
	require.Zero(t, code)
	log := a.stderr.String()
	require.Contains(t, log, `certificate of "user", serial number `+serial+`, is revoked`)
	require.Contains(t, log, `certificate of "other"`)
	require.Equal(t, 2, strings.Count(log, "is revoked"))
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
