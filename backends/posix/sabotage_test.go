// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// saboteur changes what the kernel has answered, before the backend hears of it. All is guarded by
// Core.Mu.
type saboteur struct {
	files.Mover
	alter    func(l *files.Landing)
	syncs    atomic.Int32 // begun
	kinds    [2]int       // writes: through the page cache, past it
	underWay [2]int       // of those
	mixed    int          // of those that began while one of the other kind was under way
}

func kind(r *files.Request) int {
	if r.Direct {
		return direct
	}
	return cached
}

const cached, direct = 0, 1

func (s *saboteur) Put(r *files.Request) {
	if r.Kind == files.Sync {
		s.syncs.Add(1)
	}
	if r.Kind == files.Write {
		s.kinds[kind(r)]++
		s.underWay[kind(r)]++
		if s.underWay[1-kind(r)] > 0 {
			s.mixed++
		}
	}
	s.Mover.Put(r)
}

func (s *saboteur) Reap(out []files.Landing) int {
	n := s.Mover.Reap(out)
	for i := range out[:n] {
		if r := out[i].R; r.Kind == files.Write {
			s.underWay[kind(r)]--
		}
		if s.alter != nil {
			s.alter(&out[i])
		}
	}
	return n
}

// sabotage puts a saboteur into a rig that is idle.
func sabotage(r *rig, alter func(l *files.Landing)) *saboteur {
	r.b.core.Mu.Lock()
	defer r.b.core.Mu.Unlock()
	s := &saboteur{Mover: r.b.core.Mover, alter: alter}
	r.b.core.Mover = s
	return s
}

// TestPartialAnswers has the kernel do less than it was asked to, or nothing for now: each
// transfer must be whole all the same.
func TestPartialAnswers(t *testing.T) {
	random := rand.New(rand.NewPCG(8, 9)) // reap is called by one goroutine at a time
	answers := map[string]func(l *files.Landing){
		"less": func(l *files.Landing) {
			if l.N > 1 {
				l.N = 1 + random.IntN(l.N-1)
			}
		},
		"less, of whole blocks": func(l *files.Landing) {
			if l.N > 4096 {
				l.N = max(l.N/2, 4096) &^ 4095
			}
		},
		"later": func(l *files.Landing) {
			if random.IntN(3) > 0 {
				l.Err = []syscall.Errno{syscall.EAGAIN, syscall.EINTR,
					syscall.ECANCELED}[random.IntN(3)]
			}
		},
	}
	for name, alter := range answers {
		t.Run(name, func(t *testing.T) {
			bothPaths(t, func(t *testing.T, cfg Config) {
				cfg.Buffered = name == "less" // past the page cache an odd end is that of the file
				testPartialAnswers(t, cfg, alter)
			})
		})
	}
}

func testPartialAnswers(t *testing.T, cfg Config, alter func(l *files.Landing)) {
	const size = 3 << 20
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, cfg, fileSegment(f, size), size)
	sabotage(r, alter)
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(i*31 + i>>11)
	}
	copy(r.mem, want)
	pieces := []driver.Desc{{Len: 2 << 20}, {Local: 2 << 20, Remote: 2 << 20, Len: 12345},
		{Local: 2<<20 + 12345, Remote: 2<<20 + 12345, Len: 1<<20 - 12345}}
	require.NoError(t, r.move(t, driver.Write, pieces...))
	if got, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("the file differs from what was written (%v)", err)
	}
	clear(r.mem)
	require.NoError(t, r.move(t, driver.Read, pieces...))
	require.True(t, bytes.Equal(r.mem, want), "memory differs from the file")
}

// TestNeverReady bounds how often a request is tried that the kernel never takes.
func TestNeverReady(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), 8192), 8192), 8192)
		sabotage(r, func(l *files.Landing) { l.Err = syscall.EAGAIN })
		wantFileError(t, r.move(t, driver.Read, driver.Desc{Len: 8192}), 0, "read", 0,
			syscall.EAGAIN)
	})
}

// TestDurable asks for one durable write among others: it alone waits for a sync. With
// Config.Durable each write does.
func TestDurable(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, cfg.Durable = range []bool{false, true} {
			testDurable(t, cfg)
		}
	})
}

func testDurable(t *testing.T, cfg Config) {
	const part = 64 << 10
	r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), 2*part), 2*part), 2*part)
	s := sabotage(r, nil)
	for i, durable := range []bool{false, true, false} {
		before := s.syncs.Load()
		d := []driver.Desc{{Local: part, Len: part, LocalKey: r.local, RemoteKey: r.remote}}
		batch := driver.Batch{Op: driver.Write, Durable: durable, Descs: d}
		require.NoError(t, r.p.Submit(uint64(i), &batch))
		for n := 0; n == 0; {
			var err error
			n, err = r.b.Poll(r.done[:])
			require.NoError(t, err)
		}
		got := s.syncs.Load() - before
		if got > 0 != (durable || cfg.Durable) || r.done[0].Err != nil {
			t.Errorf("durable %v: %d syncs, %v", durable, got, r.done[0].Err)
		}
	}
}
