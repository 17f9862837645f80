// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/fakecuda"
	"github.com/sluicehq/sluice/internal/testing/fakecufile"
)

// The stand-ins of libcuda and libcufile, which are compiled once a run.
var (
	standInCUDA   = once(func() (*fakecuda.Library, error) { return fakecuda.Build() })
	standInCUFile = once(func() (*fakecufile.Library, error) { return fakecufile.Build() })
)

// removals are for the end of the run.
var removals []func()

func once[L interface{ Remove() }](build func() (L, error)) func() (L, error) {
	return sync.OnceValues(func() (L, error) {
		l, err := build()
		if err == nil {
			removals = append(removals, l.Remove)
		}
		return l, err
	})
}

// gdsLibraries gives software stand-ins of libcuda and libcufile.
func gdsLibraries(t *testing.T) (library string, cufile *fakecufile.Library) {
	t.Helper()
	if !cuda.Native {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "gds",
			Reason: "built without cgo", Fix: "CGO_ENABLED=1"})
	}
	l, err := standInCUDA()
	require.NoError(t, err)
	f, err := standInCUFile()
	require.NoError(t, err)
	t.Setenv("STANDIN_LIBCUDA", l.Path)
	t.Setenv("STANDIN_CUFILE_PANEL", f.Panel)
	t.Setenv("CUFILE_LOGFILE_PATH", filepath.Join(t.TempDir(), "cufile.log"))
	return l.Path, f
}

// TestBenchGDSOverTheStandIns goes the whole way of the command, with software stand-ins of both
// libraries.
func TestBenchGDSOverTheStandIns(t *testing.T) {
	library, cufile := gdsLibraries(t)
	dir, saved := t.TempDir(), filepath.Join(t.TempDir(), "gds.json")
	base := []string{"bench", "gds", "--dir", dir, "--library", library, "--cufile", cufile.Path,
		"--rounds", "1", "--seconds", "0.01", "--bytes", "8MiB"}
	for _, way := range []string{"auto", "batches", "threads", "streams"} {
		mode := "cuFile compat: bounces through host"
		if way == "streams" {
			mode = "nvidia-fs 2.24"
			cufile.Set(t, fakecufile.Direct, 1)
		}
		o := sluice(t, append(base, "--size", "64KiB", "--batch", "8", "--op", "write", "--way",
			way, "--save", saved, "--json")...)
		if o.status != 0 || o.stderr != "" {
			t.Fatalf("%s: %+v", way, o)
		}
		if text, err := os.ReadFile(saved); err != nil || string(text) != o.stdout {
			t.Errorf("saved %q, %v, printed %q", text, err, o.stdout)
		}
		list := decode(t, o.stdout).([]any)
		if len(list) != 1 {
			t.Fatalf("%d results", len(list))
		}
		r := list[0].(map[string]any)
		wantKeys(t, "result", r, append([]string{"notes"}, benchKeys...)...)
		notes, beside := fmt.Sprint(r["notes"]), r["baseline"].(map[string]any)
		if r["backend"] != "stand-in" || r["op"] != "write" || r["gbps"].(float64) <= 0 ||
			beside["name"] != "staged" || beside["gbps"].(float64) <= 0 {
			t.Errorf("%s: %v", way, r)
		}
		for _, want := range []string{"not of a card", "of the staged route", mode} {
			if !strings.Contains(notes, want) {
				t.Errorf("%s: no %q in %s", way, want, notes)
			}
		}
		if want := map[string]string{"auto": "batches of", "batches": "batches of",
			"streams": "on streams", "threads": "one request each"}[way]; !strings.Contains(
			r["route"].(string), want) {
			t.Errorf("%s: route %q", way, r["route"])
		}
	}
	if o := sluice(t, base...); o.status != 0 || strings.Count(o.stdout, "stand-in") < 8 {
		t.Errorf("the table: %+v", o)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
	for _, args := range [][]string{{"--size", "100"}, {"--op", "erase"}, {"--way", "best"},
		{"--rounds", "0"}, {"--seconds", "-1"}, {"--size", "16MiB"}, {"--format", "x"}} {
		if o := sluice(t, append(base, args...)...); o.status != statusUsage {
			t.Errorf("%v: %+v", args, o)
		}
	}
	if o := sluice(t, "bench", "gds", "--library", filepath.Join(dir, "none.so"), "--bytes",
		"8MiB"); o.status == 0 || !strings.Contains(o.stderr, "none.so") {
		t.Errorf("without a driver: %+v", o)
	}
}

// TestBenchGDSRefusesStreams: in compat mode, before it makes the file.
func TestBenchGDSRefusesStreams(t *testing.T) {
	library, cufile := gdsLibraries(t)
	o := sluice(t, "bench", "gds", "--dir", "/nonexistent", "--library", library, "--cufile",
		cufile.Path, "--way", "streams")
	require.Equal(t, statusFailed, o.status, "%+v", o)
	require.Contains(t, o.stderr, "cuFile's streams read wrong bytes in compat mode")
	require.Contains(t, o.stderr, "leave --way alone: batches or threads")
}

// TestBenchGDSInterrupted: SIGTERM ends the command while it makes the file, while it measures,
// and while the library answers nothing; no file is left.
func TestBenchGDSInterrupted(t *testing.T) {
	library, cufile := gdsLibraries(t)
	for _, c := range []struct {
		name, bytes string
		hold        uint32
		begun       func(dir string) bool
	}{
		{"file", "4GiB", 0, func(dir string) bool {
			found, _ := filepath.Glob(filepath.Join(dir, "*", "file"))
			return found != nil
		}},
		{"slice", "8MiB", 0, func(string) bool { return cufile.Get(fakecufile.Submits) > 0 }},
		{"no answer", "8MiB", 1, func(string) bool { return cufile.Get(fakecufile.UnderWay) > 0 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			cufile.Set(t, fakecufile.Hold, c.hold)
			cufile.Put(fakecufile.UnderWay, 0)
			cufile.Put(fakecufile.Submits, 0)
			dir := t.TempDir()
			p, stdout, stderr := command(t, "bench", "gds", "--dir", dir, "--library", library,
				"--cufile", cufile.Path, "--bytes", c.bytes, "--seconds", "60")
			require.NoError(t, p.Start())
			t.Cleanup(func() { _ = p.Process.Kill() })
			require.Eventually(t, func() bool { return c.begun(dir) }, 20*time.Second,
				time.Millisecond)
			begin := time.Now()
			require.NoError(t, p.Process.Signal(syscall.SIGTERM))
			require.Equal(t, statusInterrupted, status(t, p.Wait()), stderr)
			require.Less(t, time.Since(begin), noticed)
			require.Empty(t, stdout.String())
			require.Contains(t, stderr.String(), "sluice bench gds: interrupted")
			if c.hold == 1 {
				require.Contains(t, stderr.String(), "a library has not ended its requests")
			}
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}
