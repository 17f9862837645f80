// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"cmp"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Path is how requests reach the kernel.
type Path uint8

// The paths.
const (
	PathAuto    Path = iota // io_uring, or threads where the kernel refuses it
	PathRing                // io_uring or an error
	PathThreads             // threads
)

// Config bounds what a Backend uses. The zero value is useful: every zero field takes its
// default.
type Config struct {
	Path     Path
	Threads  int // of the path without io_uring, started with the backend; default 32
	Depth    int // requests with the kernel at a time; default 128, each with 64 KiB of buffer
	PieceMax int // bytes of one request; default 1 MiB, a multiple of 64 KiB
	// a read of two entries reads a gap of up to so many bytes between them as well; default
	// 16 KiB, negative: none
	GapMax  int
	JobsMax int // tags accepted and not yet polled; default 1,024
	KeysMax int // memories registered at a time; default 64 Ki, at most 1 Mi

	// Buffered moves all bytes through the page cache, even where O_DIRECT is possible.
	Buffered bool

	// Durable makes every write durable, as driver.Batch.Durable does: it completes only after an
	// fdatasync that began after its last byte was written. One fdatasync serves all writes to a
	// file that wait at the time.
	Durable bool
}

const (
	descsMax  = 4096
	runsMax   = 64 << 10
	placesMax = 64       // places in memory of one request
	splitMin  = 64 << 10 // whole blocks within a piece get their own request from this size on
	// up to this size, the submitting thread copies a request from the page cache, and a writer
	// copies one to it
	inlineMax  = 64 << 10
	threadsMax = 1024
	depthMax   = 4096
)

func (c *Config) ensureDefaults() {
	session.SetDefault(&c.Threads, 32)
	session.SetDefault(&c.Depth, 128)
	session.SetDefault(&c.PieceMax, 1<<20)
	session.SetDefault(&c.GapMax, 16<<10)
	session.SetDefault(&c.JobsMax, 1024)
	session.SetDefault(&c.KeysMax, 64<<10)
}

func (c *Config) check() error {
	if err := cmp.Or(
		session.CheckWithin("Threads", c.Threads, 1, threadsMax),
		session.CheckWithin("Depth", c.Depth, 1, depthMax),
		session.CheckWithin("JobsMax", c.JobsMax, 1, 1<<20),
		session.CheckWithin("KeysMax", c.KeysMax, 1, 1<<20),
	); err != nil {
		return err
	}
	switch {
	case c.Path > PathThreads:
		return fmt.Errorf("config: Path %d is not known: %w", c.Path, driver.ErrBounds)
	case c.PieceMax < 64<<10 || c.PieceMax > 1<<30 || c.PieceMax%(64<<10) != 0:
		return fmt.Errorf("config: PieceMax %d is no multiple of 64 KiB up to 1 GiB: %w",
			c.PieceMax, driver.ErrBounds)
	}
	return nil
}

func caps() driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.File)
	return driver.Caps{
		Name: "posix", Reach: driver.InProcess, Pairs: pairs,
		DescsMax: descsMax, RunsMax: runsMax,
		Cost: driver.Cost{Setup: 60 * time.Microsecond, PerPiece: 10 * time.Microsecond, Rate: 2e9},
	}
}
