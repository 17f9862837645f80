// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package gds

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// alone reports whether this is the process that a test wants for itself, in a folder of its own;
// elsewhere it makes one, with further variables, and the test is over.
func alone(t *testing.T, variables ...string) bool {
	t.Helper()
	onStandIn(t)
	const name = "SLUICE_TEST_ALONE"
	if dir := os.Getenv(name); dir != "" {
		t.Chdir(dir) // only now: the stand-ins are built from the sources around the package
		return true
	}
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run", "^"+t.Name()+"$", "-test.v")
	dir := t.TempDir()
	cmd.Env = append(os.Environ(), name+"="+dir, "XDG_CACHE_HOME="+t.TempDir())
	cmd.Env = append(cmd.Env, variables...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); left != nil {
		t.Errorf("left in the working directory: %v", left)
	}
	return false
}

func TestFacts(t *testing.T) {
	onStandIn(t)
	f, err := Examine(testConfig())
	require.NoError(t, err)
	want := Facts{Version: "1.14", Batches: true, Compat: true,
		Mode:     "cuFile compat: bounces through host (nvidia-fs is not loaded)",
		BatchMax: 128, DirectMax: 16 << 20, PinnedMax: 1 << 30, CacheMax: 128 << 20}
	require.EqualValues(t, want, f, "the plan")
	cfg := testConfig()
	cfg.Direct = true
	var missing *driver.UnavailableError
	if _, err := New(cfg); !errors.As(err, &missing) ||
		!strings.Contains(missing.Reason, "bounces through host") || missing.Fix == "" {
		t.Errorf("Config.Direct in compat mode: %v", err)
	}
	r := newRig(t, Config{}, 4096)
	text := r.p.Explain(r.local, r.far)
	for _, part := range []string{"cuFile compat: bounces through host",
		"cuFile 1.14 by 4 threads with batches of 128", "memory registered",
		"sluice bench --lane gpufile"} {
		require.Contains(t, text, part)
	}
	library.Set(t, "direct", 1)
	if f, err = Examine(cfg); err != nil || f.Compat ||
		!strings.Contains(f.Mode, "nvidia-fs 2.24: direct") {
		t.Errorf("with nvidia-fs: %+v, %v", f, err)
	}
}

func TestMode(t *testing.T) {
	for _, c := range []struct {
		said   cufile.Facts
		compat bool
		text   string
	}{
		{cufile.Facts{NVFSMajor: 2, ForceCompat: 1}, true, "force_compat_mode"},
		{cufile.Facts{ForceCompat: -1, PCIP2PDMA: -1}, true, "not loaded"},
		{cufile.Facts{PCIP2PDMA: 1}, false, "PCI P2PDMA"},
		{cufile.Facts{NVFSMajor: 2, NVFSMinor: 7}, false, "nvidia-fs 2.7"},
	} {
		if compat, text := mode(&c.said); compat != c.compat || !strings.Contains(text, c.text) {
			t.Errorf("%+v: %v, %q", c.said, compat, text)
		}
	}
}

// TestOldLibrary works with cuFile 1.4: without batches and versions.
func TestOldLibrary(t *testing.T) {
	if !alone(t, flagsVariable+"=-DSTANDIN_OLD") {
		return
	}
	cfg := testConfig()
	cfg.Way = WayBatch
	if _, err := New(cfg); !errors.Is(err, driver.ErrUnavailable) ||
		!strings.Contains(err.Error(), "before 1.8") {
		t.Errorf("batches of an old library: %v", err)
	}
	const size = 3<<20 + 5
	r := newRig(t, Config{PieceMax: 256 << 10}, size)
	require.EqualValues(t, WayThreads, r.b.mover.cfg.Way, "an old library is used by")
	require.NoError(t, r.move(driver.Read, driver.Desc{Len: size}))
	r.same("read with an old library", r.memory(), r.content())
	if text := r.p.Explain(r.local, r.far); !strings.Contains(text, "cuFile before 1.8 by 16 "+
		"threads, one request each") {
		t.Errorf("explained as %q", text)
	}
}

// TestUnavailable has libraries be missing, or refuse to work: the reason is told, and another may
// be tried afterwards.
func TestUnavailable(t *testing.T) {
	if !alone(t, bareVariable+"=1") {
		return
	}
	want := func(what string, cfg Config, reason string) {
		t.Helper()
		var missing *driver.UnavailableError
		if _, err := New(cfg); !errors.As(err, &missing) || missing.Backend != "gds" ||
			!strings.Contains(missing.Reason, reason) || missing.Fix == "" {
			t.Errorf("%s: %v, want %q", what, err, reason)
		}
	}
	testkit.CheckLeaks(t)
	none := filepath.Join(t.TempDir(), "none.so")
	cfg := testConfig()
	want("no driver", Config{CUDA: none, Library: cfg.Library}, "cuFile is not opened "+
		"without a device: "+none)
	require.Zero(t, library.Get("opens"), "without a device cuFile was opened times")
	want("no library", Config{CUDA: cfg.CUDA, Library: none}, none+": cannot open")
	library.Put("open_result", 5033)
	want("no nvidia-fs", cfg, "cuFileDriverOpen answers 5033")
	library.Put("open_result", 0)
	b, err := New(cfg)
	require.NoError(t, err)
	require.NoError(t, b.Close())
	want("another library", Config{CUDA: cfg.CUDA, Library: none}, "is open already")
}

func TestConfigRefuses(t *testing.T) {
	for _, cfg := range []Config{{Way: 9}, {Threads: -1}, {Threads: 5000}, {Depth: -1},
		{Depth: 1 << 20}, {PieceMax: 5000}, {JobsMax: -1},
		{KeysMax: -1}, {BatchMax: 1 << 10}} {
		if b, err := New(cfg); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%+v: %v, want %v", cfg, err, driver.ErrBounds)
			_ = b.Close()
		}
	}
}

// TestRegisterRefuses what cuFile does not take, and takes a file that may only be read.
func TestRegisterRefuses(t *testing.T) {
	onStandIn(t)
	r := newRig(t, Config{}, 8192)
	opened := func(flags int) driver.Segment {
		f, err := os.OpenFile(r.f.Name(), flags, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return driver.Segment{Kind: driver.File, FD: int(f.Fd()), Len: 8192,
			ReadOnly: flags == os.O_RDONLY}
	}
	buffered := opened(os.O_RDWR)
	buffered.Buffered = true
	addr := r.dev.Segment.Addr
	for _, c := range []struct {
		seg  driver.Segment
		want error
	}{{buffered, driver.ErrNotSupported}, {opened(os.O_WRONLY), driver.ErrNotSupported},
		{driver.Segment{Kind: driver.DRAM, Len: 1, Mem: []byte{1}}, driver.ErrNotSupported},
		{driver.Segment{Kind: driver.HBM, Len: 1 << 30, Addr: addr}, driver.ErrBounds},
		{driver.Segment{Kind: driver.HBM, Len: 4096, Addr: addr, Device: 1}, driver.ErrBounds},
		{driver.Segment{Kind: driver.HBM, Len: 4096, Addr: addr, Device: 99}, driver.ErrBounds}} {
		_, err := r.b.Register(c.seg)
		require.ErrorIs(t, err, c.want, "%+v", c.seg)
	}
	var err error
	r.m, err = r.b.Register(opened(os.O_RDONLY))
	require.NoError(t, err)
	r.far = r.imported()
	require.NoError(t, r.move(driver.Read, driver.Desc{Len: 8192}))
}

// TestTwoDevices moves one batch between a file and the memories of two devices.
func TestTwoDevices(t *testing.T) {
	onStandIn(t)
	eachWay(t, func(t *testing.T, cfg Config) {
		r := newRig(t, cfg, 1<<20)
		other, err := hbmOn(1, 1<<20)
		require.NoError(t, err)
		m, err := r.b.Register(other.Segment)
		require.NoError(t, err)
		var descs []driver.Desc
		for i := range uint64(16) {
			descs = append(descs, driver.Desc{Local: i << 16, Remote: i << 16, Len: 5000,
				LocalKey: r.local, RemoteKey: r.far},
				driver.Desc{Local: i << 16, Remote: i<<16 + 8192, Len: 4096, LocalKey: m.Key(),
					RemoteKey: r.far})
		}
		require.NoError(t, r.p.Submit(3, &driver.Batch{Op: driver.Read, Descs: descs}))
		require.NoError(t, r.outcome(3))
		text, one, two := r.content(), r.memory(), make([]byte, 1<<20)
		if _, err := other.Bytes.ReadAt(two, 0); err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			r.same("the first device", one[i<<16:][:5000], text[i<<16:][:5000])
			r.same("the second device", two[i<<16:][:4096], text[i<<16+8192:][:4096])
		}
		require.NoError(t, errors.Join(m.Revoke(context.Background()), other.Free()))
	})
}

// TestMemoryThatMayBeReplacedIsRefused: what other processes map.
func TestMemoryThatMayBeReplacedIsRefused(t *testing.T) {
	onStandIn(t)
	testkit.CheckLeaks(t)
	r := newRig(t, Config{}, 1<<20)
	part, err := r.dev.Segment.Slice(4096, 8192, [16]byte{})
	require.NoError(t, err)
	hostmem.AddLent(r.dev.Segment.Addr, r.dev.Segment.Len)
	_, err = r.b.Register(part)
	hostmem.RemoveLent(r.dev.Segment.Addr)
	require.ErrorIs(t, err, driver.ErrNotSupported)
	require.ErrorContains(t, err, "Config.Peers of the cuda backend")
	m, err := r.b.Register(part)
	require.NoError(t, err)
	require.NoError(t, m.Revoke(context.Background()))
}
