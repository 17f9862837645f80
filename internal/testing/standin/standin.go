// SPDX-License-Identifier: Apache-2.0

// Package standin builds software stand-ins of libraries for tests: of libcuda, libcufile and
// libibverbs. They run the same host code as the real ones do, and can do on command what devices,
// libraries and disks do on bad days. They are no measure of speed. Beside them stand folders that
// look like the /sys of machines with devices.
//
// A test commands a stand-in by the words of its panel, a struct of a C header that both map:
// Library.Set(t, "delay_us", 500). The header says what each word means.
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

// Library is a stand-in of libcuda or libcufile that was built.
type Library struct {
	Path  string
	Panel string // a file, whose name the library finds in its environment when it is opened

	dir         string
	words       []string // of the panel, in order
	panel       []byte
	owner       string // before the names in what InUse tells
	first, last string // the words that it counts
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

// Remove deletes the files; the library stays open where it was opened.
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

// order keeps the writes of words apart from what follows them, as another process would see it.
var order atomic.Uint32

// Put writes a word.
func (l *Library) Put(word string, value uint32) {
	binary.NativeEndian.PutUint32(l.word(word), value)
	order.Add(1)
}

// InUse counts what the program has of the library, for testkit.CheckLeaks.
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

// Root returns the folder of go.mod above the working directory, which is a test's package: the
// paths that a binary built with -trimpath knows of its sources are none of this machine.
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
