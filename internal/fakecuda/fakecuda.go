// SPDX-License-Identifier: Apache-2.0

// Package fakecuda builds the software stand-in of libcuda for tests, from cuda/testdata, and tells it
// what to do. It runs the same host code as a driver does, on threads of its own, and can do on
// command what devices do on bad days. It is no measure of speed.
//
// A process opens one driver, so all tests of a binary share it, and those that command it do not
// run in parallel.
package fakecuda

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

// Word is a word of the stand-in's panel: cuda/testdata/standin_panel.h says what each means. A
// test may set those before Streams and read all.
type Word int

// The words, in the order of struct panel.
const (
	DelayMicros Word = iota
	FaultAfter
	FaultResult
	RefuseAfter
	RefuseResult
	PinResult
	Hold
	Streams
	Events
	Allocations
	HostAllocations
	Pins
	Reservations
	Mappings
	Handles
	Contexts
	Copies
	Batches
	Launches
	words
)

// names are those of struct panel.
var names = [words]string{
	"delay_us", "fault_after", "fault_result", "refuse_after", "refuse_result", "pin_result", "hold",
	"streams", "events", "allocations", "host_allocations", "pins", "reservations", "mappings", "handles", "contexts",
	"copies", "batches", "launches",
}

// Library is a stand-in that was built.
type Library struct {
	Path  string
	Panel string // what the environment must have as STANDIN_PANEL when the library is opened
	dir   string
	panel []byte
}

// Build compiles it, with further flags: -DSTANDIN_OLD is a driver without what is optional.
func Build(flags ...string) (*Library, error) {
	dir, err := os.MkdirTemp("", "fakecuda-*")
	if err != nil {
		return nil, err
	}
	l := &Library{Path: filepath.Join(dir, "libcuda-standin.so"), dir: dir}
	if err := l.build(flags); err != nil {
		return nil, fmt.Errorf("build the stand-in of libcuda: %w", err)
	}
	return l, nil
}

func (l *Library) build(flags []string) error {
	_, here, _, _ := runtime.Caller(0)
	source := filepath.Join(filepath.Dir(here), "..", "..", "cuda", "testdata", "libcuda_standin.c")
	args := append([]string{"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-D_GNU_SOURCE", "-pthread",
		"-shared", "-fPIC", "-o", l.Path, source}, flags...)
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

// InUse counts what the program has of the driver, for leak.Check.
func (l *Library) InUse() map[string]uint64 {
	n := map[string]uint64{}
	for w := Streams; w <= Contexts; w++ {
		if v := l.Get(w); v != 0 {
			n["cuda "+names[w]] = uint64(v)
		}
	}
	return n
}
