// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// cacheDir has a config for a cache of 16 MiB, with a disk of 32; more is behind it.
func cacheDir(t *testing.T, more ...string) (dir, config string) {
	t.Helper()
	dir = t.TempDir()
	config = filepath.Join(dir, "cache.toml")
	text := fmt.Sprintf("name = \"node\"\nsocket = %q\n%s\n[memory]\npath = %q\n"+
		"bytes = \"16MiB\"\n[[disk]]\npath = %q\nbytes = \"32MiB\"\n", filepath.Join(dir, "s"),
		strings.Join(more, "\n"), filepath.Join(dir, "memory"), filepath.Join(dir, "disk"))
	require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
	return dir, config
}

// cacheServer is a server that the test has started; its first line has come.
type cacheServer struct {
	*exec.Cmd
	line   string
	stderr *lines
}

// lines are what a process writes, for who waits for one.
type lines struct{ c chan string }

func readLines(r io.Reader) *lines {
	l := &lines{make(chan string, 100)}
	go func() {
		for s := bufio.NewScanner(r); s.Scan(); {
			l.c <- s.Text()
		}
		close(l.c)
	}()
	return l
}

// await returns the first line with a text in it.
func (l *lines) await(t *testing.T, text string) string {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case line, ok := <-l.c:
			require.True(t, ok, "no line with %q", text)
			if strings.Contains(line, text) {
				return line
			}
		case <-limit:
			t.Fatalf("no line with %q", text)
		}
	}
}

func startCache(t *testing.T, config string, env ...string) *cacheServer {
	t.Helper()
	c := exec.Command(binary, "cache", "serve", "--config", config)
	c.Env = append(os.Environ(), env...)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	errs, err := c.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		if c.ProcessState == nil {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	})
	s := &cacheServer{Cmd: c, stderr: readLines(errs)}
	s.line = readLines(out).await(t, "serves at")
	return s
}

// askCache asks a server, which may answer late, as one of a busy machine does.
func askCache(t *testing.T, server string, args ...string) outcome {
	t.Helper()
	return sluice(t, append([]string{"cache", args[0], "--server", server, "--timeout", "1m"},
		args[1:]...)...) // of two limits the last one holds
}

// TestCacheDemo: what README says to try: every block that was committed outlives a SIGKILL under
// load.
func TestCacheDemo(t *testing.T) {
	o := ok(t, sluice(t, "cache", "demo"))
	var served, of int
	last := strings.Split(strings.TrimSpace(o.stdout), "\n")
	_, err := fmt.Sscanf(last[len(last)-1], "%d of %d committed blocks are served", &served, &of)
	require.NoError(t, err, o.stdout)
	require.Equal(t, of, served)
	require.GreaterOrEqual(t, of, demoEnough)
}

func TestCacheCommands(t *testing.T) {
	dir, config := cacheDir(t, `metrics = "127.0.0.1:0"`)
	at := filepath.Join(dir, "s")
	require.Equal(t, config+": config has no error\n",
		ok(t, sluice(t, "cache", "serve", "--config", config, "--check")).stdout)
	s := startCache(t, config)
	require.Contains(t, s.line, "memory is empty")
	var fs unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &fs))
	if fs.Type != unix.TMPFS_MAGIC {
		s.stderr.await(t, "is not on a tmpfs")
	}

	block, back := filepath.Join(dir, "block"), filepath.Join(dir, "back")
	require.NoError(t, os.WriteFile(block, bytes.Repeat([]byte("kv"), 5001), 0o600))
	require.Contains(t, ok(t, askCache(t, at, "put", "--hash", "hello", block)).stdout, "stored")
	put := decode(t, ok(t, askCache(t, "unix:"+at, "put", "--hash", "hello", block,
		"--json")).stdout)
	wantKeys(t, "what was stored", put, "key", "bytes", "outcome")
	require.Equal(t, "known", put.(map[string]any)["outcome"])
	ok(t, askCache(t, at, "get", "--hash", "hello", back))
	want, err := os.ReadFile(block)
	require.NoError(t, err)
	got, err := os.ReadFile(back)
	require.NoError(t, err)
	require.Equal(t, want, got)

	o := askCache(t, at, "put", "--hash", "hello", config)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "another block under this key")
	o = askCache(t, at, "get", "--hash", "bye", back)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "never stored")
	o = askCache(t, at, "get", "--hash", "x", "--namespace", "no", "-")
	require.Contains(t, o.stderr, "sluice cache ls")
	o = askCache(t, at, "get", "hello", "-")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "32 hexadecimal digits")
	o = askCache(t, at, "put", "--hash", "x", config, "--namespace", "\xff")
	require.Contains(t, o.stderr, "in UTF-8")
	o = askCache(t, filepath.Join(dir, "none"), "stat")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "start sluice cache serve")

	require.Contains(t, ok(t, askCache(t, at, "ls")).stdout, "default")
	line, object := decode(t, ok(t, askCache(t, at, "ls", "default",
		"--json")).stdout), map[string]any{}
	object, isObject := line.(map[string]any)
	require.True(t, isObject)
	require.EqualValues(t, 10002, object["bytes"])
	wantKeys(t, "a block", line, "key", "bytes", "in_memory", "on_disk")

	report := decode(t, ok(t, sluice(t, "cache", "stat", "--server", at, "--json")).stdout)
	wantKeys(t, "the report", report, "name", "pid", "started", "attached", "clients", "running",
		"requests", "tiers", "namespaces", "disks", "loads", "stores", "loaded_bytes",
		"stored_bytes", "swapped_in", "swapped_out", "unwritten", "unproven",
		"expired", "held", "refused_hints")
	values, isObject := report.(map[string]any)
	require.True(t, isObject)
	wantKeys(t, "the tiers", values["tiers"], "memory", "disk")
	requests, isObject := values["requests"].(map[string]any)
	require.True(t, isObject)
	wantKeys(t, "the requests", requests, "match", "load", "store")
	wantKeys(t, "a request", requests["load"], "seconds", "at_most_us")
	require.Contains(t, ok(t, sluice(t, "cache", "stat", "--server", at)).stdout,
		"1 of 1 blocks")

	// SIGTERM drains and ends well, and the next one has what was there
	require.NoError(t, s.Process.Signal(syscall.SIGTERM))
	s.stderr.await(t, "drains")
	require.NoError(t, s.Wait())
	require.NoFileExists(t, at)
	s = startCache(t, config)
	require.Contains(t, s.line, "attached 1 blocks")
	ok(t, askCache(t, at, "get", "--hash", "hello", back))
}

// TestCacheServeTwice: two servers of one directory, or of one socket; the error says which it is,
// and the first one goes on.
func TestCacheServeTwice(t *testing.T) {
	dir, config := cacheDir(t, `start_timeout = "100ms"`)
	s := startCache(t, config)
	o := sluice(t, "cache", "serve", "--config", config)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "another process serves at")

	text, err := os.ReadFile(config)
	require.NoError(t, err)
	other := filepath.Join(dir, "other.toml")
	require.NoError(t, os.WriteFile(other, bytes.Replace(text, []byte(`/s"`), []byte(`/s2"`), 1),
		0o600))
	o = sluice(t, "cache", "serve", "--config", other)
	require.Equal(t, statusFailed, o.status)
	pid := fmt.Sprint("pid ", s.Process.Pid)
	require.Contains(t, o.stderr, "waits for "+pid+", which has "+filepath.Join(dir, "memory"))
	require.Contains(t, o.stderr, "another cache has it")
	require.Contains(t, o.stderr, "stop "+pid)
	ok(t, askCache(t, filepath.Join(dir, "s"), "stat"))
}

// TestSocketOfAKilledServer: a process that ends gives its socket to one that has just started.
func TestSocketOfAKilledServer(t *testing.T) {
	c := &cacheConfig{socket: filepath.Join(t.TempDir(), "s")}
	before, err := net.Listen("unix", c.socket)
	require.NoError(t, err)
	go func() {
		_, _ = before.Accept()
		_ = before.Close()
	}()
	list, err := c.openListeners(time.Minute)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.NoError(t, list[0].Close())
}

// TestCacheReload: SIGHUP has all that namespaces may have read again; nonsense changes nothing. It
// holds from the start on, also for namespaces that no client has opened yet.
func TestCacheReload(t *testing.T) {
	dir, config := cacheDir(t)
	at := filepath.Join(dir, "s")
	s := startCache(t, config)
	ok(t, askCache(t, at, "put", "--hash", "a", config))
	text, err := os.ReadFile(config)
	require.NoError(t, err)
	reload := func(more string) string {
		require.NoError(t, os.WriteFile(config, append(bytes.Clone(text), more...), 0o600))
		require.NoError(t, s.Process.Signal(syscall.SIGHUP))
		return s.stderr.await(t, "SIGHUP")
	}
	listed := func() string { return ok(t, askCache(t, at, "ls")).stdout }
	reload("[[namespace]]\nname = \"default\"\nmemory_quota = \"8MiB\"\npriority = 4\n" +
		"flow = \"memory-only\"\nttl = \"2h\"\n")
	require.Regexp(t, `default +\w+ +4 .* 8 MiB .* memory-only +7200`, listed())
	require.Contains(t, reload("[[namespace]]\nname = \"default\"\npriority = 11\n"),
		"line 12: namespace.priority: 11: want")
	require.Regexp(t, `default +\w+ +4 .* 8 MiB .* memory-only +7200`, listed())
	require.NoError(t, s.Process.Signal(syscall.SIGTERM))
	require.NoError(t, s.Wait())
	text = append(text,
		"[[namespace]]\nname = \"*\"\nmemory_quota = \"4MiB\"\npriority = 5\n"...)
	require.NoError(t, os.WriteFile(config, text, 0o600))
	s = startCache(t, config)
	require.Regexp(t, `default +\w+ +5 .* 4 MiB .* write-through +0`, listed())
	reload("[[namespace]]\nname = \"default\"\npriority = 6\n")
	require.Regexp(t, `default +\w+ +6 .* write-through +0`, listed())
}

// TestCacheReloadEarly: a SIGHUP while the server waits for its files is done once it has them.
func TestCacheReloadEarly(t *testing.T) {
	dir, config := cacheDir(t)
	first := startCache(t, config)
	text, err := os.ReadFile(config)
	require.NoError(t, err)
	other := filepath.Join(dir, "other.toml")
	require.NoError(t, os.WriteFile(other, bytes.Replace(text, []byte(`/s"`), []byte(`/s2"`), 1),
		0o600))
	c := exec.Command(binary, "cache", "serve", "--config", other)
	errs, err := c.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	for {
		conn, err := net.Dial("unix", filepath.Join(dir, "s2"))
		if err == nil {
			require.NoError(t, conn.Close())
			break
		}
		require.NoError(t, c.Process.Signal(syscall.Signal(0)), "it has ended")
		runtime.Gosched()
	}
	require.NoError(t, c.Process.Signal(syscall.SIGHUP))
	require.NoError(t, first.Process.Signal(syscall.SIGTERM))
	readLines(errs).await(t, "is read")
}

// TestCacheSystemd: the service tells systemd that it is ready, alive, and about to end.
func TestCacheSystemd(t *testing.T) {
	dir, config := cacheDir(t)
	path := filepath.Join(dir, "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	defer systemd.Close()
	told := func() string {
		require.NoError(t, systemd.SetReadDeadline(time.Now().Add(time.Minute)))
		p := make([]byte, 100)
		n, err := systemd.Read(p)
		require.NoError(t, err)
		return string(p[:n])
	}
	s := startCache(t, config, "NOTIFY_SOCKET="+path, "WATCHDOG_USEC=20000")
	require.Equal(t, "READY=1", told())
	require.Equal(t, "WATCHDOG=1", told())
	require.NoError(t, s.Process.Signal(syscall.SIGTERM))
	for told() != "STOPPING=1" {
		continue
	}
	require.NoError(t, s.Wait())
}

// TestCacheNetwork: over a network those may use the cache who the config says, and none may look
// into it.
func TestCacheNetwork(t *testing.T) {
	member, _ := certificates(t, time.Hour)
	stranger, _ := certificates(t, time.Hour)
	table := "[identity]\n"
	for _, option := range strings.Split(strings.TrimPrefix(member, "tcp:"), ",") {
		name, file, _ := strings.Cut(option, "=")
		table += fmt.Sprintf("%s = %q\n", name, file)
	}
	for _, tc := range []struct{ config, client, stranger string }{
		{"plaintext = true\nbackends = [\"shm\", \"posix\"]", "tcp:plaintext=true", stranger},
		{table, member, stranger},
		{table, member, "tcp:plaintext=true"},
	} {
		dir, config := cacheDir(t, `listen = ["127.0.0.1:0"]`, `metrics = "127.0.0.1:0"`, tc.config)
		s := startCache(t, config)
		_, metrics, _ := strings.Cut(s.stderr.await(t, "metrics are at "), "metrics are at ")
		_, address, _ := strings.Cut(s.line, filepath.Join(dir, "s")+", ")
		address, _, _ = strings.Cut(address, ": ")
		u, err := dialNetwork(t, tc.client, address, time.Minute)
		require.NoError(t, err)
		require.NoError(t, u.allocate(t.Context(), 1, 4096))
		space, err := u.Namespace(t.Context(), "default", [32]byte{})
		require.NoError(t, err)
		outcomes, err := space.Store(t.Context(), []cache.Key{{1}}, u.place(1))
		require.NoError(t, err)
		require.Equal(t, []cache.Outcome{cache.Done}, outcomes)
		_, err = u.Report(t.Context())
		require.ErrorContains(t, err, "by its Unix socket")
		require.NoError(t, u.close())
		_, err = dialNetwork(t, tc.stranger, address, time.Second)
		require.Error(t, err)

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, metrics, nil)
		require.NoError(t, err)
		answer, err := http.DefaultClient.Do(q)
		require.NoError(t, err)
		body, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		require.Contains(t, string(body), `sluice_cache_store_blocks_total{outcome="done"} 1`)
		require.Contains(t, string(body), `sluice_cache_request_seconds_count{request="store"} 1`)
	}
	o := askCache(t, "tcp:127.0.0.1:1", "stat")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "on its own host alone")
}

// dialNetwork meets a server over tcp, as a program on another host does.
func dialNetwork(t *testing.T, spec, address string, limit time.Duration) (*cacheUser, error) {
	t.Helper()
	name, words, err := byname.Split(spec)
	require.NoError(t, err)
	b, err := byname.Open(name, words)
	require.NoError(t, err)
	cfg := engine.Config{Name: "remote", Backends: []driver.Backend{b},
		Plaintext: strings.HasSuffix(spec, "plaintext=true")}
	if !cfg.Plaintext {
		var files [3]string
		for k, w := range words {
			_, files[k], _ = strings.Cut(w, "=")
		}
		id, err := identity.FromFiles(files[0], files[1], files[2])
		require.NoError(t, err)
		cfg.Identity = id.CheckHost()
	}
	e, err := engine.Open(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := serve.Dial(ctx, e, "tcp", address)
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return &cacheUser{Client: c, engine: e}, nil
}

// TestCacheConfig: nonsense is refused, by key and line, before anything is opened.
func TestCacheConfig(t *testing.T) {
	const good = "socket = \"/x/s\"\n[memory]\npath = \"/x/m\"\nbytes = \"64MiB\"\n"
	for _, tc := range []struct{ text, want string }{
		{good + "byte = 3\n", "line 5: memory.byte: there is no such key"},
		{"nmae = \"a\"\n" + good, "line 1: nmae: there is no such key"},
		{strings.Replace(good, "64MiB", "64 cows", 1), "line 4: memory.bytes: size \"64 cows\""},
		{strings.Replace(good, `"64MiB"`, "-3 # or so", 1), "line 4: memory.bytes: -3: want a whole number, or a size"},
		{strings.Replace(good, `"64MiB"`, "true", 1), "line 4: memory.bytes: true: want a whole number, or a size"},
		{strings.Replace(good, `"64MiB"`, "7e7", 1), "line 4: memory.bytes: 7e+07: want a whole number, or a size"},
		{strings.Replace(good, "64MiB", "100KiB", 1), "line 4: memory.bytes: want at least"},
		{good + "extent = \"1TiB\"\n", "line 5: memory.extent: 1TiB: want"},
		{strings.Replace(good, `"/x/m"`, "3", 1), "line 3: memory.path: 3: want a text"},
		{strings.Replace(good, "/x/m", "m", 1), "line 3: memory.path: want a path"},
		{strings.Replace(good, `path = "/x/m"`, "", 1), "line 2: memory.path: want a path"},
		{good + "bytes = 5\n", "line 5"},
		{"memory = 3\n", "line 1: memory: want keys under a line [memory]"},
		{good + "[disk]\npath=\"/x/d\"\n", "line 5: disk: want keys under a line [[disk]]"},
		{"socket = \"" + strings.Repeat("s", 108) + "\"\n", "line 1: socket: "},
		{"drain_timeout = \"soon\"\n" + good, "line 1: drain_timeout: soon: want a time such as"},
		{"drain_timeout = 5\n" + good, "line 1: drain_timeout: 5: want a time such as"},
		{"listen = \"1.2.3.4:7\"\n" + good, "line 1: listen: 1.2.3.4:7: want a list"},
		{"listen = [\"1.2.3.4:7\"]\n" + good, "line 1: listen: name the files of an [identity]"},
		{"plaintext = true\nlisten = [\"here\"]\n" + good,
			"line 2: listen: \"here\" is no HOST:PORT"},
		{"plaintext = 1\n" + good, "line 1: plaintext: 1: want true or false"},
		{"metrics = \"1.2.3.4:99999\"\n" + good,
			"line 1: metrics: \"1.2.3.4:99999\" is no HOST:PORT"},
		{"backends = [\"smoke\"]\n" + good, "line 1: backends: backend \"smoke\" does not exist"},
		{"backends = [\"auto\"]\n" + good, "line 1: backends: name each one"},
		{"backends = [\"shm:rings=2\"]\n" + good, "line 1: backends: "},
		{"policy = \"fifo\"\n" + good, "line 1: policy: policy \"fifo\": there are s3fifo"},
		{"\noperations = 5000000\n" + good, "line 2: operations: "},
		{"operations = 0\n" + good, "line 1: operations: 0: want a whole number from 1 to"},
		{"hold_max = \"1TiB\"\n" + good, "line 1: hold_max: want at most the bytes"},
		{"blocks = 1000000000000\n" + good, "line 1: blocks: "},
		{good + "[[disk]]\npath=\"/x/d\"\nbytes=\"2MiB\"\n[[disk]]\nbytes=4096\n",
			"line 8: disk.path: want a path"},
		{good + "[[disk]]\npath=\"/x/d\"\nbytes=\"4KiB\"\n", "line 7: disk.bytes: want at least"},
		{good + "[[disk]]\npath=\"/x/d\"\n", "line 5: disk.bytes: want at least an extent"},
		{"backends = [\"shm\"]\n" + good + "[[disk]]\npath=\"/x/d\"\nbytes=\"2MiB\"\n",
			"line 1: backends: a [[disk]] takes posix"},
		{good + "[[disk]]\npath=\"/x/d\"\nbytes_a_day=0\n", "line 7: disk.bytes_a_day: 0: want"},
		{good + "[[disk]]\npath=\"/x/m\"\nbytes=\"2MiB\"\n", "line 5: disk: disk /x/m is there"},
		{good + "[events]\naddress=\"x\"\n", "line 6: events.address: \"x\" is no HOST:PORT"},
		{good + "[events]\nreplay=\"127.0.0.1:1\"\n", "line 5: events.address: \"\" is no"},
		{good + "[schedule]\npiece_bytes=\"4MiB\"\n", "line 6: schedule.piece_bytes"},
		{good + "[schedule]\nswap_out=-1\n", "line 6: schedule.swap_out"},
		{good + "[cluster]\n", "line 5: cluster: want keys under a line [cluster]"},
		{good + "[cluster]\nprefix=\"x\"\n", "line 5: cluster.etcd: etcd: 0 endpoints"},
		{good + "[cluster]\netcd=[\"a:1\"]\n", "line 6: cluster.etcd: etcd endpoint \"a:1\""},
		{good + "[cluster]\netcd=[\"http://a:1\"]\naddresses=[\"x\"]\n",
			"line 7: cluster.addresses: node"},
		{"plaintext=true\nlisten=[" + strings.Repeat("\"127.0.0.1:1\",", 8) + "]\n" + good +
			"[cluster]\netcd=[\"http://a:1\"]\n", "has 9 addresses, want from 1 to 8"},
		{good + "[object]\nbucket=\"abc\"\n", "line 5: object.bytes: say how much"},
		{good + "[[namespace]]\npriority=1\n", "line 5: namespace.name: want a name"},
		{good + "[[namespace]]\nname=\"a\"\n[[namespace]]\nname=\"a\"\n", "line 8: namespace.name"},
		{good + "[[namespace]]\nname=\"a\"\nflow=\"up\"\n", "line 7: namespace.flow"},
		{good + "[[namespace]]\nname=\"a\"\nflow=\"write-back\"\n",
			"line 7: namespace.flow: there is no [[disk]]"},
		{good + "[[namespace]]\nname=\"a\"\ndisk_quota=1\n",
			"line 7: namespace.disk_quota: there is no [[disk]]"},
		{good + "[[namespace]]\nname=\"a\"\nmemory_quota=\"1TiB\"\n",
			"line 7: namespace.memory_quota: want at most"},
		{good + "[[namespace]]\nname=\"a\"\nhold_max=\"65MiB\"\n",
			"line 7: namespace.hold_max: want at most"},
		{good + "[[namespace]]\nname=\"a\"\nttl=\"1.5s\"\n", "line 7: namespace.ttl: want whole"},
		{good + "[[namespace]]\nname=\"a\"\nttl=\"100000h\"\n", "line 5: namespace: TTL"},
		{"text = \"a\"\n" + good, "line 1: text: there is no such key"},
		{good + "[identity]\ncertificate=\"c\"\nkey=\"k\"\n", "line 5: identity: "},
		{"name = \"" + good, "line 1"},
	} {
		path := filepath.Join(t.TempDir(), "cache.toml")
		require.NoError(t, os.WriteFile(path, []byte(tc.text), 0o600))
		_, err := readCacheConfig(path)
		require.ErrorContains(t, err, tc.want, tc.text)
		require.ErrorContains(t, err, path)
	}
	o := sluice(t, "cache", "serve", "--config", "/no/where")
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "no such file")
}

// TestCacheKeys: each key is what it says of the engine, the cache, and a namespace.
func TestCacheKeys(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cache.toml")
	require.NoError(t, os.WriteFile(path, []byte(`policy = "arc"
blocks = 4096
verify_first = true
compare_known = true
operations = 7
hold_max = "3MiB"
[schedule]
bytes_in_flight = "8MiB"
piece_bytes = "1MiB"
prefetch = 3
swap_out = 2
queued_max = 100
[memory]
path = "/x/m"
bytes = "64MiB"
extent = "4MiB"
[[disk]]
path = "/x/d"
bytes = "1GiB"
extent = "8MiB"
blocks = 500
bytes_a_day = "2GiB"
durable = true
slow_after = "5s"
[[namespace]]
name = "a"
priority = 4
memory_quota = "1MiB"
disk_quota = "2MiB"
flow = "write-back"
ttl = "1h"
hold_max = "2MiB"
bytes_a_second = "1GiB"
`), 0o600))
	c, err := readCacheConfig(path)
	require.NoError(t, err)
	require.Equal(t, cache.Config{Policy: cache.ARC, Blocks: 4096, VerifyFirst: true,
		CompareKnown: true, OpsMax: 7, HoldMax: 3 << 20,
		Memory: cache.MemoryConfig{Path: "/x/m", Bytes: 64 << 20, Extent: 4 << 20},
		Disks: []cache.DiskConfig{{Path: "/x/d", Bytes: 1 << 30, Extent: 8 << 20,
			Blocks: 500, BytesADay: 2 << 30, Durable: true, SlowAfter: 5 * time.Second}}},
		c.cache)
	require.Equal(t, cache.NamespaceOptions{Priority: 4, Quota: [2]uint64{1 << 20, 2 << 20},
		Flow: cache.WriteBack, TTL: time.Hour, HoldMax: 2 << 20, BytesASecond: 1 << 30},
		c.options("a"))
	require.Equal(t, engine.Schedule{BytesInFlight: 8 << 20, PieceBytes: 1 << 20, Prefetch: 3,
		SwapOut: 2, QueuedMax: 100}, c.schedule)
}

// TestCacheSchedule: the engine has the schedule of the config.
func TestCacheSchedule(t *testing.T) {
	for _, off := range []bool{false, true} {
		c := &cacheConfig{name: "a", unscheduled: off}
		e, err := c.openEngine(nil)
		require.NoError(t, err)
		require.Equal(t, off, e.Stats().Classes == nil)
		require.NoError(t, e.Close())
		c.schedule.QueuedMax = math.MaxInt // which none takes
		e, err = c.openEngine(nil)
		if off {
			require.NoError(t, err)
			require.NoError(t, e.Close())
		} else {
			require.ErrorContains(t, err, "QueuedMax")
		}
	}
}

// TestCacheDiskLeftAlone: stat and the metrics say which disk is left alone, and why.
func TestCacheDiskLeftAlone(t *testing.T) {
	r := serve.Report{Stats: cache.Stats{Disks: []cache.DiskStats{{Path: "/a"},
		{Path: "/b", Unused: "it is tried again in 3s"},
		{Path: "/c", Unused: "it has not answered for 4s", Silent: true}}}}
	var text bytes.Buffer
	require.NoError(t, printCacheReport(&text, &r))
	require.Regexp(t, `/a .*0 B\n.*/b .*LEFT ALONE: it is tried.*\n.*/c .*LEFT ALONE: it has not`,
		text.String())
	w := httptest.NewRecorder()
	alone := &membership{cfg: &cacheConfig{}}
	operatorHandler(func() serve.Report { return r }, alone, func() {}, alone.ready).ServeHTTP(w,
		httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, want := range []string{`usable{path="/a"} 1`, `usable{path="/b"} 0`,
		`usable{path="/c"} 0`, `silent{path="/b"} 0`, `silent{path="/c"} 1`} {
		require.Contains(t, w.Body.String(), "sluice_cache_disk_"+want)
	}
}

// TestCacheTooLarge: the error of a memory that is not there says how much is free.
func TestCacheTooLarge(t *testing.T) {
	dir, config := cacheDir(t)
	text, err := os.ReadFile(config)
	require.NoError(t, err)
	text = bytes.ReplaceAll(text, []byte("16MiB"), []byte("8TiB"))
	require.NoError(t, os.WriteFile(config, bytes.Replace(text, []byte("32MiB"), []byte("9TiB"), 1),
		0o600))
	o := sluice(t, "cache", "serve", "--config", config)
	require.Equal(t, statusFailed, o.status)
	require.Contains(t, o.stderr, "free; make the tier smaller or the filesystem larger")
	require.NoFileExists(t, filepath.Join(dir, "s"))
}
