// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"
)

// DevicesMax is how many devices there can be.
const DevicesMax = 8

const verbsPanel = 512 // FAKE_PANEL

var library struct {
	sync.Mutex
	path    string // empty: not built
	control *os.File
	words   []string // of the panel of a device, in order
}

// VerbsFabric is all devices of the program, of a library in the place of libibverbs, built from
// csrc/verbs/testdata/fakeverbs, whose queue pairs move bytes within the test program.
type VerbsFabric struct {
	t     testing.TB
	count int
}

// OpenVerbs has n devices, called fake0 and so on, all up and well: the first call builds the
// library. Each has load open it, as verbs.Load does, whether it was open before or not. What a
// test has set is set back at its end.
func OpenVerbs(t testing.TB, n int, load func(path string) error) *VerbsFabric {
	t.Helper()
	library.Lock()
	defer library.Unlock()
	if library.path == "" {
		buildVerbs(t, load)
	} else if err := load(library.path); err != nil {
		t.Fatalf("open the stand-in for libibverbs again: %v", err)
	}
	f := &VerbsFabric{t, n}
	f.reset()
	t.Cleanup(f.reset)
	return f
}

// VerbsPath returns the path of the library that load has opened. The file itself is deleted.
func VerbsPath() string {
	library.Lock()
	defer library.Unlock()
	return library.path
}

func buildVerbs(t testing.TB, load func(path string) error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "fakeverbs")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	root, err := Root()
	if err == nil {
		library.words, err = wordsOf(filepath.Join(root, "csrc", "verbs", "testdata", "fakeverbs",
			"control.h"), "fake_panel")
	}
	if err != nil {
		t.Fatal(err)
	}
	path, name := CompileVerbs(t, dir)
	control, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := load(path); err != nil {
		t.Fatalf("open the stand-in for libibverbs: %v", err)
	}
	library.path, library.control = path, control
}

// CompileVerbs builds the library and its control file in a folder, with further flags for the
// compiler: for a test that runs a program of its own.
func CompileVerbs(t testing.TB, dir string, flags ...string) (path, control string) {
	t.Helper()
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(root, "csrc", "verbs", "testdata", "fakeverbs")
	path, control = filepath.Join(dir, "libibverbs-fake.so.1"), filepath.Join(dir, "control")
	if err := os.WriteFile(control, make([]byte, (1+DevicesMax)*verbsPanel), 0o600); err != nil {
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
		panic(fmt.Sprintf("stand-in for verbs: write to the control file: %v", err))
	}
}

func get(at int64) uint32 {
	var b [4]byte
	if _, err := library.control.ReadAt(b[:], at); err != nil {
		panic(fmt.Sprintf("stand-in for verbs: read the control file: %v", err))
	}
	return binary.NativeEndian.Uint32(b[:])
}

func (f *VerbsFabric) reset() {
	for i := range DevicesMax {
		d := VerbsDevice{i}
		after, contexts, inlined := f.at("after"), f.at("contexts"), f.at("inlined")
		for _, w := range slices.Concat(library.words[after:contexts], library.words[inlined:]) {
			if w != "kib_locked" { // what there is, and not what was
				d.Set(w, 0)
			}
		}
		d.Set("fatal", 0)
		d.Set("frozen", 0)
		d.Set("link", 1)
	}
	put(0, uint32(f.count))
}

// at is a word's place in the panel of a device.
func (f *VerbsFabric) at(word string) int { return indexOf(library.words, word) }

// Device returns the device of that number.
func (f *VerbsFabric) Device(i int) VerbsDevice { return VerbsDevice{i} }

// InUse counts what the devices hold for the program, for testkit.CheckLeaks.
func (f *VerbsFabric) InUse() map[string]uint64 {
	all := map[string]uint64{}
	for i := range DevicesMax {
		d := VerbsDevice{i}
		for _, w := range library.words[f.at("contexts") : f.at("qps")+1] {
			if n := d.Get(w); n != 0 {
				all[d.Name()+" "+w] = uint64(n)
			}
		}
	}
	return all
}

// VerbsDevice is a device of a fabric. Its methods may be called from any goroutine. The device
// notices what they set within a few milliseconds.
type VerbsDevice struct{ index int }

// Name is fake0 and so on.
func (d VerbsDevice) Name() string { return fmt.Sprintf("fake%d", d.index) }

// Set sets a word of the device's panel: csrc/verbs/testdata/fakeverbs/control.h says what each
// means. A test may set those before contexts and read the others.
func (d VerbsDevice) Set(word string, v uint32) { put(d.at(word), v) }

// Get reads a word.
func (d VerbsDevice) Get(word string) uint32 { return get(d.at(word)) }

func (d VerbsDevice) at(word string) int64 {
	return int64(1+d.index)*verbsPanel + 4*int64(indexOf(library.words, word))
}

// awaitMax is how long a test waits for what a device does at once: only a hang takes longer.
const awaitMax = 30 * time.Second

// Await waits until a word is at least v.
func (d VerbsDevice) Await(t testing.TB, w string, v uint32) {
	t.Helper()
	for end := time.Now().Add(awaitMax); d.Get(w) < v; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: %s is %d, want at least %d", d.Name(), w, d.Get(w), v)
		}
	}
}

// SetLink takes the port down, or up again.
func (d VerbsDevice) SetLink(up bool) {
	v := uint32(0)
	if up {
		v = 1
	}
	d.Set("link", v)
}

// FailNext has the next n requests end with a status of enum ibv_wc_status, without moving
// anything.
func (d VerbsDevice) FailNext(n int, status uint32) {
	d.Set("fail_status", status)
	d.Set("fail", uint32(n))
}

// LoseNext has the next n requests land without an acknowledgement: they are said to have failed.
func (d VerbsDevice) LoseNext(n int) { d.Set("lose", uint32(n)) }

// GarbleNext has the next message leave with another byte there, as a peer that means harm
// would send it.
func (d VerbsDevice) GarbleNext(at int) {
	d.Set("garble_at", uint32(at))
	d.Set("garble", 1)
}

// MuteNext has the next n requests land, and no acknowledgement come: the first of them is said to
// have failed, and the others with it. What they read does not come either.
func (d VerbsDevice) MuteNext(n int) { d.Set("mute", uint32(n)) }

// DelayNext has the next n requests fail without an acknowledgement, and land afterwards, unless
// the other end of the queue pair is over by then.
func (d VerbsDevice) DelayNext(n int, by time.Duration) {
	d.Set("late_us", uint32(by.Microseconds()))
	d.Set("late", uint32(n))
}

// ParkNext is DelayNext for requests that land when the test calls LandParked.
func (d VerbsDevice) ParkNext(n int) {
	d.Set("late_us", math.MaxUint32)
	d.Set("late", uint32(n))
}

// LandParked lets parked requests land, and returns when as many have, or were dropped, as were
// parked since the fabric was opened: all.
func (d VerbsDevice) LandParked(t testing.TB, all int) {
	t.Helper()
	d.Set("late_us", 0)
	for end := time.Now().Add(awaitMax); d.Get("landed_late")+d.Get("dropped_late") < uint32(all); {
		if time.Now().After(end) {
			t.Fatalf("%s: %d parked requests have landed and %d were dropped, want %d in all",
				d.Name(), d.Get("landed_late"), d.Get("dropped_late"), all)
		}
		time.Sleep(time.Millisecond)
	}
}
