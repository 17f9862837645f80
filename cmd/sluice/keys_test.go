// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// cluster makes an authority with members, and returns its directory.
func cluster(t *testing.T, members ...string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ca")
	ok(t, sluice(t, "keys", "init", dir))
	for _, m := range members {
		ok(t, sluice(t, "keys", "issue", dir, m, "--host", "127.0.0.1"))
	}
	return dir
}

func ok(t *testing.T, o outcome) outcome {
	t.Helper()
	if o.status != 0 {
		t.Fatalf("%+v", o)
	}
	return o
}

// as are the flags of a member.
func as(dir, name string) []string {
	return []string{"--cert", filepath.Join(dir, name+".pem"), "--key",
		filepath.Join(dir, name+"-key.pem"), "--ca", filepath.Join(dir, "ca.pem")}
}

func TestKeys(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	said := ok(t, sluice(t, "keys", "init", dir, "--name", "ours")).stdout
	said += ok(t, sluice(t, "keys", "issue", dir, "node", "--host", "node.test", "--host",
		"10.0.0.2", "--validity", "48h")).stdout
	for _, want := range []string{"ours", "node.test", "10.0.0.2", "copy to the host of node",
		"node-key.pem", "stays here", "sluice ls --peer HOST:PORT --cert " + filepath.Join(dir,
			"node.pem")} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in %s", want, said)
		}
	}
	require.NotContains(t, said, "as the authority's own")
	require.Contains(t, ok(t, sluice(t, "keys", "issue", dir, "long", "--validity",
		"200000h")).stdout, ", as the authority's own, serial", "it was cut, and nobody says so")
	for _, name := range []string{"ca-key.pem", "node-key.pem"} {
		path := filepath.Join(dir, name)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v (%v)", name, info.Mode(), err)
		}
		for _, line := range strings.Split(string(text), "\n") {
			if line != "" && strings.Contains(said, line) {
				t.Errorf("a line of %s is in the output", name)
			}
		}
	}
	if _, err := tls.LoadX509KeyPair(filepath.Join(dir, "node.pem"),
		filepath.Join(dir, "node-key.pem")); err != nil {
		t.Error(err)
	}
	if openssl, err := exec.LookPath("openssl"); err == nil {
		for _, purpose := range []string{"sslserver", "sslclient"} {
			out, err := exec.Command(openssl, "verify", "-x509_strict", "-CAfile",
				filepath.Join(dir, "ca.pem"), "-purpose", purpose,
				"-verify_ip", "10.0.0.2", filepath.Join(dir, "node.pem")).CombinedOutput()
			if err != nil {
				t.Errorf("openssl verify for %s: %v\n%s", purpose, err, out)
			}
		}
	}
	before, err := os.ReadFile(filepath.Join(dir, "node.pem"))
	require.NoError(t, err)
	if o := sluice(t, "keys", "issue", dir, "node"); o.status != statusUsage ||
		!strings.Contains(o.stderr, "--force") {
		t.Errorf("over files that are there: %+v", o)
	}
	if o := sluice(t, "keys", "init", dir); o.status != statusUsage ||
		!strings.Contains(o.stderr, "--force") {
		t.Errorf("over an authority that is there: %+v", o)
	}
	if after, err := os.ReadFile(filepath.Join(dir, "node.pem")); err != nil ||
		string(after) != string(before) {
		t.Errorf("a certificate was replaced (%v)", err)
	}
	ok(t, sluice(t, "keys", "issue", dir, "node", "--force"))
}

// doctor looks at certificates before anybody else does.
func TestDoctorLooksAtCertificates(t *testing.T) {
	dir := cluster(t, "node")
	ok(t, sluice(t, "keys", "issue", dir, "short", "--validity", "24h"))
	flags := func(name string) []string {
		f := as(dir, name)
		return []string{"doctor", "--tcp-cert", f[1], "--tcp-key", f[3], "--tcp-ca", f[5]}
	}
	if o := ok(t, sluice(t, flags("node")...)); !strings.Contains(o.stdout,
		`of "node", by "sluice `) ||
		!strings.Contains(o.stdout, `", for 127.0.0.1`) || strings.Contains(o.stdout, "ends soon") {
		t.Errorf("%s", o.stdout)
	}
	if o := ok(t, sluice(t, flags("short")...)); !strings.Contains(o.stdout, "ends soon") {
		t.Errorf("%s", o.stdout)
	}
	key := filepath.Join(dir, "node-key.pem")
	require.NoError(t, os.Chmod(key, 0o644))
	if o := ok(t, sluice(t, flags("node")...)); !strings.Contains(o.stdout, "chmod 600 "+key) {
		t.Errorf("%s", o.stdout)
	}
}
