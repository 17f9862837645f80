// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/weights"
)

// shardFile makes a safetensors file of tensors with these many bytes.
func shardFile(t *testing.T, dir, name string, sizes ...int) (path string) {
	t.Helper()
	var list []weights.Tensor
	for i, n := range sizes {
		list = append(list, weights.Tensor{Name: fmt.Sprintf("%s.%d", name, i), Type: "U8",
			Shape: []uint64{uint64(n)}})
	}
	var out bytes.Buffer
	err := weights.Write(&out, list, nil, func(x weights.Tensor) (io.Reader, error) {
		return bytes.NewReader(make([]byte, x.Len)), nil
	})
	require.NoError(t, err)
	path = filepath.Join(dir, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, out.Bytes(), 0o600))
	return path
}

func loadReportOf(t *testing.T, args ...string) map[string]any {
	t.Helper()
	o := sluice(t, append([]string{"load", "--json"}, args...)...)
	if o.status != 0 || o.stderr != "" {
		t.Fatalf("%v: %+v", args, o)
	}
	r := decode(t, o.stdout)
	wantKeys(t, "report", r, "files", "tensors", "bytes", "seconds", "gbps", "header_seconds",
		"first_tensor_ms", "cold", "cached_bytes",
		"straight_bytes", "memory_bytes", "registered")
	return r.(map[string]any)
}

// TestLoadIndex: the index of a sharded model stands for its files, each once, also where they are
// named beside it.
func TestLoadIndex(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := shardFile(t, dir, "a", 1000, 2000), shardFile(t, dir, "deep/b", 500)
	write := func(text string) string {
		path := filepath.Join(dir, "model.safetensors.index.json")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	x := write(`{"metadata":{"total_size":3500},"weight_map":{"a.0":"a","a.1":"a",` +
		`"deep/b.0":"deep/b"}}`)
	for _, files := range [][]string{{x}, {x, a}, {b, x, a}, {x, x}} {
		r := loadReportOf(t, files...)
		wantNumbers(t, r, map[string]float64{"files": 2, "tensors": 3, "bytes": 3500})
	}
	for text, want := range map[string]string{
		`{"weight_map":{"a.0":"deep/b"}}`:              `tensor "a.0": the index says`,
		`{"weight_map":{"a.0":"missing"}}`:             "missing: no such file",
		`{"weight_map":{"a.0":"../` + "a" + `"}}`:      "no name below its folder",
		"version https://git-lfs.github.com/spec/v1\n": "pointer of Git LFS",
	} {
		o := sluice(t, "load", write(text))
		if o.status == 0 || !strings.Contains(o.stderr, want) {
			t.Errorf("%s: %+v, want %q", text, o, want)
		}
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a, b := shardFile(t, dir, "a", 5<<20, 0, 77, 1<<20), shardFile(t, dir, "b", 100_000)
	const all = 5<<20 + 77 + 1<<20 + 100_000
	for _, more := range [][]string{{}, {"--cold"}, {"--backend", "mem"}} {
		r := loadReportOf(t, append(more, a, b)...)
		wantNumbers(t, r, map[string]float64{"files": 2, "tensors": 5, "bytes": all})
		if r["gbps"].(float64) <= 0 || r["memory_bytes"].(float64) < all ||
			len(r["registered"].([]any)) == 0 {
			t.Errorf("%v: %v", more, r)
		}
		if cold := len(more) > 0 && more[0] == "--cold"; r["cold"] != cold || cold &&
			r["cached_bytes"].(float64) > 0 {
			t.Errorf("%v: cold %v, %v bytes cached", more, r["cold"], r["cached_bytes"])
		}
	}
	r := loadReportOf(t, "--memory", "5MiB", a, b) // less than all
	wantNumbers(t, r, map[string]float64{"tensors": 5, "bytes": all, "memory_bytes": 5 << 20})
	o := sluice(t, "load", a, b)
	for _, want := range []string{"tensors     5, ", "GB/s", "cache       warm",
		"registered with "} {
		if o.status != 0 || o.stderr != "" || !strings.Contains(o.stdout, want) {
			t.Errorf("no %q in %+v", want, o)
		}
	}
}

// cutSet makes a set of two ranks, and returns its root.
func cutSet(t *testing.T) (root, dir string) {
	t.Helper()
	dir = t.TempDir()
	var ranks [][]weights.Source
	for rank, sizes := range [][]int{{1000, 200_000}, {70_000}} {
		name := fmt.Sprintf("rank-%d/weights", rank)
		f, err := weights.OpenFile(shardFile(t, dir, name, sizes...))
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		src := f.Source()
		src.Name = name
		ranks = append(ranks, []weights.Source{src})
	}
	set, err := weights.Describe(ranks, func(rank int) string {
		return fmt.Sprintf("rank-%d/meta.json", rank)
	})
	require.NoError(t, err)
	files := map[string][]byte{"root.json": set.Root}
	for name, text := range set.Metas {
		files[name] = text
	}
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
	return filepath.Join(dir, "root.json"), dir
}

func TestLoadOfARank(t *testing.T) {
	t.Parallel()
	root, dir := cutSet(t)
	wantNumbers(t, loadReportOf(t, "--rank", "0", root), map[string]float64{"files": 1,
		"tensors": 2, "bytes": 201_000})
	wantNumbers(t, loadReportOf(t, "--rank", "1", "--cold", root), map[string]float64{"files": 1,
		"tensors": 1, "bytes": 70_000})
	if o := sluice(t, "load", "--rank", "2", root); o.status != statusFailed ||
		!strings.Contains(o.stderr, "ranks 0 to 1") {
		t.Errorf("%+v", o)
	}
	shardFile(t, dir, "rank-1/weights", 69_999)
	if o := sluice(t, "load", "--rank", "1", root); o.status != statusFailed ||
		!strings.Contains(o.stderr, "rank-1/weights") {
		t.Errorf("a file of another set: %+v", o)
	}
}

func TestLoadErrors(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{}, {"--memory", "much", "x"}, {"--rank", "-1", "x"},
		{"--rank", "0", "x", "y"}, {"--backend", "smoke", "x"}} {
		if o := sluice(t, append([]string{"load"}, args...)...); o.status != statusUsage {
			t.Errorf("%v: %+v", args, o)
		}
	}
	dir := t.TempDir()
	good := shardFile(t, dir, "good", 1<<20, 5)
	text, err := os.ReadFile(good)
	require.NoError(t, err)
	write := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		return path
	}
	for name, c := range map[string]struct {
		args  []string
		wants []string
	}{
		"missing": {[]string{good, filepath.Join(dir, "absent")},
			[]string{filepath.Join(dir, "absent"), "no such file"}},
		"a directory": {[]string{dir}, []string{dir, "is a directory: name the files in it\n"}},
		"truncated shard": {[]string{write("short", text[:len(text)-6])},
			[]string{filepath.Join(dir, "short"), `tensor "good.0"`, "the file is cut"}},
		"too little room": {[]string{"--memory", "1000", good}, []string{`tensor "good.0"`,
			"give more --memory"}},
	} {
		o := sluice(t, append([]string{"load"}, c.args...)...)
		for _, want := range c.wants {
			if o.status != statusFailed || o.stdout != "" || !strings.Contains(o.stderr, want) {
				t.Errorf("%s: no %q in %+v", name, want, o)
			}
		}
	}
}

// TestLoadInterrupted: a load that would take minutes ends at once.
func TestLoadInterrupted(t *testing.T) {
	t.Parallel()
	const tensors, size = 4096, 64 << 20
	var list []weights.Tensor
	for i := range tensors {
		list = append(list, weights.Tensor{Name: fmt.Sprint(i), Type: "U8", Shape: []uint64{size}})
	}
	path := filepath.Join(t.TempDir(), "large")
	file, err := os.Create(path)
	require.NoError(t, err)
	defer file.Close()
	sparse := &holes{file: file}
	if err := weights.Write(sparse, list, nil, func(x weights.Tensor) (io.Reader, error) {
		return strings.NewReader(""), nil
	}); err == nil {
		t.Fatal("tensors without bytes")
	}
	require.NoError(t, file.Truncate(sparse.n+tensors*size))
	c, stdout, stderr := command(t, "load", "--memory", "256MiB", path)
	require.NoError(t, c.Start())
	for start := time.Now(); resident(c.Process.Pid) < 64<<20; time.Sleep(time.Millisecond) {
		if time.Since(start) > time.Minute { // it has no memory for tensors yet
			t.Fatalf("it does not begin: %s", readProc(c.Process.Pid, "status"))
		}
	}
	require.NoError(t, c.Process.Signal(syscall.SIGINT))
	start := time.Now()
	if got := status(t, c.Wait()); got != statusInterrupted || stdout.Len() > 0 ||
		!strings.Contains(stderr.String(), "interrupted") {
		t.Errorf("status %d, stdout %q, stderr %q", got, stdout, stderr)
	}
	if took := time.Since(start); took > noticed {
		t.Errorf("took %v to end", took)
	}
}

// resident is how many bytes of memory a process has.
func resident(pid int) int {
	var all, pages int
	_, _ = fmt.Sscan(readProc(pid, "statm"), &all, &pages)
	return pages * os.Getpagesize()
}

// holes counts what is written before the bytes of tensors.
type holes struct {
	file *os.File
	n    int64
}

func (h *holes) Write(p []byte) (int, error) {
	n, err := h.file.Write(p)
	h.n += int64(n)
	return n, err
}
