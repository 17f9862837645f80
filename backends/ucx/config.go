// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"cmp"
	"fmt"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Config says which UCX to use and bounds what a Backend uses. The zero value is
// useful: every zero field takes its default.
type Config struct {
	// Library is the path of libucp; empty: the one of the system.
	Library string

	// Transports are names as in UCX_TLS, with commas: "rc,tcp", "^ib", "all". Empty is "all".
	// Those that share memory are left out: peers of this host are reached over the network as
	// well. UCX's "tcp" writes where any process tells it to that reaches its port: use it only on
	// networks that are trusted.
	Transports string

	// Devices are network devices as in UCX_NET_DEVICES. Empty: UCX's own choice.
	Devices string

	// Settings are further settings of UCX, NAME=VALUE without the prefix UCX_. They
	// come last, so they win over ours.
	Settings []string

	Workers    int // threads that move bytes; default 1
	BatchesMax int // batches of one worker accepted and not yet polled; power of two, default 1,024
	// messages of one connection on their way or not received; default 64. A peer whose own is
	// over 1,024 and four times ours is lost when it makes use of that.
	NotifyMax int
	KeysMax   int // memories registered at a time; default 64 Ki, at most 1 Mi
	// peers connected to us at a time; of one host, our own process left out, half as many;
	// default 1,024
	ConnsMax int

	// Spin is how long a worker's thread looks for work before it sleeps. Default 20 us
	// with more than four CPUs, else 3 us: there it keeps the woken goroutine from running.
	Spin time.Duration

	// Grace is how old a message may be that its receiver lands without asking the sender
	// whether it is still wanted, and how long a Close waits for a peer at each of its steps. A
	// write that ends although its bytes may be on their way ends as much later. The larger
	// one of both ends counts. It is no limit for a silent peer. Default 1.5 s, at most 10 s.
	Grace time.Duration

	// Failure is after what time a host that acknowledges nothing is gone, while a transfer waits
	// for it; where none waits, or where UCX does not go by TCP and says nothing itself, six times
	// as long. A process that is stopped, or kept off its processors, is not: its host acknowledges
	// for it, and the limit of the program that began the transfer ends the wait. Default 10 s.
	Failure time.Duration

	// CloseMax is how long an endpoint of UCX may take to be given back. Default Grace.
	CloseMax time.Duration

	importMax time.Duration // zero: session.ImportMax
}

const (
	messageMax = 4 << 10 // 4 KiB: a notification names blocks, it does not carry them
	descsMax   = 4096
	runsMax    = 64 << 10
	workersMax = 16
	graceMin   = 20 * time.Millisecond
	graceMax   = 10 * time.Second // also of what a peer says that its Grace is
)

// EnsureDefaults fills in the zero fields.
func (c *Config) EnsureDefaults() {
	session.SetDefault(&c.Transports, "all")
	session.SetDefault(&c.Workers, 1)
	session.SetDefault(&c.BatchesMax, 1024)
	session.SetDefault(&c.NotifyMax, 64)
	session.SetDefault(&c.KeysMax, 64<<10)
	session.SetDefault(&c.ConnsMax, 1024)
	session.SetDefault(&c.Spin, defaultSpin())
	session.SetDefault(&c.Grace, 1500*time.Millisecond)
	session.SetDefault(&c.Failure, max(10*time.Second, c.Grace))
	session.SetDefault(&c.CloseMax, c.Grace)
	session.SetDefault(&c.importMax, session.ImportMax)
}

func (c *Config) check() error {
	if err := cmp.Or(
		session.CheckWithin("Workers", c.Workers, 1, workersMax),
		session.CheckWithin("BatchesMax", c.BatchesMax, 2, 1<<20),
		session.CheckWithin("NotifyMax", c.NotifyMax, 1, 1<<15),
		session.CheckWithin("KeysMax", c.KeysMax, 1, session.KeyLimit),
		session.CheckWithin("ConnsMax", c.ConnsMax, 1, 1<<20),
	); err != nil {
		return err
	}
	switch {
	case c.BatchesMax&(c.BatchesMax-1) != 0:
		return fmt.Errorf("config: BatchesMax %d is no power of two: %w", c.BatchesMax,
			driver.ErrBounds)
	case c.Spin < 0 || c.CloseMax < 0:
		return fmt.Errorf("config: a negative duration: %w", driver.ErrBounds)
	case c.Grace < graceMin:
		return fmt.Errorf("config: Grace %v is below %v: peers would be lost in the pauses of a "+
			"busy machine: %w", c.Grace, graceMin, driver.ErrBounds)
	case c.Grace > graceMax:
		return fmt.Errorf("config: Grace %v is above %v: %w", c.Grace, graceMax, driver.ErrBounds)
	case c.Failure < c.Grace:
		return fmt.Errorf("config: Failure %v is below Grace %v: %w", c.Failure, c.Grace,
			driver.ErrBounds)
	}
	return nil
}

// caps ranks behind shm on one host.
func (c *Config) caps() driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.DRAM)
	return driver.Caps{
		Name: "ucx", Reach: driver.Network, Pairs: pairs,
		DescsMax: descsMax, RunsMax: runsMax, MessageMax: messageMax,
		Cost: driver.Cost{Setup: 2 * time.Microsecond, PerPiece: 100 * time.Nanosecond, Rate: 5e9},
	}
}

func defaultSpin() time.Duration {
	if runtime.NumCPU() > 4 {
		return 20 * time.Microsecond
	}
	return 3 * time.Microsecond
}
