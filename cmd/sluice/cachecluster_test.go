// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/internal/testing/etcdtest"
)

// TestCluster: three nodes join an etcd, a block goes in and out, a node leaves, etcd ends.
func TestCluster(t *testing.T) {
	members := etcdtest.Start(t, 1)
	url := members[0].URL
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	type server struct {
		*exec.Cmd
		stderr *lines
		socket string
	}
	var list []string
	serve := func(name string, args ...string) *server {
		cfg, err := parseCacheConfig("flags", []byte(quickConfig(name, "16MiB")))
		require.NoError(t, err)
		c := exec.Command(binary, append([]string{"cache", "serve"}, args...)...)
		errs, err := c.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		t.Cleanup(func() {
			if c.ProcessState == nil {
				_ = c.Process.Kill()
				_ = c.Wait()
			}
			_ = os.Remove(cfg.cache.Memory.Path)
			_ = os.Remove(cfg.socket)
		})
		list = append(list, name+"=unix:"+cfg.socket)
		return &server{c, readLines(errs), cfg.socket}
	}
	var servers []*server
	var config string // of the last one
	for k := range 3 {
		name := fmt.Sprintf("test-%d-%c", os.Getpid(), 'a'+k)
		config = filepath.Join(dir, name)
		// A lease by which the nodes stay also on a machine that stalls for some seconds.
		require.NoError(t, os.WriteFile(config, fmt.Appendf(nil,
			"%s[cluster]\netcd = [%q]\nlease = \"1m\"\nbytes_a_second = \"1MiB\"\n",
			quickConfig(name, "16MiB"), url), 0o600))
		servers = append(servers, serve(name, "--config", config))
	}
	for _, s := range servers {
		s.stderr.await(t, "is in the cluster")
	}
	in := func(args ...string) outcome { // a command about the cluster
		return sluice(t, append([]string{"cache", args[0], "--timeout", "1m"}, args[1:]...)...)
	}
	states := func() (serving int) {
		text := ok(t, in("stat", "--etcd", url, "--json")).stdout
		stat, isObject := decode(t, text).(map[string]any)
		require.True(t, isObject)
		nodes, isList := stat["nodes"].([]any)
		require.True(t, isList)
		for _, n := range nodes {
			node, isObject := n.(map[string]any)
			require.True(t, isObject)
			wantKeys(t, "a node", n, "name", "addresses", "weight", "generation", "load", "state",
				"requests", "late", "failed", "lost", "hedged", "report")
			require.EqualValues(t, 1, node["weight"])
			if node["state"] == "serving" {
				serving++
			}
		}
		return serving
	}
	require.Equal(t, 3, states())
	require.Contains(t, ok(t, in("stat", "--etcd", url)).stdout, "serving")

	block, back := filepath.Join(dir, "block"), filepath.Join(dir, "back")
	data := bytes.Repeat([]byte("kv"), 5001)
	require.NoError(t, os.WriteFile(block, data, 0o600))
	for k := range 8 {
		key := fmt.Sprint("hello", k)
		require.Contains(t, ok(t, in("put", "--etcd", url, "--hash", key, block)).stdout, "stored")
		require.Contains(t, ok(t, in("put", "--etcd", url, "--hash", key, block)).stdout, "known")
		ok(t, in("get", "--nodes", strings.Join(list, ","), "--hash", key, back))
		got, err := os.ReadFile(back)
		require.NoError(t, err)
		require.Equal(t, data, got)
	}
	o := in("get", "--etcd", url, "--hash", "bye", back)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "never stored")
	require.NotContains(t, o.stderr, "do not answer")
	require.Contains(t, ok(t, in("stat", "--etcd", url, "--prefix", "other")).stderr,
		"no node has joined")

	// What a namespace may have in the cluster holds at each node.
	require.NoError(t, putNamespace(t.Context(), url, "default", `{"priority":5}`))
	require.Eventually(t, func() bool {
		return strings.Contains(ok(t, askCache(t, servers[0].socket, "ls", "--json")).stdout,
			`"priority":5`)
	}, time.Minute, 10*time.Millisecond)

	// Who may write alone is told so by get, in place of a miss.
	require.NoError(t, putNamespace(t.Context(), url, "written",
		`{"readers":["none"],"writers":["local"]}`))
	require.Eventually(t, func() bool {
		o := in("get", "--etcd", url, "--namespace", "written", "--hash", "bye", back)
		return strings.Contains(o.stderr, "its readers do not name")
	}, time.Minute, 10*time.Millisecond)

	// A node drains by its weight, and comes back.
	text, err := os.ReadFile(config)
	require.NoError(t, err)
	for weight := range 2 {
		now := fmt.Appendf(bytes.Clone(text), "weight = %d\n", weight)
		require.NoError(t, os.WriteFile(config, now, 0o600))
		require.NoError(t, servers[2].Process.Signal(syscall.SIGHUP))
		require.Eventually(t, func() bool {
			return strings.Count(ok(t, in("stat", "--etcd", url, "--json")).stdout,
				`"weight": 0,`) == 1-weight
		}, time.Minute, 10*time.Millisecond)
	}
	require.Equal(t, 3, strings.Count(ok(t, in("stat", "--etcd", url, "--json")).stdout,
		`"bytes_a_second": 1048576`))

	// A node by flags alone.
	name := fmt.Sprintf("test-%d-flags", os.Getpid())
	quick := serve(name, "--name", name, "--memory", "16MiB", "--etcd", url)
	quick.stderr.await(t, "is in the cluster")
	require.NoError(t, quick.Process.Signal(syscall.SIGTERM))
	require.NoError(t, quick.Wait())
	list = list[:3]

	// A node leaves at once, and etcd's end changes nothing.
	require.NoError(t, servers[2].Process.Signal(syscall.SIGTERM))
	require.NoError(t, servers[2].Wait())
	require.Equal(t, 2, states())
	members[0].Kill()
	servers[0].stderr.await(t, "the directory does not answer")
	o = sluice(t, "cache", "stat", "--etcd", url, "--timeout", "1h")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "reach the cluster")
	require.Contains(t, o.stderr, "refuses the connection")
	require.Contains(t, o.stderr, "--nodes")
	o = ok(t, in("stat", "--nodes", strings.Join(list, ",")))
	require.Contains(t, o.stdout, "unreachable")
	require.NotContains(t, o.stderr, "--backend") // it is of this host
	o = in("get", "--nodes", strings.Join(list, ","), "--hash", "bye", back)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "nodes that do not answer")
	require.Contains(t, o.stderr, servers[2].socket)
	require.NotContains(t, o.stderr, "--backend", "the node is of this host")
	members[0].Start()
	servers[0].stderr.await(t, "the directory answers again")

	for _, args := range [][]string{{"cache", "stat", "--nodes", "a"},
		{"cache", "stat", "--nodes", list[0], "--etcd", url},
		{"cache", "stat", "--nodes", list[0], "--server", "/x"},
		{"cache", "stat", "--nodes", list[0], "--backend", "shm"},
		{"cache", "stat", "--nodes", list[0], "--backend", "tcp:listen=:0"},
		{"cache", "stat", "--backend", "tcp:plaintext=true"}, {"cache", "stat", "--prefix", "x"},
		{"cache", "stat", "--etcd", "localhost:2379"},
		{"cache", "serve", "--name", "a/b", "--memory", "64MiB"},
		{"cache", "serve", "--name", "a"}, {"cache", "serve", "--name", "a", "--config", "x"}} {
		require.Equal(t, statusUsage, sluice(t, args...).status, args)
	}
	require.Contains(t, ok(t, sluice(t, "cache", "serve", "--name", "a", "--memory", "64MiB",
		"--check")).stdout, "--name and --memory: config has no error")
}

// TestClusterOverTCP: a node of another host is reached as its config says, and not otherwise.
func TestClusterOverTCP(t *testing.T) {
	ours, _ := certificates(t, time.Hour)
	theirs, _ := certificates(t, time.Hour)
	var files byname.TCP
	require.NoError(t, byname.SetOptions(&files, strings.Split(strings.TrimPrefix(ours, "tcp:"),
		",")))
	for name, c := range map[string]struct{ config, good, bad, says string }{
		"certificates": {fmt.Sprintf("[identity]\ncertificate = %q\nkey = %q\nauthority = %q\n",
			files.Certificate, files.Key, files.Authority), ours, theirs, "authorit"},
		"plain": {"plaintext = true\n", "tcp", ours, "TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			_, config := cacheDir(t, "listen = [\"127.0.0.1:0\"]\n"+c.config)
			s := startCache(t, config)
			_, rest, _ := strings.Cut(s.line, ", ")
			address, _, isThere := strings.Cut(rest, ": ")
			require.True(t, isThere, s.line)
			in := func(backend string, args ...string) outcome {
				args = append([]string{"cache", args[0], "--nodes", "node=tcp:" + address,
					"--hash", "hello"}, args[1:]...)
				if backend != "" {
					args = append(args, "--backend", backend)
				}
				return sluice(t, args...)
			}
			require.Contains(t, ok(t, in(c.good, "put", config, "--timeout", "1m")).stdout,
				"stored")
			text, err := os.ReadFile(config)
			require.NoError(t, err)
			require.Equal(t, string(text), ok(t, in(c.good, "get", "-", "--timeout", "1m")).stdout)
			o := in(c.bad, "get", "-")
			require.Equal(t, statusFailed, o.status)
			require.Contains(t, o.stderr, c.says)
			o = in("", "get", "-")
			require.Equal(t, statusFailed, o.status)
			require.Contains(t, o.stderr, "--backend")
		})
	}
}
