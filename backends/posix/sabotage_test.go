// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testing/testkit"
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
	if r.Past {
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
	if !bytes.Equal(r.mem, want) {
		t.Fatal("memory differs from the file")
	}
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

// TestDirectRefused has a filesystem that grants O_DIRECT at open alone.
func TestDirectRefused(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 1 << 20
		r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), size), size), size)
		refused := 0
		sabotage(r, func(l *files.Landing) {
			if l.R.Past {
				l.Err = syscall.EINVAL
				refused++
			}
		})
		for range 3 {
			require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: size}))
		}
		if why := r.p.Explain(r.local, r.remote); refused == 0 ||
			!strings.Contains(why, "refuses O_DIRECT") {
			t.Errorf("refused %d times, and explains: %s", refused, why)
		}
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

// TestRegistersBuffers counts what is registered with the kernel, and uses it.
func TestRegistersBuffers(t *testing.T) {
	testkit.CheckLeaks(t)
	const size = 4 << 20
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing, PinMax: size + size/2}, fileSegment(f, size), size)
	var limit unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit))
	switch n := r.b.Pinned(); {
	case n == 0 && os.Geteuid() != 0 && limit.Cur < 16<<20: // the requests' buffers are 8 MiB
		needs(t, fmt.Sprintf("RLIMIT_MEMLOCK is %d bytes", limit.Cur))
	case n != size:
		t.Fatalf("%d bytes pinned, want %d", n, size)
	}
	fixed := 0
	sabotage(r, func(l *files.Landing) {
		if len(l.R.Places) > 0 && r.b.ring.fixed(l.R) > 0 {
			fixed++
		}
	})
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		require.NoError(t, r.move(t, op, driver.Desc{Len: size}))
	}
	if fixed != 2*size>>20 {
		t.Errorf("%d requests used the registered buffer, want %d", fixed, 2*size>>20)
	}
	second, err := r.b.Register(driver.Segment{Kind: driver.DRAM, Len: size,
		Mem: make([]byte, size)})
	require.NoError(t, err, "memory past PinMax")
	if n := r.b.Pinned(); n != size {
		t.Errorf("%d bytes pinned, want %d still", n, size)
	}
	for _, m := range []driver.Memory{r.l, second} {
		require.NoError(t, m.Revoke(t.Context()))
	}
	if n := r.b.Pinned(); n != 0 {
		t.Errorf("%d bytes pinned when all memory is closed", n)
	}
}
