// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math/bits"
	"time"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Config bounds the backend. The zero value is useful.
type Config struct {
	Library string // a path of libcuda; "" is the system's libcuda.so.1
	Devices []int  // ordinals, as CUDA counts; nil: all

	// Budget is what a kernel may take of a card for one pattern, or one SumCells, which has 4 MiB
	// of each card, and as much pinned memory, from New on.
	// Zero: no kernel runs, nothing is digested, and entries are gathered by a processor where they
	// come from or go to dense memory of a device, else copied one by one; Explain says so.
	Budget cuda.Budget

	Streams    int // that batches of a device share; default 4, at most 32
	Gated      int // batches of a device that wait for events at a time; default 32, at most 256
	BatchesMax int // outstanding ones; a power of two, default 1,024
	KeysMax    int // registrations; default and at most 1,048,576

	// Peers has backends of other processes of this host and user reach memory of AllocDevice, and
	// ours reach theirs, as far as both have it. False: the backend reaches those of its own
	// process alone, and has no socket.
	Peers    bool
	PeersMax int // processes that reach us at a time; default 256, at most 4,096
	// how long Revoke waits for a silent process before it takes the memory away; default 200 ms
	RevokeGrace time.Duration
	SumTimeout  time.Duration // SumCells waits no longer for events and revokes; default 10 s
	DialTimeout time.Duration // for a handshake, and for an answer of another process; default 5 s
}

const (
	descsMax    = 4096
	runsMax     = 32 << 10
	placesCount = 8 // launches of a device under way
	// bytes of an entry, from where on the copy engine does better than the kernel
	entryMax  = 16 << 10
	stageHalf = 512 << 10
)

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name       string
		field      *int
		value, max int
	}{
		{"Streams", &c.Streams, 4, 32},
		{"Gated", &c.Gated, 32, 256},
		{"BatchesMax", &c.BatchesMax, 1024, 1 << 16},
		{"KeysMax", &c.KeysMax, session.KeyLimit, session.KeyLimit},
		{"PeersMax", &c.PeersMax, 256, 4096},
	} {
		session.SetDefault(f.field, f.value)
		if err := session.CheckWithin(f.name, *f.field, 1, f.max); err != nil {
			return c, err
		}
	}
	session.SetDefault(&c.SumTimeout, 10*time.Second)
	session.SetDefault(&c.RevokeGrace, 200*time.Millisecond)
	session.SetDefault(&c.DialTimeout, 5*time.Second)
	switch {
	case min(c.RevokeGrace, c.DialTimeout, c.SumTimeout) < 0:
		return c, fmt.Errorf("config: RevokeGrace is %v, DialTimeout %v and SumTimeout %v, want "+
			"no negative time: %w", c.RevokeGrace, c.DialTimeout, c.SumTimeout, driver.ErrBounds)
	case bits.OnesCount(uint(c.BatchesMax)) != 1:
		return c, fmt.Errorf("config: BatchesMax is %d, want a power of two: %w", c.BatchesMax,
			driver.ErrBounds)
	case c.Budget.SMs < 0:
		return c, fmt.Errorf("config: Budget is %d multiprocessors: %w", c.Budget.SMs,
			driver.ErrBounds)
	}
	return c, nil
}

// kernels reports whether the gather kernel may run.
func (c *Config) kernels() bool { return c.Budget.SMs > 0 }

func (c *Config) reach() driver.Reach {
	if c.Peers {
		return driver.SameHost
	}
	return driver.InProcess
}
