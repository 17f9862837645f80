// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/directory"
)

const quickMemory = "[memory]\npath = \"/x/m\"\nbytes = \"64MiB\"\n"

// secretFile writes a secret.
func secretFile(t *testing.T, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	require.NoError(t, os.Chmod(path, mode))
	return path
}

// TestAccessOfConfig: of the config, the directory and the table for all others the first that
// lists anybody counts; a namespace without a name is nobody's where any of them does.
func TestAccessOfConfig(t *testing.T) {
	salt := secretFile(t, strings.Repeat("s", saltMin), 0o600)
	cfg, err := parseCacheConfig("test", fmt.Appendf(nil, "%s[[namespace]]\nname = \"own\"\n"+
		"readers = [\"a\"]\n[[namespace]]\nname = \"quota\"\npriority = 3\nsalt = %q\n"+
		"[[namespace]]\nname = \"*\"\nwriters = [\"local\"]\n", quickMemory, salt))
	require.NoError(t, err)
	require.NoError(t, cfg.readSecrets())
	m := &membership{cfg: cfg}
	others := serve.Access{Writers: []string{serve.Local}}
	nobody := serve.Access{Readers: []string{}, Writers: []string{}}
	quota := others
	quota.Salt = []byte(strings.Repeat("s", saltMin))
	require.Equal(t, serve.Access{Readers: []string{"a"}}, m.access(cfg, "own"))
	require.Equal(t, quota, m.access(cfg, "quota"))
	require.Equal(t, others, m.access(cfg, "etcd"))
	require.Equal(t, nobody, m.access(cfg, ""))
	m.view = &directory.View{Namespaces: map[string]directory.Namespace{
		"own": {Readers: []string{"b"}}, "quota": {Readers: []string{"c"}}, "etcd": {Priority: 1}}}
	require.Equal(t, serve.Access{Readers: []string{"a"}}, m.access(cfg, "own"))
	require.Equal(t, serve.Access{Readers: []string{"c"}, Salt: quota.Salt},
		m.access(cfg, "quota"))
	require.Equal(t, others, m.access(cfg, "etcd"))

	open, err := parseCacheConfig("test", []byte(quickMemory))
	require.NoError(t, err)
	m = &membership{cfg: open}
	require.Equal(t, serve.Access{}, m.access(open, ""))
	require.Equal(t, serve.Access{}, m.access(open, "any"))
}

// TestSecretsOfConfig: serve refuses nonsense in the keys about security, and names key and line.
func TestSecretsOfConfig(t *testing.T) {
	const space = quickMemory + "[[namespace]]\nname = \"a\"\n"
	const cluster = quickMemory + "[cluster]\netcd = [\"http://a:1\"]\n"
	short, shown := secretFile(t, "short", 0o600), secretFile(t, strings.Repeat("s", 64), 0o644)
	for _, c := range []struct{ text, want string }{
		{space + "readers = []\n", "line 6: namespace.readers: []: want a list"},
		{space + "writers = \"a\"\n", "line 6: namespace.writers: a: want a list"},
		{space + "readers = [\"\"]\n", "line 6: namespace.readers: readers: name \"\""},
		{space + fmt.Sprintf("salt = %q\n", short), "line 6: namespace.salt: "},
		{space + fmt.Sprintf("salt = %q\n", shown), "line 6: namespace.salt: others may read"},
		{space + "salt = \"/no/such\"\n", "line 6: namespace.salt: open /no/such"},
		{fmt.Sprintf("seal = %q\n", short) + quickMemory, "line 1: seal: key file"},
		{"seal = \"/no\"\n" + quickMemory + "extent = \"1MiB\"\n[[disk]]\npath = \"/x/d\"\n" +
			"bytes = \"64MiB\"\nextent = \"1MiB\"\n",
			"Extent of sealed blocks 1048576: from 1052672"},
		{cluster + "etcd_key = \"k\"\n", "line 4: cluster.etcd_certificate: etcd_certificate"},
		{cluster + "etcd_certificate = \"c\"\netcd_key = \"k\"\netcd_authority = \"a\"\n",
			"line 5: cluster.etcd: with a certificate all of them are of https"},
		{strings.Replace(cluster, "http:", "https:", 1) +
			"etcd_certificate = \"/no/c\"\netcd_key = \"k\"\netcd_authority = \"a\"\n",
			"line 6: cluster.etcd_certificate: identity: "},
	} {
		cfg, err := parseCacheConfig("config", []byte(c.text))
		if err == nil {
			err = cfg.readSecrets()
		}
		require.ErrorContains(t, err, c.want, c.text)
	}
}

// TestNodeCertificate: a node lists the name in its certificate, unless its config has another one.
func TestNodeCertificate(t *testing.T) {
	authority, own, err := testkit.NewAuthority("cluster", time.Hour)
	require.NoError(t, err)
	pair, _, err := authority.Issue(testkit.Member{Name: "a", Hosts: []string{"a.cluster",
		"127.0.0.1"}, Valid: time.Hour})
	require.NoError(t, err)
	cert, key, err := pair.Store(t.TempDir(), "a")
	require.NoError(t, err)
	cfg, err := parseCacheConfig("test", []byte(quickMemory))
	require.NoError(t, err)
	require.Empty(t, cfg.node(nil).Certificate)
	cfg.own, err = identity.FromFiles(cert, key, secretFile(t, string(own.Cert), 0o600))
	require.NoError(t, err)
	require.Equal(t, "a.cluster", cfg.node(nil).Certificate)
	cfg.cluster.certificate = "other"
	require.Equal(t, "other", cfg.node(nil).Certificate)
}

// TestNothingSecretInEtcd: what a node has written to etcd is its description, while a client has
// leased memory to it and has stored a block.
func TestNothingSecretInEtcd(t *testing.T) {
	url := etcdtest.Start(t, 1)[0].URL
	keys := secretFile(t, strings.Repeat("4b", 32)+"\n", 0o600)
	dir, config := cacheDir(t, fmt.Sprintf("seal = %q\n[cluster]\netcd = [%q]\nlease = \"1m\"",
		keys, url))
	c := exec.Command(binary, "cache", "serve", "--config", config)
	errs, err := c.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	readLines(errs).await(t, "is in the cluster")
	socket := filepath.Join(dir, "s")
	u, err := openModelUser(t.Context(), socket, "user", 4096, 4)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, u.close()) })

	read := func() map[string][]byte {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v3/kv/range",
			strings.NewReader(`{"key":"AA==","range_end":"AA=="}`)) // all that there is
		require.NoError(t, err)
		a, err := http.DefaultClient.Do(q)
		require.NoError(t, err)
		defer a.Body.Close()
		var list struct {
			Kvs []struct{ Key, Value []byte }
		}
		require.NoError(t, json.NewDecoder(a.Body).Decode(&list))
		found := map[string][]byte{}
		for _, e := range list.Kvs {
			found[string(e.Key)] = e.Value
		}
		return found
	}
	found := read()
	require.Len(t, found, 1)
	var n directory.Node
	d := json.NewDecoder(bytes.NewReader(found["sluice/nodes/node"]))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(&n))
	load := n.Load
	require.Equal(t, directory.Node{Name: "node", Addresses: []string{"unix:" + socket}, Weight: 1,
		Generation: n.Generation, Load: load}, n)
	again, err := json.Marshal(&n)
	require.NoError(t, err)
	require.JSONEq(t, string(again), string(found["sluice/nodes/node"]))

	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.NoError(t, c.Wait())
	require.Eventually(t, func() bool { return len(read()) == 0 }, time.Minute,
		10*time.Millisecond)
}
