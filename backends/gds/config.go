// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"cmp"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Way is how requests are handed to cuFile.
type Way uint8

// The ways.
const (
	WayAuto    Way = iota // batches, or threads where the library is too old for them
	WayBatch              // cuFileBatchIO*, from cuFile 1.8 on
	WayThreads            // cuFileRead and cuFileWrite in a pool of threads
)

var wayNames = [...]string{"auto", "batches", "threads"}

// String returns "auto", "batches" or "threads".
func (w Way) String() string {
	if int(w) < len(wayNames) {
		return wayNames[w]
	}
	return "unknown"
}

// Config bounds what a Backend uses. The zero value is useful: every zero field takes its default.
type Config struct {
	Library string // a path of libcufile; "" is the system's libcufile.so.0
	CUDA    string // a path of libcuda; "" is the system's libcuda.so.1

	Way      Way
	Threads  int // threads that call cuFile; default 16, and 4 with batches
	BatchMax int // entries of a cuFile batch; default the library's limit, at most that and 256
	Depth    int // requests in flight, queued ones included; default 128, at most 4,096
	// bytes of one request; default 4 MiB, and never more than the library's max_direct_io_size
	PieceMax int
	JobsMax  int // tags accepted and not yet polled; default 1,024
	KeysMax  int // memories registered at a time; default 64 Ki, at most 1 Mi

	// BufferMax is how many bytes of memory the backends of a process register with cuFile, in the
	// order of Register; default the most that the library may pin. For other memory cuFile copies
	// through its own buffers: Explain says which.
	BufferMax uint64

	// Direct makes New return a *driver.UnavailableError if cuFile is in compat mode, in which it
	// copies through host memory.
	Direct bool
}

const (
	descsMax   = 4096
	runsMax    = 16 << 10
	blockBytes = 4 << 10 // cuFile reads a block first if a write covers only a part of it
	threadsMax = 256
	depthMax   = 4096
)

func (c *Config) ensureDefaults() {
	session.SetDefault(&c.Depth, 128)
	session.SetDefault(&c.PieceMax, 4<<20)
	session.SetDefault(&c.JobsMax, 1024)
	session.SetDefault(&c.KeysMax, 64<<10)
}

func (c *Config) check() error {
	if err := cmp.Or(
		session.CheckWithin("Threads", c.Threads, 0, threadsMax),
		session.CheckWithin("BatchMax", c.BatchMax, 0, cufile.BatchMax), // and 0: settle says
		session.CheckWithin("Depth", c.Depth, 1, depthMax),
		session.CheckWithin("PieceMax", c.PieceMax, 1, 1<<30),
		session.CheckWithin("JobsMax", c.JobsMax, 1, 1<<20),
		session.CheckWithin("KeysMax", c.KeysMax, 1, 1<<20),
	); err != nil {
		return err
	}
	switch {
	case c.Way > WayThreads:
		return fmt.Errorf("config: Way %d is not known: %w", c.Way, driver.ErrBounds)
	case c.PieceMax%blockBytes != 0:
		return fmt.Errorf("config: PieceMax %d is no multiple of 4 KiB: %w", c.PieceMax,
			driver.ErrBounds)
	}
	return nil
}

// settle sets the remaining defaults, which depend on the library.
func (c *Config) settle(f *Facts) error {
	switch {
	case c.Way == WayAuto && f.Batches:
		c.Way = WayBatch
	case c.Way == WayAuto:
		c.Way = WayThreads
	case c.Way == WayBatch && !f.Batches:
		return unavailable("cuFile "+f.Version+" has no batches", "CUDA 12.2 or later, or "+
			"Config.Way = WayThreads")
	}
	if c.Threads == 0 {
		c.Threads = 4
		if c.Way == WayThreads {
			c.Threads = 16
		}
	}
	most := f.BatchMax
	if most <= 0 {
		most = 128
	}
	if c.BatchMax == 0 || c.BatchMax > most {
		c.BatchMax = min(most, cufile.BatchMax)
	}
	if f.DirectMax >= blockBytes {
		c.PieceMax = int(min(uint64(c.PieceMax), f.DirectMax&^(blockBytes-1)))
	}
	if c.BufferMax == 0 {
		c.BufferMax = f.PinnedMax
	}
	return nil
}

// caps returns the backend's capabilities. In compat mode the bytes go through host memory, as they
// do in the chain that is the alternative.
func caps(compat bool) driver.Caps {
	var pairs driver.Pairs
	pairs[driver.HBM] = driver.KindsOf(driver.File)
	cost := driver.Cost{Setup: 80 * time.Microsecond, PerPiece: 15 * time.Microsecond, Rate: 5e9}
	if compat {
		cost.Rate = 1.5e9
	}
	return driver.Caps{Name: "gds", Reach: driver.InProcess, Pairs: pairs,
		DescsMax: descsMax, RunsMax: runsMax, Cost: cost}
}
