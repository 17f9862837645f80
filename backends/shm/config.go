// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Config bounds what a Backend uses. The zero value is useful: every zero field
// takes its default.
type Config struct {
	// Workers are goroutines that copy what is over InlineMax, beside those that wait for
	// it; default 1, at most GOMAXPROCS.
	Workers int
	// bytes of a batch that Submit copies itself; default 64 KiB, negative: none
	InlineMax int
	// bytes copied between two looks at cancel and revocation; default 1 MiB
	PieceMax int
	KeysMax  int // memories registered at a time; default 64 Ki, at most 1 Mi
	JobsMax  int // tags accepted and not yet polled; default 1,024

	// ConnsMax bounds the peers connected to us, and those that hung up without Close, which stay
	// until their process ends; default 1,024. One process has half of them at most.
	ConnsMax int

	RingBytes   int           // notifications under way to one peer; power of two, default 256 KiB
	Grace       time.Duration // for silent peers in Revoke, before the strong means; default 50 ms
	DialTimeout time.Duration // for a handshake, and an answer on the control socket; default 5 s

	// Failure is how long an owner that takes no notifications may give no sign of life
	// before it is lost; default 5 s. Without a notification that finds no room a frozen owner
	// is not noticed: reads and writes of its memory go on.
	Failure   time.Duration
	SocketDir string // for the control socket; empty: an abstract socket, in no directory
}

const (
	messageMax = 32 << 10 // 32 KiB: a notification names blocks, it does not carry them
	descsMax   = 4096
	runsMax    = 1 << 20
)

// EnsureDefaults fills in the zero fields.
func (c *Config) EnsureDefaults() {
	setDefault(&c.Workers, 1)
	setDefault(&c.InlineMax, 64<<10)
	setDefault(&c.PieceMax, 1<<20)
	setDefault(&c.KeysMax, 64<<10)
	setDefault(&c.JobsMax, 1024)
	setDefault(&c.ConnsMax, 1024)
	setDefault(&c.RingBytes, 256<<10)
	setDefault(&c.Grace, 50*time.Millisecond)
	setDefault(&c.DialTimeout, 5*time.Second)
	setDefault(&c.Failure, 5*time.Second)
	c.Workers = min(c.Workers, runtime.GOMAXPROCS(0))
	c.InlineMax = max(c.InlineMax, 0)
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c *Config) check() error {
	switch {
	case c.Workers < 1:
		return fmt.Errorf("config: Workers %d is below 1: %w", c.Workers, driver.ErrBounds)
	case c.PieceMax < 4096:
		return fmt.Errorf("config: PieceMax %d is below a page: %w", c.PieceMax, driver.ErrBounds)
	case c.KeysMax < 1 || c.KeysMax > 1<<20:
		return fmt.Errorf("config: KeysMax %d is not within 1 to 1 Mi: %w", c.KeysMax,
			driver.ErrBounds)
	case c.JobsMax < 1 || c.JobsMax > 1<<20:
		return fmt.Errorf("config: JobsMax %d is not within 1 to 1 Mi: %w", c.JobsMax,
			driver.ErrBounds)
	case c.ConnsMax < 1:
		return fmt.Errorf("config: ConnsMax %d is below 1: %w", c.ConnsMax, driver.ErrBounds)
	case !ringSizeFits(uint64(c.RingBytes)):
		return fmt.Errorf("config: RingBytes %d is no power of two from %d to %d: %w",
			c.RingBytes, ringBytesMin, ringBytesMax, driver.ErrBounds)
	case c.Grace < 0 || c.DialTimeout < 0 || c.Failure < 0:
		return fmt.Errorf("config: a negative duration: %w", driver.ErrBounds)
	}
	return nil
}

func (c *Config) caps() driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.DRAM)
	return driver.Caps{
		Name: "shm", Reach: driver.SameHost, Pairs: pairs,
		DescsMax: descsMax, RunsMax: runsMax, MessageMax: messageMax,
		Cost: driver.Cost{Setup: 300 * time.Nanosecond, PerPiece: 30 * time.Nanosecond, Rate: 8e9},
	}
}
