// SPDX-License-Identifier: Apache-2.0

// Package fakeverbs stands in for RDMA devices in tests: a library in the place of libibverbs,
// built from csrc/verbs/testdata/fakeverbs, whose queue pairs move bytes within the test
// program. It runs the same host code as real devices do, and it can do on command what they
// do on bad days. It is no measure of speed.
//
// A program has one such library, so tests that use it do not run in parallel.
package fakeverbs

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/standin"
)

// DevicesMax is how many devices there can be.
const DevicesMax = 8

const panel = 512 // FAKE_PANEL

var library struct {
	sync.Mutex
	path    string // empty: not built
	control *os.File
}

// Fabric is all devices of the program.
type Fabric struct {
	t     testing.TB
	count int
}

// Open has n devices, called fake0 and so on, all up and well: the first call builds the library.
// Each has load open it, as verbs.Load does, whether it was open before or not. What a test
// has set is set back at its end.
func Open(t testing.TB, n int, load func(path string) error) *Fabric {
	t.Helper()
	library.Lock()
	defer library.Unlock()
	if library.path == "" {
		build(t, load)
	} else if err := load(library.path); err != nil {
		t.Fatalf("open the stand-in for libibverbs again: %v", err)
	}
	f := &Fabric{t, n}
	f.reset()
	t.Cleanup(f.reset)
	return f
}

// Path is what load was given. The file is gone, since the library stays open.
func Path() string {
	library.Lock()
	defer library.Unlock()
	return library.path
}

func build(t testing.TB, load func(path string) error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "fakeverbs")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path, name := Compile(t, dir)
	control, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := load(path); err != nil {
		t.Fatalf("open the stand-in for libibverbs: %v", err)
	}
	library.path, library.control = path, control
}

// Compile builds the library and its control file in a folder, with further flags for the
// compiler: for a test that runs a program of its own.
func Compile(t testing.TB, dir string, flags ...string) (path, control string) {
	t.Helper()
	root, err := standin.Root()
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(root, "csrc", "verbs", "testdata", "fakeverbs")
	path, control = filepath.Join(dir, "libibverbs-fake.so.1"), filepath.Join(dir, "control")
	if err := os.WriteFile(control, make([]byte, (1+DevicesMax)*panel), 0o600); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(source, "*.c"))
	args := append([]string{"-shared", "-fPIC", "-O1", "-g", "-std=gnu11", "-Wall", "-Wextra",
		"-Werror", "-fvisibility=hidden",
		"-I", filepath.Join(source, "..", ".."), fmt.Sprintf("-DCONTROL=%q", control),
		"-Wl,--version-script=" + filepath.Join(source, "exports.map"), "-o", path}, flags...)
	if out, err := exec.Command("gcc", append(append(args, files...), "-lpthread")...).
		CombinedOutput(); err != nil {
		t.Fatalf("build the stand-in for libibverbs: %v\n%s", err, out)
	}
	return path, control
}

func put(at int64, v uint32) {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], v)
	if _, err := library.control.WriteAt(b[:], at); err != nil {
		panic(fmt.Sprintf("fakeverbs: write to the control file: %v", err))
	}
}

func get(at int64) uint32 {
	var b [4]byte
	if _, err := library.control.ReadAt(b[:], at); err != nil {
		panic(fmt.Sprintf("fakeverbs: read the control file: %v", err))
	}
	return binary.NativeEndian.Uint32(b[:])
}

func (f *Fabric) reset() {
	for i := range DevicesMax {
		d := Device{i}
		for w := After; w < Contexts; w++ {
			d.Set(w, 0)
		}
		for w := Inlined; w < words; w++ {
			if w != KiBLocked { // what there is, and not what was
				d.Set(w, 0)
			}
		}
		d.Set(Fatal, 0)
		d.Set(Frozen, 0)
		d.Set(Link, 1)
	}
	put(0, uint32(f.count))
}

// Device returns the device of that number.
func (f *Fabric) Device(i int) Device { return Device{i} }

// InUse counts what the devices hold for the program, for leak.Check.
func (f *Fabric) InUse() map[string]uint64 {
	all := map[string]uint64{}
	for i := range DevicesMax {
		d := Device{i}
		for w := Contexts; w <= QueuePairs; w++ {
			if n := d.Get(w); n != 0 {
				all[d.Name()+" "+names[w]] = uint64(n)
			}
		}
	}
	return all
}

// Device is one of the fabric. Its methods may be called from any goroutine, and what they set
// is seen by the device within a few milliseconds.
type Device struct{ index int }

// Name is fake0 and so on.
func (d Device) Name() string { return fmt.Sprintf("fake%d", d.index) }

// Set sets a word of the device's panel.
func (d Device) Set(w Word, v uint32) { put(int64(1+d.index)*panel+4*int64(w), v) }

// Get reads a word.
func (d Device) Get(w Word) uint32 { return get(int64(1+d.index)*panel + 4*int64(w)) }

// awaitMax is how long a test waits for what a device does at once: only a hang takes longer.
const awaitMax = 30 * time.Second

// Await waits until a word is at least v.
func (d Device) Await(t testing.TB, w Word, v uint32) {
	t.Helper()
	for end := time.Now().Add(awaitMax); d.Get(w) < v; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: %s is %d, want at least %d", d.Name(), names[w], d.Get(w), v)
		}
	}
}

// SetLink takes the port down, or up again.
func (d Device) SetLink(up bool) {
	v := uint32(0)
	if up {
		v = 1
	}
	d.Set(Link, v)
}

// FailNext has the next n requests end with a status of enum ibv_wc_status, without moving
// anything.
func (d Device) FailNext(n int, status uint32) {
	d.Set(FailStatus, status)
	d.Set(Fail, uint32(n))
}

// LoseNext has the next n requests land without an acknowledgement: they are said to have failed.
func (d Device) LoseNext(n int) { d.Set(Lose, uint32(n)) }

// GarbleNext has the next message leave with another byte there, as a peer that means harm
// would send it.
func (d Device) GarbleNext(at int) {
	d.Set(GarbleAt, uint32(at))
	d.Set(Garble, 1)
}

// MuteNext has the next n requests land, and no acknowledgement come: the first of them is said to
// have failed, and the others with it. What they read does not come either.
func (d Device) MuteNext(n int) { d.Set(Mute, uint32(n)) }

// DelayNext has the next n requests fail without an acknowledgement, and land afterwards, unless
// the other end of the queue pair is over by then.
func (d Device) DelayNext(n int, by time.Duration) {
	d.Set(LateMicros, uint32(by.Microseconds()))
	d.Set(Late, uint32(n))
}

// ParkNext is DelayNext for requests that land when the test calls LandParked.
func (d Device) ParkNext(n int) {
	d.Set(LateMicros, math.MaxUint32)
	d.Set(Late, uint32(n))
}

// LandParked lets parked requests land, and returns when as many have, or were dropped, as were
// parked since the fabric was opened: all.
func (d Device) LandParked(t testing.TB, all int) {
	t.Helper()
	d.Set(LateMicros, 0)
	for end := time.Now().Add(awaitMax); d.Get(LandedLate)+d.Get(DroppedLate) < uint32(all); {
		if time.Now().After(end) {
			t.Fatalf("%s: %d parked requests have landed and %d were dropped, want %d in all",
				d.Name(), d.Get(LandedLate), d.Get(DroppedLate), all)
		}
		time.Sleep(time.Millisecond)
	}
}
