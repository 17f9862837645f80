// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
		"straight_bytes", "memory_bytes")
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
	for _, more := range [][]string{{}, {"--cold"}} {
		r := loadReportOf(t, append(more, a, b)...)
		wantNumbers(t, r, map[string]float64{"files": 2, "tensors": 5, "bytes": all})
		if r["gbps"].(float64) <= 0 || r["memory_bytes"].(float64) < all {
			t.Errorf("%v: %v", more, r)
		}
		if cold := len(more) > 0 && more[0] == "--cold"; r["cold"] != cold || cold &&
			r["cached_bytes"].(float64) > 0 {
			t.Errorf("%v: cold %v, %v bytes cached", more, r["cold"], r["cached_bytes"])
		}
	}
	o := sluice(t, "load", a, b)
	for _, want := range []string{"tensors     5, ", "GB/s", "cache       warm"} {
		if o.status != 0 || o.stderr != "" || !strings.Contains(o.stdout, want) {
			t.Errorf("no %q in %+v", want, o)
		}
	}
}

func TestLoadErrors(t *testing.T) {
	t.Parallel()
	require.Equal(t, statusUsage, sluice(t, "load").status)
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
	} {
		o := sluice(t, append([]string{"load"}, c.args...)...)
		for _, want := range c.wants {
			if o.status != statusFailed || o.stdout != "" || !strings.Contains(o.stderr, want) {
				t.Errorf("%s: no %q in %+v", name, want, o)
			}
		}
	}
}
