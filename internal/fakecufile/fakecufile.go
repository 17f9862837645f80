// SPDX-License-Identifier: Apache-2.0

// Package fakecufile builds the software stand-in of libcufile for tests, from testdata, and tells it what to do.
// It moves bytes between files and the memory of the stand-in of libcuda, and can do on command what libraries and
// disks do on bad days. It is not cuFile, and no measure of its speed.
//
// A process opens one library, so all tests of a binary share it, and those that command it do not run in parallel.
package fakecufile

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Word is a word of the stand-in's panel: testdata/standin_panel.h says what each means. A test may set those before
// Handles and read all.
type Word int

// The words, in the order of struct panel.
const (
	DelayMicros Word = iota
	Hold
	ShortMax
	EndAt
	FailAfter
	FailCode
	FailStatus
	BatchLimit
	BatchResult
	StatusResult
	StreamResult
	OpenResult
	HandleResult
	RegisterResult
	Direct
	Handles
	Buffers
	Batches
	Streams
	UnderWay
	Reads
	Writes
	Submits
	AsyncCalls
	Opens
	ChangedBlocks
	words
)

// names are those of struct panel.
var names = [words]string{
	"delay_us", "hold", "short_max", "end_at", "fail_after", "fail_code", "fail_status", "batch_limit", "batch_result",
	"status_result", "stream_result", "open_result", "handle_result", "register_result", "direct",
	"handles", "buffers", "batches", "streams", "under_way",
	"reads", "writes", "submits", "async_calls", "opens",
	"changed_blocks",
}

// Library is a stand-in that was built.
type Library struct {
	Path  string
	Panel string // what the environment must have as STANDIN_CUFILE_PANEL when the library is opened
	dir   string
	panel []byte
}

// Build compiles it, with further flags: -DSTANDIN_OLD is a library without what is optional. It knows memory of devices
// by the stand-in of libcuda that the environment names as STANDIN_LIBCUDA when it is opened.
func Build(flags ...string) (*Library, error) {
	dir, err := os.MkdirTemp("", "fakecufile-*")
	if err != nil {
		return nil, err
	}
	l := &Library{Path: filepath.Join(dir, "libcufile-standin.so"), dir: dir}
	if err := l.build(flags); err != nil {
		return nil, fmt.Errorf("build the stand-in of libcufile: %w", err)
	}
	return l, nil
}

func (l *Library) build(flags []string) error {
	_, here, _, _ := runtime.Caller(0)
	folder := filepath.Dir(here)
	args := append([]string{"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-shared", "-fPIC",
		"-I", filepath.Join(folder, "..", "..", "csrc"), "-o", l.Path, filepath.Join(folder, "testdata", "libcufile_standin.c")}, flags...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w (apt-get install gcc libc6-dev)\n%s", err, out)
	}
	l.Panel = filepath.Join(l.dir, "panel")
	if err := os.WriteFile(l.Panel, make([]byte, 4*words), 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(l.Panel, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	l.panel, err = unix.Mmap(int(f.Fd()), 0, int(4*words), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// Remove deletes the files; the library stays open where it was opened.
func (l *Library) Remove() { _ = os.RemoveAll(l.dir) }

// Get reads a word.
func (l *Library) Get(w Word) uint32 { return binary.NativeEndian.Uint32(l.panel[4*w:]) }

// Set writes a word until the test ends.
func (l *Library) Set(t testing.TB, w Word, value uint32) {
	t.Helper()
	before := l.Get(w)
	l.Put(w, value)
	t.Cleanup(func() { l.Put(w, before) })
}

// order keeps the writes of words apart from what follows them, as another process would see it.
var order atomic.Uint32

// Put writes a word.
func (l *Library) Put(w Word, value uint32) {
	binary.NativeEndian.PutUint32(l.panel[4*w:], value)
	order.Add(1)
}

// InUse counts what the program has of the library, for tests of leaks.
func (l *Library) InUse() map[string]uint64 {
	n := map[string]uint64{}
	for w := Handles; w <= UnderWay; w++ {
		if v := l.Get(w); v != 0 {
			n["cufile "+names[w]] = uint64(v)
		}
	}
	return n
}
