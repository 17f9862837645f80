// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// writerVariable makes the test binary a writer of the store that it names; writerPath
// says by which path of posix.
const writerVariable, writerPath = "SLUICE_TEST_STORE", "SLUICE_TEST_STORE_PATH"

func TestMain(m *testing.M) {
	if path, ok := os.LookupEnv(writerVariable); ok {
		cfg := posix.Config{Threads: 4}
		if os.Getenv(writerPath) == "threads" {
			cfg.Path = posix.PathThreads
		}
		if err := writeForEver(path, cfg); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// killShape has blocks of no whole pages, so that each is written in both ways of posix.
var killShape = Geometry{BlockBytes: 300_001, Blocks: 24}

// attach opens a store as soon as nothing of the process before is left.
func attach(path string) (s *Store, err error) {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if s, err = Open(path, Options{}); !errors.Is(err, engine.ErrBusy) ||
			time.Now().After(end) {
			return s, err
		}
	}
}

// contentOf fills a block with what its name says.
func contentOf(name Name, p []byte) {
	random := rand.NewPCG(binary.LittleEndian.Uint64(name[:]), 1)
	for ; len(p) >= 8; p = p[8:] {
		binary.LittleEndian.PutUint64(p, random.Uint64())
	}
	clear(p)
}

// writeForEver writes blocks, one after the other and some of them twice, until it is
// killed.
func writeForEver(path string, cfg posix.Config) error {
	s, err := attach(path)
	if err != nil {
		return err
	}
	w, err := newWriter(s, cfg)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for {
		i := rand.Uint32N(uint32(killShape.Blocks))
		if err := s.Begin(i); err != nil {
			return err
		}
		if _, err := w.write(i); err != nil {
			return err
		}
	}
}

// writer writes blocks of a store.
type writer struct {
	s      *Store
	e      *engine.Engine
	memory *engine.Memory
	self   *engine.Peer
	local  *engine.Region
	remote *engine.Remote
}

func newWriter(s *Store, cfg posix.Config) (w *writer, err error) {
	w = &writer{s: s}
	b, err := posix.New(cfg)
	if err != nil {
		return nil, err
	}
	if w.e,
		err = engine.Open(engine.Config{Name: "writer",
		Backends: []driver.Backend{b}}); err != nil {
		return nil, err
	}
	if w.memory, err = engine.Alloc(killShape.BlockBytes, engine.AllocOptions{}); err != nil {
		return nil, err
	}
	if w.local, err = w.e.Register("memory", w.memory.Segment()); err != nil {
		return nil, err
	}
	if _, err = w.e.Register("store", s.Segment()); err != nil {
		return nil, err
	}
	if w.self, err = w.e.Self(); err != nil {
		return nil, err
	}
	w.remote, err = w.self.Remote("store")
	return w, err
}

// write puts new content into a block of which Begin has been called.
func (w *writer) write(i uint32) (Block, error) {
	var name Name
	binary.LittleEndian.PutUint64(name[:], rand.Uint64())
	contentOf(name, w.local.Bytes())
	t, err := w.e.NewTransfer(w.self, engine.Write, engine.Route{})
	if err != nil {
		return Block{}, err
	}
	if err := t.Add(w.local, 0, w.remote, uint64(i)*killShape.Stride(),
		killShape.BlockBytes); err != nil {
		return Block{}, err
	}
	if err := t.Post(); err != nil {
		return Block{}, err
	}
	if err := t.Wait(context.Background()); err != nil {
		return Block{}, err
	}
	b, err := w.s.Commit(i, name, killShape.BlockBytes, Sum(w.local.Bytes()))
	return b, errors.Join(err, t.Close())
}

func (w *writer) close() error { return errors.Join(w.e.Close(), w.memory.Close()) }

// TestKilled kills a writer at some moments: what the store says of a block is true each time, and
// stays so.
func TestKilled(t *testing.T) { killed(t, 1, 10) }

func TestSoakKilled(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	killed(t, seed, 200)
}

func killed(t *testing.T, seed uint64, rounds int) {
	for _, way := range []string{"ring", "threads"} {
		t.Run(way, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "store")
			s, err := Create(path, killShape, Options{})
			noError(t, err)
			noError(t, s.Close())
			random := rand.New(rand.NewPCG(seed, 1))
			before, begun, kept := map[uint32]Block{}, 0, 0
			// where no block is written in so short a time, writers are given more
			for round := 0; round < rounds || len(before) == 0 && round < 4*rounds; round++ {
				most := int64(30*time.Millisecond) << (round / rounds * 2)
				killWriter(t, path, way, time.Duration(random.Int64N(most)))
				after := verified(t, path)
				for i := range before {
					switch b, ok := after[i]; {
					case !ok:
						begun++ // killed between Begin and Commit
					case b == before[i]:
						kept++
					}
				}
				before = after
			}
			t.Logf("%d blocks were lost in mid-write, %d stayed, %d are in use", begun, kept,
				len(before))
			isTrue(t, len(before) > 0, "nothing was written")
		})
	}
}

// killWriter runs a writer for a while.
func killWriter(t *testing.T, path, way string, after time.Duration) {
	t.Helper()
	exe, err := os.Executable()
	noError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), writerVariable+"="+path, writerPath+"="+way)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	noError(t, err)
	noError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	noError(t, err)
	equal(t, "ready\n", line)
	time.Sleep(after)
	noError(t, cmd.Process.Kill())
	_ = cmd.Wait() // says that it was killed
}

// verified opens the store and compares each block with what its record and its name say.
func verified(t *testing.T, path string) map[uint32]Block {
	t.Helper()
	s, err := attach(path)
	noError(t, err)
	defer s.Close()
	found := map[uint32]Block{}
	s.Each(func(i uint32, b Block) bool { found[i] = b; return true })
	got, want := make([]byte, killShape.BlockBytes), make([]byte, killShape.BlockBytes)
	for i, b := range found {
		_, err := s.f.ReadAt(got, int64(s.Segment().FileOff+uint64(i)*killShape.Stride()))
		noError(t, err)
		if err := b.Verify(got); err != nil {
			testkit.FatalBroken(t, "block %d: %v", i, err)
		}
		if contentOf(b.Name, want); !bytes.Equal(want, got) {
			testkit.FatalBroken(t, "block %d has another content", i)
		}
	}
	return found
}
