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

	// Budget limits what a kernel may use of a card for one pattern or one SumCells. SumCells also
	// takes 4 MiB of each card, and as much pinned memory, from New on.
	//
	// If it is zero, no kernel runs, and SumCells is not supported. A CPU core then gathers the
	// entries of a pattern between host memory and one contiguous range of device memory, and the
	// card copies other entries one by one. Explain tells which of these a pattern takes.
	Budget cuda.Budget

	Streams    int // streams that the batches of a device share; default 4, at most 32
	Gated      int // batches of a device that may wait for events; default 32, at most 256
	BatchesMax int // outstanding batches; a power of two, default 1,024
	KeysMax    int // registrations; default and at most 1,048,576

	// Peers lets backends of two processes of the same host and user reach each other's memory of
	// AllocDevice, if both set it. False: the backend reaches only backends of its own process, and
	// opens no socket.
	Peers    bool
	PeersMax int // processes that are connected to this one at a time; default 256, at most 4,096
	// how long Revoke waits for a silent process before it replaces the memory with fresh memory;
	// default 200 ms
	RevokeGrace time.Duration
	SumTimeout  time.Duration // limit of SumCells for events and revokes; default 10 s
	DialTimeout time.Duration // for a handshake, and for an answer of another process; default 5 s
}

const (
	descsMax    = 4096     // descriptors of a batch
	runsMax     = 32 << 10 // runs of a pattern
	placesCount = 8        // kernel launches of a device at a time
	// the kernel copies contiguous runs of at most so many bytes: for longer ones the copy engine
	// is faster
	entryMax = 16 << 10
	// a CPU core gathers runs of at most so many bytes: half of the pinned memory it gathers into
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
