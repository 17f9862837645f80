// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"os"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/files"
)

// harness is the backend over files.
func harness(name string, cfg Config, remote drivertest.Allocator) drivertest.Harness {
	return drivertest.Harness{
		Name:     name,
		New:      func() (driver.Backend, error) { return New(cfg) },
		Remote:   remote,
		SelfOnly: true,
		Syncs: func(b driver.Backend, begun, ended func()) {
			watchSyncs(b.(*Backend), begun, ended)
		},
	}
}

// syncWatcher tells of syncs.
type syncWatcher struct {
	files.Mover
	begun, ended func()
}

// watchSyncs puts a watcher into a backend that is idle.
func watchSyncs(b *Backend, begun, ended func()) {
	b.core.Mu.Lock()
	defer b.core.Mu.Unlock()
	b.core.Mover = &syncWatcher{b.core.Mover, begun, ended}
}

func (w *syncWatcher) Put(r *files.Request) {
	if r.Kind == files.Sync {
		w.begun()
	}
	w.Mover.Put(r)
}

func (w *syncWatcher) Reap(out []files.Landing) int {
	n := w.Mover.Reap(out)
	for i := range out[:n] {
		if out[i].R.Kind == files.Sync && out[i].Err == nil {
			w.ended()
		}
	}
	return n
}

// tmpfs is a directory in memory.
const tmpfs = "/dev/shm"

// variants are ways of the backend, each over memory that lies off bytes behind whole blocks
// of its file.
var variants = []struct {
	name string
	cfg  Config
	dir  string
	off  uint64
	all  tier // from which on all checks run, and before it those of drivertest.Moving
}{
	{"ring", Config{Path: PathRing}, os.TempDir(), 0, gate},
	{"ring-odd", Config{Path: PathRing}, os.TempDir(), 777, never},
	{"ring-sector", Config{Path: PathRing}, os.TempDir(), 512, never},
	{"ring-small", Config{Path: PathRing, Depth: 3, PieceMax: 64 << 10, JobsMax: 9}, os.TempDir(),
		0, soak},
	{"ring-tmpfs", Config{Path: PathRing}, tmpfs, 0, never},
	{"ring-durable", Config{Path: PathRing, Durable: true}, tmpfs, 5, never},
	{"threads", Config{Path: PathThreads}, os.TempDir(), 0, never},
	{"threads-odd", Config{Path: PathThreads, Threads: 2, Depth: 5}, os.TempDir(), 777, soak},
	{"threads-tmpfs", Config{Path: PathThreads, Threads: 1, Durable: true}, tmpfs, 0, never},
}

// tier is what runs a test.
type tier int

const (
	gate tier = iota
	soak
	never
)

func TestBackend(t *testing.T)     { eachVariant(t, gate) }
func TestSoakBackend(t *testing.T) { eachVariant(t, soak) }

func eachVariant(t *testing.T, in tier) {
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			h := harness(v.name, v.cfg, drivertest.FileMemory(v.dir, v.off))
			if in < v.all {
				h.Only = append(slices.Clone(drivertest.Moving), "Faults")
			}
			drivertest.Run(t, h)
		})
	}
}
