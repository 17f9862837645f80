// SPDX-License-Identifier: Apache-2.0

// Package standin builds software replacements (stand-ins) for libcuda, libcufile and libibverbs,
// for tests on machines without devices. Tests can make them inject faults: errors, delays and
// losses of devices, libraries and disks. Their speed says nothing about real devices. The package
// also makes folders that look like the /sys of machines with devices.
//
// A test controls a stand-in through its panel, a C struct of 32-bit words in shared memory:
// Library.Set(t, "delay_us", 500). The C header of the struct says what each word means.
//
// A process opens one library of a kind, so all tests of a binary share it, and those that command
// it do not run in parallel.
package standin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Library is a compiled stand-in for libcuda or libcufile.
type Library struct {
	Path  string
	Panel string // the panel's file; the library gets its name from the environment when opened

	dir         string
	words       []string // names of the panel's words, in order
	panel       []byte
	owner       string // prefix of the names that InUse returns
	first, last string // the range of words that InUse returns
}

// BuildCUDA compiles the stand-in of libcuda, with further flags: -DSTANDIN_OLD is a driver without
// what is optional. The environment must have its Panel as STANDIN_PANEL when it is opened. Its
// words stand in cuda/testdata/standin_panel.h: a test may set those before streams and read all.
func BuildCUDA(flags ...string) (*Library, error) {
	l := &Library{owner: "cuda", first: "streams", last: "contexts"}
	return l, l.build("libcuda", "cuda/testdata", append(flags, "-Wno-unknown-pragmas"))
}

// BuildCuFile compiles the stand-in of libcufile, which moves bytes between files and the memory of
// the stand-in of libcuda that the environment names as STANDIN_LIBCUDA when it is opened. There
// its Panel must be STANDIN_CUFILE_PANEL. -DSTANDIN_OLD is a library without what is optional. Its
// words stand in testdata/standin_panel.h: a test may set those before handles and read all.
func BuildCuFile(flags ...string) (*Library, error) {
	l := &Library{owner: "cufile", first: "handles", last: "under_way"}
	return l, l.build("libcufile", "internal/testing/standin/testdata", flags)
}

// build compiles NAME_standin.c of a folder of this module.
func (l *Library) build(name, folder string, flags []string) (err error) {
	defer func() {
		if err != nil {
			l.Remove()
			err = fmt.Errorf("build the stand-in of %s: %w", name, err)
		}
	}()
	root, err := Root()
	if err != nil {
		return err
	}
	folder = filepath.Join(root, filepath.FromSlash(folder))
	if l.words, err = wordsOf(filepath.Join(folder, "standin_panel.h"), "panel"); err != nil {
		return err
	}
	if l.dir, err = os.MkdirTemp("", name+"-standin-*"); err != nil {
		return err
	}
	l.Path, l.Panel = filepath.Join(l.dir, name+"-standin.so"), filepath.Join(l.dir, "panel")
	args := append([]string{"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
		"-pthread", "-shared", "-fPIC", "-o", l.Path, filepath.Join(folder, name+"_standin.c")},
		flags...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w (apt-get install gcc libc6-dev)\n%s", err, out)
	}
	size := 4 * len(l.words)
	if err := os.WriteFile(l.Panel, make([]byte, size), 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(l.Panel, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	l.panel, err = unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

// Remove deletes the files. A process that has opened the library can still use it.
func (l *Library) Remove() { _ = os.RemoveAll(l.dir) }

// word is where a word lies in the panel.
func (l *Library) word(name string) []byte { return l.panel[4*indexOf(l.words, name):] }

// Get reads a word.
func (l *Library) Get(word string) uint32 { return binary.NativeEndian.Uint32(l.word(word)) }

// Set writes a word until the test ends.
func (l *Library) Set(t testing.TB, word string, value uint32) {
	t.Helper()
	before := l.Get(word)
	l.Put(word, value)
	t.Cleanup(func() { l.Put(word, before) })
}

// order is a memory barrier: the stand-in sees a written word before anything the test does later.
var order atomic.Uint32

// Put writes a word.
func (l *Library) Put(word string, value uint32) {
	binary.NativeEndian.PutUint32(l.word(word), value)
	order.Add(1)
}

// InUse returns the resources of the library that the program holds, for testkit.CheckLeaks.
func (l *Library) InUse() map[string]uint64 {
	n := map[string]uint64{}
	for _, w := range l.words[indexOf(l.words, l.first) : indexOf(l.words, l.last)+1] {
		if v := l.Get(w); v != 0 {
			n[l.owner+" "+w] = uint64(v)
		}
	}
	return n
}

var declaration = regexp.MustCompile(`_Atomic (?:unsigned|uint32_t) ([\w,\s]+);`)

// wordsOf reads the words of a panel from the header that declares the struct.
func wordsOf(header, panel string) (words []string, err error) {
	text, err := os.ReadFile(header)
	if err != nil {
		return nil, err
	}
	_, body, _ := strings.Cut(string(text), "struct "+panel+" {")
	body, _, _ = strings.Cut(body, "\n};")
	for _, m := range declaration.FindAllStringSubmatch(body, -1) {
		words = append(words, strings.Fields(strings.ReplaceAll(m[1], ",", " "))...)
	}
	return words, nil
}

func indexOf(words []string, word string) int {
	i := slices.Index(words, word)
	if i < 0 {
		panic("the panel of the stand-in has no word " + word)
	}
	return i
}

// Root returns the folder of go.mod above the working directory, which is that of a test's package.
// It cannot use runtime.Caller, since -trimpath removes the paths of the sources.
func Root() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("find the sources: no go.mod above the working directory")
		}
		dir = parent
	}
	return "", err
}
