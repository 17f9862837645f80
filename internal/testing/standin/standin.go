// SPDX-License-Identifier: Apache-2.0

// Package standin builds software stand-ins of vendors' libraries for tests, and shares a panel
// with each: words by which a test tells it what to do, and sees what there is.
package standin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// Source is what a stand-in is built from. W numbers the words of its panel.
type Source[W ~int] struct {
	Name  string   // of the library: "libcuda"
	File  string   // its C
	Flags []string // for the compiler, beside those of all

	Words       []string // names of the words
	Owner       string   // before the names in what InUse tells
	First, Last W        // the words that it counts
}

// Library is a stand-in that was built.
type Library[W ~int] struct {
	Path  string
	Panel string // a file, whose name the library finds in its environment when it is opened

	source Source[W]
	dir    string
	panel  []byte
}

// Build compiles it, with further flags.
func (s Source[W]) Build(flags ...string) (*Library[W], error) {
	dir, err := os.MkdirTemp("", s.Name+"-standin-*")
	if err != nil {
		return nil, err
	}
	l := &Library[W]{Path: filepath.Join(dir, s.Name+"-standin.so"), Panel: filepath.Join(dir,
		"panel"), source: s, dir: dir}
	if err := l.build(flags); err != nil {
		l.Remove()
		return nil, fmt.Errorf("build the stand-in of %s: %w", s.Name, err)
	}
	return l, nil
}

func (l *Library[W]) build(flags []string) error {
	args := append([]string{"-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE",
		"-pthread", "-shared", "-fPIC",
		"-o", l.Path, l.source.File},
		append(l.source.Flags[:len(l.source.Flags):len(l.source.Flags)], flags...)...)
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w (apt-get install gcc libc6-dev)\n%s", err, out)
	}
	size := 4 * len(l.source.Words)
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
func (l *Library[W]) Remove() { _ = os.RemoveAll(l.dir) }

// Get reads a word.
func (l *Library[W]) Get(w W) uint32 { return binary.NativeEndian.Uint32(l.panel[4*w:]) }

// Set writes a word until the test ends.
func (l *Library[W]) Set(t testing.TB, w W, value uint32) {
	t.Helper()
	before := l.Get(w)
	l.Put(w, value)
	t.Cleanup(func() { l.Put(w, before) })
}

// order keeps the writes of words apart from what follows them, as another process would see it.
var order atomic.Uint32

// Put writes a word.
func (l *Library[W]) Put(w W, value uint32) {
	binary.NativeEndian.PutUint32(l.panel[4*w:], value)
	order.Add(1)
}

// InUse counts what the program has of the library, for leak.Check.
func (l *Library[W]) InUse() map[string]uint64 {
	n := map[string]uint64{}
	for w := l.source.First; w <= l.source.Last; w++ {
		if v := l.Get(w); v != 0 {
			n[l.source.Owner+" "+l.source.Words[w]] = uint64(v)
		}
	}
	return n
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
