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
	"github.com/sluicehq/sluice/internal/lentmem"
	"github.com/sluicehq/sluice/internal/testing/fakecufile"
	"github.com/sluicehq/sluice/internal/testing/leak"
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
	cmd.Env = append(append(os.Environ(), name+"="+dir, "TMPDIR="+t.TempDir()), variables...)
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
	want := Facts{Version: "1.14", Batches: true, Streams: true, Compat: true,
		Mode:     "cuFile compat: bounces through host (nvidia-fs is not loaded)",
		BatchMax: 128, DirectMax: 16 << 20, PinnedMax: 1 << 30, CacheMax: 128 << 20}
	if f != want {
		t.Errorf("%+v\nwant %+v", f, want)
	}
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
		if !strings.Contains(text, part) {
			t.Errorf("explained as %q, without %q", text, part)
		}
	}
	library.Set(t, fakecufile.Direct, 1)
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
		{cufile.Facts{AllowCompat: -1, ForceCompat: -1, PCIP2PDMA: -1}, true, "not loaded"},
		{cufile.Facts{PCIP2PDMA: 1}, false, "PCI P2PDMA"},
		{cufile.Facts{NVFSMajor: 2, NVFSMinor: 7}, false, "nvidia-fs 2.7"},
	} {
		if compat, text := mode(&c.said); compat != c.compat || !strings.Contains(text, c.text) {
			t.Errorf("%+v: %v, %q", c.said, compat, text)
		}
	}
}

// TestOldLibrary works with cuFile 1.4: without batches, streams, versions and host memory.
func TestOldLibrary(t *testing.T) {
	if !alone(t, flagsVariable+"=-DSTANDIN_OLD") {
		return
	}
	for _, way := range []Way{WayBatch, WayStream} {
		cfg := testConfig()
		cfg.Way = way
		if _, err := New(cfg); !errors.Is(err, driver.ErrUnavailable) ||
			!strings.Contains(err.Error(), "before 1.8") {
			t.Errorf("%v of an old library: %v", way, err)
		}
	}
	cfg := testConfig()
	cfg.Host = true
	if _, err := New(cfg); !errors.Is(err, driver.ErrUnavailable) ||
		!strings.Contains(err.Error(), "host memory") {
		t.Errorf("host memory with an old library: %v", err)
	}
	const size = 3<<20 + 5
	r := newRig(t, Config{PieceMax: 256 << 10}, size)
	if r.b.cfg.Way != WayThreads {
		t.Errorf("an old library is used by %v", r.b.cfg.Way)
	}
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
	leak.Check(t)
	none := filepath.Join(t.TempDir(), "none.so")
	cfg := testConfig()
	want("no driver", Config{CUDA: none, Library: cfg.Library}, "cuFile is not opened "+
		"without a device: "+none)
	if n := library.Get(fakecufile.Opens); n != 0 {
		t.Errorf("without a device cuFile was opened %d times", n)
	}
	want("no library", Config{CUDA: cfg.CUDA, Library: none}, none+": cannot open")
	library.Put(fakecufile.OpenResult, 5033)
	want("no nvidia-fs", cfg, "cuFileDriverOpen answers 5033")
	library.Put(fakecufile.OpenResult, 0)
	b, err := New(cfg)
	require.NoError(t, err)
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	want("another library", Config{CUDA: cfg.CUDA, Library: none}, "is open already")
	log := filepath.Join(os.TempDir(), "sluice-")
	if place, _ := cufile.Environment(); !strings.HasPrefix(place, log) ||
		filepath.Base(place) != "cufile.log" {
		t.Errorf("cuFile writes its log to %q", place)
	}
	if info, err := os.Stat(filepath.Dir(func() string {
		p, _ := cufile.Environment()
		return p
	}())); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder of the log: %v, %v", info, err)
	}
}

// TestLogOfTheUser wants what the user has set to stay.
func TestLogOfTheUser(t *testing.T) {
	if !alone(t, bareVariable+"=1", "CUFILE_LOGFILE_PATH=/tmp/of-the-user.log") {
		return
	}
	if _, err := Examine(testConfig()); err != nil {
		t.Fatal(err)
	}
	if log, _ := cufile.Environment(); log != "/tmp/of-the-user.log" {
		t.Errorf("the user's log became %q", log)
	}
}

// TestLogOfTheConfiguration wants a configuration that names a folder to count.
func TestLogOfTheConfiguration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cufile.json")
	require.NoError(t,
		os.WriteFile(path, []byte("{ // mine\n\"logging\": { \"dir\": \"/tmp/logs\" } }"),
			0o600))
	if !alone(t, bareVariable+"=1", "CUFILE_ENV_PATH_JSON="+path) {
		return
	}
	if _, err := Examine(testConfig()); err != nil {
		t.Fatal(err)
	}
	if log, _ := cufile.Environment(); log != "" {
		t.Errorf("the log of a configuration that names a folder became %q", log)
	}
}

func TestNamesLogs(t *testing.T) {
	for text, want := range map[string]bool{
		"": false, "{": false, "{}": false, `{"logging": {}}`: false,
		`{"logging": {"dir": ""}}`:         false,
		`{"logging": {"dir": "/var/log"}}`: true,
		"{\n// note\n\"logging\": { /* \"dir\": \"/x\", */ \"level\": \"ERROR\" } }":        false,
		"{\n\"logging\": { // log directory\n //\"dir\": \"/home/x\",\n \"level\": \"E\"}}": false,
		`{"a": "// no comment \" /* ", "logging": {"dir": "/x"}}`:                           true,
		`{"logging": {"dir": "/x"}} /* open`:                                                true,
		`{"logging": {"dir": "/x`:                                                           false,
	} {
		if got := namesLogs([]byte(text)); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

// TestPrivateFolder is not taken in by what somebody else has put there.
func TestPrivateFolder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	mine := filepath.Join(dir, "mine")
	for range 2 {
		if got, err := privateFolder(mine); err != nil || got != mine {
			t.Fatalf("%q, %v", got, err)
		}
	}
	open, link, file := filepath.Join(dir, "open"), filepath.Join(dir, "link"),
		filepath.Join(dir, "file")
	require.NoError(t,
		errors.Join(os.Mkdir(open, 0o700), os.Chmod(open, 0o777), os.Symlink(mine, link),
			os.WriteFile(file, nil, 0o600)))
	for _, taken := range []string{open, link, file} {
		got, err := privateFolder(taken)
		if info, statErr := os.Lstat(got); err != nil || got == taken || statErr != nil ||
			info.Mode() != os.ModeDir|0o700 {
			t.Errorf("%s: %q, %v, %v", taken, got, err, statErr)
		}
	}
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

// TestFiles refuses what transfers could not work with, and takes what may only be read.
func TestFiles(t *testing.T) {
	onStandIn(t)
	r := newRig(t, Config{}, 8192)
	reader, err := os.Open(r.f.Name())
	require.NoError(t, err)
	defer reader.Close()
	writer, err := os.OpenFile(r.f.Name(), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer writer.Close()
	folder, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer folder.Close()
	file := func(f *os.File, off, n uint64, readOnly bool) driver.Segment {
		return driver.Segment{Kind: driver.File, FD: int(f.Fd()), FileOff: off, Len: n,
			ReadOnly: readOnly}
	}
	buffered := file(r.f, 0, 8192, false)
	buffered.Buffered = true
	for _, c := range []struct {
		seg  driver.Segment
		want error
	}{{buffered, driver.ErrNotSupported}, {file(r.f, 1, 8192, false), driver.ErrBounds},
		{file(reader, 0, 8192, false), driver.ErrReadOnly},
		{file(writer, 0, 8192, false), driver.ErrNotSupported},
		{file(folder, 0, 1, true), driver.ErrNotSupported},
		{driver.Segment{Kind: driver.DRAM, Len: 1, Mem: []byte{1}}, driver.ErrNotSupported},
		{driver.Segment{Kind: driver.HBM, Len: 1 << 30, Addr: r.dev.Segment.Addr},
			driver.ErrBounds},
		{driver.Segment{Kind: driver.HBM, Len: 4096, Addr: r.dev.Segment.Addr, Device: 1},
			driver.ErrBounds},
		{driver.Segment{Kind: driver.HBM, Len: 4096, Addr: r.dev.Segment.Addr, Device: 99},
			driver.ErrBounds}} {
		if _, err := r.b.Register(c.seg); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.seg, err, c.want)
		}
	}
	r.m, err = r.b.Register(file(reader, 0, 8192, true))
	require.NoError(t, err)
	r.far = r.imported()
	if err := r.move(driver.Read, driver.Desc{Len: 8192}); err != nil {
		t.Error(err)
	}
	if err := r.p.Submit(9, &driver.Batch{Op: driver.Write,
		Descs: []driver.Desc{{Len: 1, LocalKey: r.local, RemoteKey: r.far}}}); !errors.Is(err,
		driver.ErrReadOnly) {
		t.Errorf("write to what may only be read: %v", err)
	}
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
		if err := errors.Join(m.Revoke(context.Background()), other.Free()); err != nil {
			t.Error(err)
		}
	})
}

// TestMemoryThatMayBeReplacedIsRefused: what other processes map.
func TestMemoryThatMayBeReplacedIsRefused(t *testing.T) {
	onStandIn(t)
	leak.Check(t)
	r := newRig(t, Config{}, 1<<20)
	part, err := r.dev.Segment.Slice(4096, 8192, [16]byte{})
	require.NoError(t, err)
	lentmem.Add(r.dev.Segment.Addr, r.dev.Segment.Len)
	_, err = r.b.Register(part)
	lentmem.Remove(r.dev.Segment.Addr)
	require.ErrorIs(t, err, driver.ErrNotSupported)
	require.ErrorContains(t, err, "Config.Peers of the cuda backend")
	m, err := r.b.Register(part)
	require.NoError(t, err)
	require.NoError(t, m.Revoke(context.Background()))
}
