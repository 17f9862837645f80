// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// serving is an agent that runs.
type serving struct {
	c      *exec.Cmd
	at     string
	said   string
	rest   chan string // what it says after that
	stderr *log
}

// log is what a process that still runs has written to standard error.
type log struct {
	mu   sync.Mutex
	text []byte
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	return len(p), nil
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// awaitLog waits until the agent has said that n times: a peer hears of it before its log does.
func (s *serving) awaitLog(t *testing.T, want string, n int) {
	t.Helper()
	for start := time.Now(); strings.Count(s.stderr.String(), want) < n; {
		require.Less(t, time.Since(start), time.Minute, "%q in %s", want, s.stderr)
		time.Sleep(time.Millisecond)
	}
}

// startAgent returns when it serves.
func startAgent(t *testing.T, args ...string) *serving {
	t.Helper()
	s := &serving{rest: make(chan string, 1), stderr: &log{}}
	s.c, _, _ = command(t, append([]string{"agent", "--listen", "127.0.0.1:0"}, args...)...)
	s.c.Stdout, s.c.Stderr = nil, s.stderr
	out, err := s.c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.c.Start())
	t.Cleanup(func() { _ = s.c.Process.Kill() })
	lines := bufio.NewReader(out)
	for s.at == "" {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("the agent ended: %v, stderr %s", s.c.Wait(), s.stderr)
		}
		s.said += line
		if at, found := strings.CutPrefix(line, "serving at "); found {
			s.at = strings.TrimSpace(at)
		}
	}
	go func() {
		rest, _ := io.ReadAll(lines)
		s.rest <- string(rest)
	}()
	return s
}

// end signals it, and returns its status and what it said then.
func (s *serving) end(t *testing.T, sig syscall.Signal) (int, string) {
	t.Helper()
	require.NoError(t, s.c.Process.Signal(sig))
	rest := <-s.rest
	return status(t, s.c.Wait()), rest
}

func randomFile(t *testing.T, n int) (path string, content []byte) {
	t.Helper()
	content = make([]byte, n)
	source := rand.NewChaCha8([32]byte{7})
	_, _ = source.Read(content)
	path = filepath.Join(t.TempDir(), "content")
	require.NoError(t, os.WriteFile(path, content, 0o600))
	return path, content
}

func TestAgent(t *testing.T) {
	dir := cluster(t, "agent", "user")
	path, content := randomFile(t, 3<<20+17)
	a := startAgent(t, append(as(dir, "agent"), "--region", "kv=8MiB", "--region", "file="+path,
		"--region", "part="+path+":4096:100")...)
	for _, want := range []string{"TLS 1.3", "kv: 8MiB of memory", "part: 100B of " + path +
		" at 4096"} {
		if !strings.Contains(a.said, want) {
			t.Errorf("no %q in %s", want, a.said)
		}
	}
	user := append(as(dir, "user"), "--peer", a.at)
	with := func(args ...string) []string { return append(args, user...) }
	for _, backend := range []string{"shm,tcp", "tcp"} {
		o := ok(t, sluice(t, with("ls", "--check-host", "--backend", backend)...))
		if !strings.Contains(o.stdout, "kv") || !strings.Contains(o.stdout, "staged") ||
			!strings.Contains(o.stdout, backend[:3]) {
			t.Errorf("ls: %s", o.stdout)
		}
		ok(t, sluice(t, with("put", "kv", "--offset", "4KiB", "--input", path, "--backend",
			backend)...))
		if o := ok(t, sluice(t, with("get", "kv", "--offset", "4KiB", "--length", "3145745",
			"--backend", backend)...)); o.stdout != string(content) {
			t.Errorf("%s: kv has other bytes", backend)
		}
		if o := ok(t, sluice(t, with("get", "file", "--backend", backend)...)); o.stdout != string(
			content) {
			t.Errorf("%s: file has other bytes", backend)
		}
		if o := ok(t, sluice(t, with("get", "part", "--backend", backend)...)); o.stdout != string(
			content[4096:4196]) {
			t.Errorf("%s: part has other bytes", backend)
		}
	}
	out := filepath.Join(t.TempDir(), "out")
	ok(t, sluice(t, with("get", "kv", "--offset", "4096", "--length", "10", "--output", out)...))
	if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, content[:10]) {
		t.Errorf("--output: %q (%v)", got, err)
	}
	for want, args := range map[string][]string{
		"describes no such region": {"get", "nothing"},
		"past its end":             {"get", "part", "--offset", "90", "--length", "11"},
	} {
		if o := sluice(t, with(args...)...); o.status == 0 || !strings.Contains(o.stderr, want) {
			t.Errorf("%v: %+v, want %q", args, o, want)
		}
	}
	if code, said := a.end(t, syscall.SIGINT); code != 0 || !strings.Contains(said, "ending") {
		t.Errorf("interrupted: status %d, %q, stderr %s", code, said, a.stderr)
	}
	require.Regexp(t,
		`peer ".+" has connected from 127\.0\.0\.1:\d+ \(certificate of "user", serial number [0-9a-f]+\)\n`,
		a.stderr.String())
}

// TestAgentListensElsewhere names the address that the user gave, not one that follows from it.
func TestAgentListensElsewhere(t *testing.T) {
	o := sluice(t, "agent", "--listen", "203.0.113.9:7000", "--plaintext", "--region", "s=1MiB")
	require.Equal(t, statusFailed, o.status, "%+v", o)
	require.Contains(t, o.stderr, "--listen 203.0.113.9:7000: ")
}

// Who is no member is told why, and sees nothing.
func TestAgentRefusesStrangers(t *testing.T) {
	dir, other := cluster(t, "agent"), cluster(t, "user")
	a := startAgent(t, append(as(dir, "agent"), "--region", "secret-name=4KiB")...)
	for want, flags := range map[string][]string{
		"signed by another authority": as(other, "user"),
		"it may ask for TLS":          {"--plaintext"},
	} {
		o := sluice(t, append([]string{"ls", "--peer", a.at}, flags...)...)
		if o.status != statusFailed || !strings.Contains(o.stderr, want) ||
			strings.Contains(o.stderr+o.stdout, "secret-name") {
			t.Errorf("%+v, want %q", o, want)
		}
	}
	if code, _ := a.end(t, syscall.SIGTERM); code != 0 ||
		strings.Contains(a.stderr.String(), "has connected") ||
		strings.Count(a.stderr.String(), "refused 127.0.0.1:") < 2 {
		t.Errorf("status %d, stderr %s", code, a.stderr)
	}
}

// TestAgentServesFilesReadOnly: a member may write to a file only where :rw was said.
func TestAgentServesFilesReadOnly(t *testing.T) {
	path, content := randomFile(t, 8192)
	a := startAgent(t, "--plaintext", "--region", "model="+path, "--region",
		"open="+path+":0:4096:rw")
	with := func(args ...string) []string { return append(args, "--plaintext", "--peer", a.at) }
	o := ok(t, sluice(t, with("explain")...))
	require.Contains(t, o.stdout, "region model: ")
	require.Contains(t, o.stdout, "staged")
	for name, want := range map[string]bool{"model": false, "open": true} {
		c, stdout, stderr := command(t, with("put", name, "--length", "3", "--json")...)
		c.Stdin = strings.NewReader("xyz")
		require.Equal(t, want, status(t, c.Run()) == 0, "%s: %s", name, stderr)
		require.Equal(t, want, strings.Contains(stdout.String(), `"bytes": 3`))
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, append([]byte("xyz"), content[3:]...), got)
	c, _, stderr := command(t, with("put", "open", "--length", "20")...)
	c.Stdin = strings.NewReader("short")
	require.NotZero(t, status(t, c.Run()))
	require.Contains(t, stderr.String(), "15 bytes before --length")
	o = sluice(t, with("get", "open", "--offset=-5")...)
	require.Contains(t, o.stderr, "negative")
}

// TestGetKeepsWhatStood: a transfer that fails leaves the old file.
func TestGetKeepsWhatStood(t *testing.T) {
	a := startAgent(t, "--plaintext", "--region", "kv=64KiB")
	out := filepath.Join(t.TempDir(), "out")
	require.NoError(t, os.WriteFile(out, []byte("old"), 0o600))
	o := sluice(t, "get", "kv", "--plaintext", "--peer", a.at, "--offset", "1MiB", "--output", out)
	require.NotZero(t, o.status)
	got, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Equal(t, "old", string(got))
	ok(t, sluice(t, "get", "kv", "--plaintext", "--peer", a.at, "--output", out))
	list, err := os.ReadDir(filepath.Dir(out))
	require.NoError(t, err)
	require.Len(t, list, 1, "nothing is left beside")
}

// A transfer ends soon when the agent is killed, and when its user interrupts it.
func TestAgentIsKilled(t *testing.T) {
	for name, end := range map[string]struct {
		deed   func(a *serving, c *exec.Cmd) error
		status int
		want   string
	}{
		"killed": {func(a *serving, _ *exec.Cmd) error {
			return a.c.Process.Kill()
		}, statusFailed, ""},
		"ended": {func(a *serving, _ *exec.Cmd) error {
			return a.c.Process.Signal(syscall.SIGTERM)
		}, statusFailed, ""},
		"interrupted": {func(_ *serving, c *exec.Cmd) error {
			return c.Process.Signal(syscall.SIGINT)
		}, statusInterrupted, "interrupted"},
	} {
		t.Run(name, func(t *testing.T) {
			a := startAgent(t, "--plaintext", "--region", "kv=64MiB")
			c, _, stderr := command(t, "put", "kv", "--plaintext", "--peer", a.at, "--backend",
				"tcp")
			in, err := c.StdinPipe()
			require.NoError(t, err)
			require.NoError(t, c.Start())
			if _, err := in.Write(make([]byte, 5<<20)); err != nil {
				// it is connected by the time that it reads
				t.Fatal(err)
			}
			require.NoError(t, end.deed(a, c))
			go func() { // more to write than it takes, should it have ended
				for {
					if _, err := in.Write(make([]byte, 1<<20)); err != nil {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
			}()
			if got := status(t, c.Wait()); got != end.status ||
				!strings.Contains(stderr.String(), end.want) {
				t.Errorf("status %d, want %d: %s", got, end.status, stderr)
			}
		})
	}
}
