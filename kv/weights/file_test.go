// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// opened puts a shard on the disk and opens it.
func opened(t *testing.T, name string, sizes ...int) *File {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	src := shard(t, name, sizes...)
	text := make([]byte, src.Size)
	require.NoError(t, readFull(src, text, 0))
	require.NoError(t, os.WriteFile(path, text, 0o600))
	f, err := OpenFile(path)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// pages is memory that begins at a page.
func pages(t *testing.T, n int64) []byte {
	t.Helper()
	b, err := hostmem.Alloc(uint64(n), hostmem.Options{Purpose: "test"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return b.Bytes()
}

// TestFiles reads from the disk, past the page cache where the filesystem lets it, and from the
// cache once the bytes are there.
func TestFiles(t *testing.T) {
	testkit.CheckLeaks(t)
	a, b := opened(t, "a", 9, 40_001, 0, 77, 300_000), opened(t, "b", 100, 4096, 4096)
	m, err := Open(a.Source(), b.Source())
	require.NoError(t, err)
	need, err := m.MemoryFor(nil)
	if err != nil || need < 340_087+8292 || need > 340_087+8292+3*pageBytes {
		t.Fatalf("%d bytes, %v", need, err)
	}
	memory := pages(t, need)
	for _, piece := range []int{1 << 20, 20_000, 5000, 100} {
		for _, f := range []*File{a, b} {
			require.NoError(t, f.Drop())
		}
		_, known := a.Cached()
		before := a.Passed()
		clear(memory)
		l := load(t, m, Config{Memory: memory, Piece: piece, Readers: 3, Straight: true})
		var all []Loaded
		for x, err := range l.All(within(t)) {
			require.NoError(t, err)
			all = append(all, x) // none is released: all must fit
		}
		for _, x := range all {
			same(t, x)
		}
		require.NoError(t, l.Close())
		passed := a.Passed() - before
		if a.past >= 0 && a.straight.Load() && known && piece > 2*pageBytes && passed < 300_000 {
			t.Errorf("piece %d: %d bytes went past the page cache", piece, passed)
		}
		if piece < pageBytes && passed > 0 {
			t.Errorf("pieces of %d bytes went past the page cache", piece)
		}
	}
}

// TestFileInTheCache: what is in memory already is not read from the disk.
func TestFileInTheCache(t *testing.T) {
	f := opened(t, "a", 500_000)
	if _, err := io.Copy(io.Discard, io.NewSectionReader(f.f, 0, f.size)); err != nil {
		t.Fatal(err)
	}
	again, err := OpenFile(f.f.Name())
	require.NoError(t, err)
	defer again.Close()
	cached, known := again.Cached()
	if straight := again.straight.Load(); known && (cached != again.size || straight) || !known &&
		straight != (again.past >= 0) {
		t.Errorf("%d of %d bytes are cached (known: %v), and reads go past the cache: %v", cached,
			again.size, known, straight)
	}
}

func TestFileAnywhere(t *testing.T) {
	f := opened(t, "a", 100_000)
	require.NoError(t, f.Drop())
	want, err := os.ReadFile(f.f.Name())
	require.NoError(t, err)
	memory := pages(t, 200_000)
	for _, c := range []struct{ at, off, n int }{{0, 0, 4096}, {0, 0, 1}, {3, 3, 50_000},
		{4095, 4095, 4098}, {17, 0, 90_000}, {0, 4096, 8192}, {100, 4196, 8192}, {0, 90_000, 0}} {
		if n, err := f.ReadAt(memory[c.at:][:c.n], int64(c.off)); n != c.n || err != nil ||
			string(memory[c.at:][:c.n]) != string(want[c.off:][:c.n]) {
			t.Errorf("%+v: %d, %v, or other bytes", c, n, err)
		}
	}
	for _, off := range []int64{0, 4096, f.size - 1, f.size, f.size + 5000} {
		n, err := f.ReadAt(memory[off%pageBytes:][:110_000], off)
		if left := max(f.size-off, 0); int64(n) != left || !errors.Is(err, io.EOF) {
			t.Errorf("past the end from %d: %d of %d, %v", off, n, left, err)
		}
	}
}

// TestFileCut: the file is made shorter behind our back.
func TestFileCut(t *testing.T) {
	testkit.CheckLeaks(t)
	f := opened(t, "a", 100_000, 400_000)
	m, err := Open(f.Source())
	require.NoError(t, err)
	require.NoError(t, f.Drop())
	require.NoError(t, os.Truncate(f.f.Name(), 300_000))
	need, _ := m.MemoryFor(nil)
	l := load(t, m, Config{Memory: pages(t, need), Straight: true})
	var fault *FileError
	for _, err = range l.All(within(t)) {
	}
	if !errors.As(err, &fault) || fault.File != f.f.Name() || fault.Tensor != "a.1" ||
		!strings.Contains(err.Error(), "ends at 300000") {
		t.Errorf("%v", err)
	}
}

func TestOpenFileRefuses(t *testing.T) {
	testkit.CheckLeaks(t)
	dir := t.TempDir()
	if _, err := OpenFile(dir); !errors.Is(err, engine.ErrCorrupt) ||
		!strings.Contains(err.Error(), dir) {
		t.Errorf("a directory: %v", err)
	}
	if _, err := OpenFile(os.DevNull); !errors.Is(err, engine.ErrCorrupt) {
		t.Errorf("a device: %v", err)
	}
	if _, err := OpenFile(filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "absent") {
		t.Errorf("no file: %v", err)
	}
}

// TestOpenFIFO: what has no bytes of its own is refused, and not waited for.
func TestOpenFIFO(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	_, err := OpenFile(path)
	require.ErrorIs(t, err, engine.ErrCorrupt)
}
