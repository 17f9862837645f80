// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"context"
	"errors"
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
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// saboteur changes what the kernel has answered, before the backend hears of it.
type saboteur struct {
	mover
	alter func(l *landing)
	syncs atomic.Int32 // begun
	kinds [2]int       // writes, by access
	mixed int          // of those that began while one of the other kind was under way
}

func (s *saboteur) put(r *request) {
	if r.kind == syncFile {
		s.syncs.Add(1)
	}
	if r.kind == writeFrom {
		s.kinds[r.access()]++
		if r.f.inode.writing[1-r.access()] > 0 {
			s.mixed++
		}
	}
	s.mover.put(r)
}

func (s *saboteur) reap(out []landing) int {
	n := s.mover.reap(out)
	for i := range out[:n] {
		if s.alter != nil {
			s.alter(&out[i])
		}
	}
	return n
}

// sabotage puts a saboteur into a rig that is idle.
func sabotage(r *rig, alter func(l *landing)) *saboteur {
	r.b.flights.Mu.Lock()
	defer r.b.flights.Mu.Unlock()
	s := &saboteur{mover: r.b.mover, alter: alter}
	r.b.mover = s
	return s
}

// TestPartialAnswers has the kernel do less than it was asked to, or nothing for now: each
// transfer must be whole all the same.
func TestPartialAnswers(t *testing.T) {
	random := rand.New(rand.NewPCG(8, 9)) // reap is called by one goroutine at a time
	answers := map[string]func(l *landing){
		"less": func(l *landing) {
			if l.res > 1 {
				l.res = 1 + random.IntN(l.res-1)
			}
		},
		"less, of whole blocks": func(l *landing) {
			if l.res > blockMin {
				l.res = max(l.res/2, blockMin) &^ (blockMin - 1)
			}
		},
		"later": func(l *landing) {
			if random.IntN(3) > 0 {
				l.res = -int([]syscall.Errno{syscall.EAGAIN, syscall.EINTR,
					syscall.ECANCELED}[random.IntN(3)])
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

func testPartialAnswers(t *testing.T, cfg Config, alter func(l *landing)) {
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
		sabotage(r, func(l *landing) { l.res = -int(syscall.EAGAIN) })
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
		sabotage(r, func(l *landing) {
			if l.r.past {
				l.res = -int(syscall.EINVAL)
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

// TestDurable counts syncs: none without the option, and for many writes at once fewer than
// writes, but one after the last.
func TestDurable(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const part, parts = 64 << 10, 50
		for _, cfg.Durable = range []bool{false, true} {
			r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), part*parts), part*parts),
				part*parts)
			s := sabotage(r, nil)
			if err := r.move(t, driver.Read, driver.Desc{Len: part}); err != nil ||
				s.syncs.Load() != 0 {
				t.Fatalf("a read: %v, %d syncs", err, s.syncs.Load())
			}
			for i := range uint64(parts) {
				d := []driver.Desc{{Local: i * part, Remote: i * part, Len: part, LocalKey: r.local,
					RemoteKey: r.remote}}
				require.NoError(t, r.p.Submit(i, &driver.Batch{Op: driver.Write, Descs: d}))
			}
			for left := parts; left > 0; {
				k, err := r.b.Poll(r.done[:])
				require.NoError(t, err)
				left -= k
			}
			if n := s.syncs.Load(); cfg.Durable && (n < 1 || n > parts) || !cfg.Durable && n != 0 {
				t.Errorf("Durable %v: %d syncs for %d writes", cfg.Durable, n, parts)
			}
		}
	})
}

// TestDurableOne asks for one durable write among others: it alone waits for a sync.
func TestDurableOne(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
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
			if got := s.syncs.Load() - before; got > 0 != durable || r.done[0].Err != nil {
				t.Errorf("durable %v: %d syncs, %v", durable, got, r.done[0].Err)
			}
		}
		if r.b.durables != 0 {
			t.Errorf("%d durable writes are left over", r.b.durables)
		}
	})
}

// TestSyncFails has a sync fail: so does each write that it covers, and not the next.
func TestSyncFails(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		cfg.Durable = true
		r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), 1<<20), 1<<20), 1<<20)
		s := sabotage(r, func(l *landing) {
			if l.r.kind == syncFile {
				l.res = -int(syscall.EIO)
			}
		})
		err := r.move(t, driver.Write, driver.Desc{Len: 1 << 20})
		var f *FileError
		if !errors.As(err, &f) || f.Op != "sync" || !errors.Is(err, syscall.EIO) {
			t.Errorf("a write whose sync failed: %v", err)
		}
		r.b.flights.Mu.Lock()
		s.alter = nil
		r.b.flights.Mu.Unlock()
		if err := r.move(t, driver.Write, driver.Desc{Len: 1 << 20}); err != nil {
			t.Errorf("the next write: %v", err)
		}
	})
}

// TestRegistersBuffers counts what is registered with the kernel, and uses it.
func TestRegistersBuffers(t *testing.T) {
	leak.Check(t)
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
	sabotage(r, func(l *landing) {
		if l.r.fixed > 0 {
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
	for _, m := range append(r.b.flights.All(), second.(*memory)) {
		if err := m.Revoke(context.Background()); err != nil {
			t.Error(err)
		}
	}
	if n := r.b.Pinned(); n != 0 {
		t.Errorf("%d bytes pinned when all memory is closed", n)
	}
}
