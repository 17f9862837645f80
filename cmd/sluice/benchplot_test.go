// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench/plot"
)

var quickSweep = []string{"bench", "--backend", "mem", "--sweep", "--rounds", "1", "--seconds",
	"0.001", "--plot"}

// withPython runs a sweep beside an interpreter that has the library, and draws like that.
func withPython(t *testing.T, draw string) (path string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, plotPython), []byte("#!/bin/sh\n"+
		"[ \"$2\" != 'import matplotlib' ] || exit 0\n"+draw+"\n"), 0o755))
	return "PATH=" + dir + ":" + os.Getenv("PATH")
}

// TestBenchPlot: the sweep is drawn, and printed as ever.
func TestBenchPlot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mem.svg")
	c, stdout, stderr := command(t, append(quickSweep, file, "--json")...)
	c.Env = append(c.Env, withPython(t, `exec cat >"$3"`))
	require.NoError(t, c.Run(), stderr)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var drawn plot.Sweep
	require.NoError(t, json.Unmarshal(text, &drawn))
	require.Contains(t, drawn.Title, "--backend mem --sweep")
	require.Len(t, drawn.Results, 10)
	require.Len(t, decode(t, stdout.String()), 10)
}

// TestBenchPlotThatFails: what is missing is said before anything is measured.
func TestBenchPlotThatFails(t *testing.T) {
	c, stdout, stderr := command(t, append(quickSweep, "mem.svg")...)
	c.Env = append(c.Env, "PATH=/nonexistent")
	require.Equal(t, statusFailed, status(t, c.Run()))
	require.Empty(t, stdout.String())
	require.Contains(t, stderr.String(), "pip install matplotlib")

	c, stdout, stderr = command(t, append(quickSweep, "mem.svg")...)
	c.Env = append(c.Env, withPython(t, "echo no ink >&2; exit 3"))
	require.Equal(t, statusFailed, status(t, c.Run()))
	require.Contains(t, stdout.String(), "16MiB", "what was measured is not lost")
	require.Contains(t, stderr.String(), "draw mem.svg: exit status 3: no ink")

	for want, args := range map[string][]string{
		"--plot draws sizes: it takes --sweep":    {"bench", "--plot", "a.svg"},
		"want a name that ends with .svg or .png": append(quickSweep, "a.jpg"),
		"--plot is empty":                         append(quickSweep, ""),
		"--plot: open /no/where/a.svg: no such":   append(quickSweep, "/no/where/a.svg"),
		"--plot: open /proc/a.svg: no such file":  append(quickSweep, "/proc/a.svg"),
		binary + "/a.svg: not a directory":        append(quickSweep, binary+"/a.svg"),
		"--workload has shapes of its own: it takes no": {"bench", "--workload", "qwen3-8b",
			"--plot", "a.svg"},
	} {
		o := sluice(t, args...)
		require.Equal(t, statusUsage, o.status, "%v: %+v", args, o)
		require.Contains(t, o.stderr, want)
	}
}

// TestWritable: the file is as it was before, also one that was not there.
func TestWritable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.svg")
	require.NoError(t, writable(path))
	require.NoFileExists(t, path)
	require.NoError(t, os.WriteFile(path, []byte("old"), 0o644))
	require.NoError(t, writable(path))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(text))
	require.ErrorIs(t, writable(t.TempDir()), syscall.EISDIR)

	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink("nothing", link))
	require.NoError(t, writable(link))
	_, err = os.Stat(link)
	require.ErrorIs(t, err, os.ErrNotExist)
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	reader, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	require.NoError(t, err)
	defer reader.Close()
	require.NoError(t, writable(pipe))
	poll := []unix.PollFd{{Fd: int32(reader.Fd()), Events: unix.POLLIN}}
	_, err = unix.Poll(poll, 0)
	require.NoError(t, err)
	require.Zero(t, poll[0].Revents, "its reader is told of an end") // POLLHUP
}

// TestBenchPlotInterrupted: Ctrl-C while the picture is drawn.
func TestBenchPlotInterrupted(t *testing.T) {
	begun := filepath.Join(t.TempDir(), "begun")
	c, _, stderr := command(t, append(quickSweep, "mem.svg")...)
	c.Env = append(c.Env, withPython(t, "echo $$ >"+begun+"; exec sleep 600"))
	require.NoError(t, c.Start())
	require.Eventually(t, func() bool { _, err := os.Stat(begun); return err == nil },
		time.Minute, 5*time.Millisecond)
	children := awaitChildren(t, c.Process.Pid, 1)
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	require.Equal(t, statusInterrupted, status(t, c.Wait()))
	require.Contains(t, stderr.String(), "interrupted")
	wantGone(t, children)
}
