// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"os"
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

// harness is the backend over files.
func harness(name string, cfg Config, remote backendtest.Allocator) backendtest.Harness {
	return backendtest.Harness{
		Name:     name,
		New:      func() (backends.Backend, error) { return New(cfg) },
		Remote:   remote,
		SelfOnly: true,
	}
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
}{
	{"ring", Config{Path: PathRing}, os.TempDir(), 0},
	{"ring-odd", Config{Path: PathRing}, os.TempDir(), 777},
	{"ring-sector", Config{Path: PathRing, PinMax: 1 << 30}, os.TempDir(), 512},
	{"ring-small", Config{Path: PathRing, Depth: 3, PieceMax: 64 << 10, JobsMax: 9, PinMax: 1 << 30}, os.TempDir(), 0},
	{"ring-tmpfs", Config{Path: PathRing}, tmpfs, 0},
	{"ring-durable", Config{Path: PathRing, Durable: true}, tmpfs, 5},
	{"threads", Config{Path: PathThreads}, os.TempDir(), 0},
	{"threads-odd", Config{Path: PathThreads, Threads: 2, Depth: 5}, os.TempDir(), 777},
	{"threads-tmpfs", Config{Path: PathThreads, Threads: 1, Durable: true}, tmpfs, 0},
}

func TestBackend(t *testing.T) {
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) {
			backendtest.Run(t, harness(v.name, v.cfg, backendtest.FileMemory(v.dir, v.off)))
		})
	}
}
