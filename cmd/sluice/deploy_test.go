// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/etcdtest"
	"github.com/sluicehq/sluice/kv/cache"
)

// TestDeployedConfigs: what the unit and the DaemonSet start takes its config and its flags.
func TestDeployedConfigs(t *testing.T) {
	for file, tc := range map[string]struct {
		config string
		args   *regexp.Regexp // the first group of each match is some of them
	}{
		"sluice-cache.service":      {"cache.toml", regexp.MustCompile(`(?m)^ExecStart=\S+ (.+)$`)},
		"kubernetes/daemonset.yaml": {"kubernetes/cache.toml", regexp.MustCompile(`(?m)^ {12}- (\S+)$`)},
	} {
		deploy, err := filepath.Abs("../../deploy")
		require.NoError(t, err)
		text, err := os.ReadFile(filepath.Join(deploy, file))
		require.NoError(t, err)
		var args []string
		for _, m := range tc.args.FindAllSubmatch(text, -1) {
			args = append(args, strings.Fields(string(m[1]))...)
		}
		require.Subset(t, args, []string{"cache", "serve"}, file)
		line := strings.NewReplacer("/etc/sluice/cache.toml", filepath.Join(deploy, tc.config),
			"$(HOST_IP)", "10.0.0.7").Replace(strings.Join(args, " "))
		ok(t, sluice(t, append(strings.Fields(line), "--check")...))
	}
}

// TestCacheDrain: a node is ready once it is in the cluster. SIGTERM takes it out of the directory
// first; then what runs may end, and the memory file stays. The alerts are about metrics that there
// are.
func TestCacheDrain(t *testing.T) {
	members := etcdtest.Start(t, 1)
	members[0].Kill()
	name := fmt.Sprintf("drain-%d", os.Getpid())
	dir, config := cacheDir(t, `metrics = "127.0.0.1:0"`, `drain_timeout = "5m"`)
	text, err := os.ReadFile(config)
	require.NoError(t, err)
	text = fmt.Appendf(text, "[[namespace]]\nname = \"slow\"\nbytes_a_second = 4096\n"+
		"flow = \"memory-only\"\n"+
		"[cluster]\netcd = [%q]\nlease = \"1m\"\n", members[0].URL)
	require.NoError(t, os.WriteFile(config, []byte(strings.Replace(string(text), `"node"`,
		`"`+name+`"`, 1)), 0o600))
	s := startCache(t, config)
	at := filepath.Join(dir, "s")
	_, metrics, _ := strings.Cut(s.stderr.await(t, "metrics are at "), "metrics are at ")
	get := func(path string) (status int, body string) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		q, err := http.NewRequestWithContext(ctx, http.MethodGet,
			strings.TrimSuffix(metrics, "/metrics")+path, nil)
		require.NoError(t, err)
		answer, err := http.DefaultClient.Do(q)
		require.NoError(t, err)
		p, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		return answer.StatusCode, string(p)
	}
	want := func(path string, status int, text string) {
		t.Helper()
		got, body := get(path)
		require.Equal(t, status, got, body)
		require.Contains(t, body, text)
	}
	want("/readyz", http.StatusServiceUnavailable, "not in the cluster yet")
	want("/healthz", http.StatusOK, "answers")
	want("/metrics", http.StatusOK, "sluice_cache_in_cluster 0")
	members[0].Start()
	s.stderr.await(t, "is in the cluster")
	want("/readyz", http.StatusOK, "ready")
	want("/metrics", http.StatusOK, "sluice_cache_in_cluster 1")

	ok(t, askCache(t, at, "put", "--hash", "a", config))
	ok(t, askCache(t, at, "get", "--hash", "a", filepath.Join(dir, "back")))
	_, there := get("/metrics")
	rules, err := os.ReadFile("../../deploy/prometheus-rules.yaml")
	require.NoError(t, err)
	for _, metric := range regexp.MustCompile(`sluice_cache_\w+`).FindAllString(string(rules), -1) {
		require.True(t, strings.Contains(there, "# TYPE "+metric+" "), metric)
	}

	// A Store that lasts: of a namespace that copies little a second.
	u, err := dialCache(t.Context(), at, "client")
	require.NoError(t, err)
	defer func() { require.NoError(t, u.close()) }()
	const blocks = 12
	require.NoError(t, u.allocate(t.Context(), blocks, 1<<20))
	space, err := u.Namespace(t.Context(), "slow", [32]byte{})
	require.NoError(t, err)
	keys := make([]cache.Key, blocks)
	for k := range keys {
		keys[k] = cache.Key{byte(1 + k)}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	stored := make(chan error, 1)
	go func() {
		_, err := space.Store(ctx, keys, u.place(blocks))
		stored <- err
	}()
	require.Eventually(t, func() bool {
		_, body := get("/metrics")
		return strings.Contains(body, "sluice_cache_requests_running 1")
	}, time.Minute, 10*time.Millisecond)

	require.NoError(t, s.Process.Signal(syscall.SIGTERM))
	s.stderr.await(t, "drains for at most")
	s.stderr.await(t, "has left the cluster")
	want("/readyz", http.StatusServiceUnavailable, "drains")
	want("/healthz", http.StatusOK, "answers")
	require.Contains(t, ok(t, sluice(t, "cache", "stat", "--etcd", members[0].URL, "--timeout",
		"1m")).stderr, "no node has joined")
	require.Eventually(t, func() bool {
		_, err := space.Match(t.Context(), keys)
		return err != nil && strings.Contains(err.Error(), "about to end")
	}, time.Minute, 10*time.Millisecond)
	select {
	case err := <-stored:
		t.Fatalf("the request that ran has ended: %v", err)
	default:
	}
	cancel()
	<-stored
	require.NoError(t, s.Wait())
	require.Contains(t, startCache(t, config).line, "attached ")
}

// TestReadmeCluster runs the five commands of README for a cluster, with names and an etcd of its
// own.
func TestReadmeCluster(t *testing.T) {
	url := etcdtest.Start(t, 1)[0].URL
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	text, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, section, _ := strings.Cut(string(text), "### One cache over three nodes")
	parts := strings.Split(section, "```\n")
	block := parts[1] + parts[3]
	var names []string
	for _, n := range []string{"a", "b", "c"} {
		name := fmt.Sprintf("readme-%d-%s", os.Getpid(), n)
		names = append(names, name)
		t.Cleanup(func() { _ = os.Remove("/dev/shm/sluice-cache-" + name) })
	}
	block = strings.NewReplacer("./sluice", binary, "http://127.0.0.1:2379", url, "in a b c;",
		"in "+strings.Join(names, " ")+";", "README.md", "../../README.md").Replace(block)
	lines := strings.Split(strings.TrimSpace(block), "\n")
	require.Len(t, lines, 5)
	require.Regexp(t, `^etcd .*&$`, lines[0])

	servers := exec.Command("sh", "-c", "trap 'trap - TERM; kill 0' TERM; "+lines[1]+"; wait")
	servers.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	stderr, err := servers.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, servers.Start())
	t.Cleanup(func() {
		_ = syscall.Kill(-servers.Process.Pid, syscall.SIGTERM)
		_ = servers.Wait()
	})
	said := readLines(stderr)
	for range names {
		said.await(t, "is in the cluster")
	}
	for k, want := range []string{"stored", string(text), names[2]} {
		out, err := exec.Command("sh", "-c", "exec 2>&1; "+lines[2+k]).Output()
		require.NoError(t, err, "%s\n%s", lines[2+k], out)
		require.Contains(t, string(out), want)
	}
}
