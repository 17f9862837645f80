// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"fmt"
	"math/bits"
	"net"
	"runtime"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// Config says which devices to use and bounds what a Backend uses. The zero value is
// useful: every zero field takes its default.
type Config struct {
	// Library is the path of libibverbs; empty: the one of the system.
	Library string

	// Devices are the rails to open, with commas: "mlx5_0" is every active port of a
	// device, "mlx5_0:1" one port, "mlx5_0:1#3" that port with the GID of index 3, which
	// overrides the rule of GIDs. Empty: every active port of every device.
	Devices string

	// Rails is how many are opened at most. Default 8, at most 16.
	Rails int

	// Listen is where peers find our control: "host:port", "host:0" for a port that the
	// kernel chooses, ":port" on all addresses. Empty: a port that the kernel chooses,
	// on the address of each rail's network device. A host that reaches it can ask for what
	// tokens open, and for nothing else.
	Listen string

	QueueDepth int // work requests under way on a queue pair; default 128
	Slice      int // bytes of one work request; default 1 MiB
	Entries    int // local pieces in one work request; default: as many as the device takes
	// bytes under way on a queue pair: what a cancel waits for; default 16 MiB, at least Slice
	Flight int

	BatchesMax int // batches accepted and not yet polled; power of two, default 1,024
	NotifyMax  int // messages of one connection on their way or not received; default 64
	KeysMax    int // memories registered at a time; default 64 Ki, at most 1 Mi
	// peers connected to us at a time, of one host half as many; default 64: each has NotifyMax
	// receives posted for it
	ConnsMax int

	// Timeout is how long a queue pair waits for an acknowledgement before it sends
	// again: the next of 4.096 us x 2^n, 268 ms at the default of 200 ms. A device may
	// take up to four times as long. It sends again Retries times, 1 to 6 (7 is for ever
	// on some devices), by default 4, and then the queue pair fails: see FailureTime.
	Timeout time.Duration
	Retries int

	// Level is the service level, TrafficClass that of the global route.
	Level, TrafficClass int

	// MTU bounds that of the path: 256, 512, 1024, 2048 or 4096. Zero: the ports'.
	MTU int

	// Spin is how long our thread looks for completions before it sleeps. Default 20 us
	// with more than four CPUs, else 3 us: there it keeps the woken goroutine from running.
	Spin time.Duration

	// Grace is how long a peer may keep a proof waiting: that nothing of a connection which
	// is closed lands any more. Default 1.5 s.
	Grace time.Duration

	// PacketLife is how long the fabric may keep a packet and deliver it all the same. The subnet
	// manager of an InfiniBand fabric knows it: it is the PacketLifeTime of its path records.
	// Ethernet and IP have no such bound: switches pause, and virtual machines. Where an owner
	// does not say that its queue pairs have ended, since it stands still or was killed, writes
	// that were under way end with driver.ErrUnproven. With a PacketLife they wait for so long once
	// our queue pairs are gone, and end as proved. Default 0: it is not known.
	PacketLife time.Duration

	// Failure is after what time a peer is lost that has no live queue pair, or whose host
	// acknowledges nothing that goes over the control connection, while a call or a batch waits
	// for it; where nothing waits, a silent host six times as long. A process that is stopped, or
	// kept off its processors, is not lost: its host acknowledges for it, and what began a transfer
	// bounds it. Time that its answer to a failed queue pair takes does not count, nor does time
	// in which this process stands still. Default 10 s.
	Failure time.Duration

	// RelaxedOrdering has the NIC write in any order where it can, which is faster on some
	// hosts. What a completion promises stays true.
	RelaxedOrdering bool

	hello     time.Duration                          // that a connection may take to say hello
	addresses uint64                                 // of grants, in a round
	sysfs     *sysfs                                 // nil: this machine's
	clock     clock.Clock                            // nil: the host's
	kernel    func(syscall.RawConn) session.Outbound // nil: session.QueryOutbound
}

const (
	messageMax  = verbs.NotifMax
	descsMax    = 4096
	runsMax     = 64 << 10
	railsMax    = verbs.RailsMax
	graceMin    = 20 * time.Millisecond
	ackUnit     = 4096 * time.Nanosecond
	retriesMax  = 6
	timeoutLast = 31 // the largest exponent that a queue pair knows
)

// EnsureDefaults fills in the zero fields.
func (c *Config) EnsureDefaults() {
	session.SetDefault(&c.Rails, 8)
	session.SetDefault(&c.QueueDepth, 128)
	session.SetDefault(&c.Slice, 1<<20)
	session.SetDefault(&c.Flight, max(16<<20, c.Slice))
	session.SetDefault(&c.BatchesMax, 1024)
	session.SetDefault(&c.NotifyMax, 64)
	session.SetDefault(&c.KeysMax, 64<<10)
	session.SetDefault(&c.ConnsMax, 64)
	session.SetDefault(&c.Timeout, 200*time.Millisecond)
	session.SetDefault(&c.Retries, 4)
	session.SetDefault(&c.Spin, defaultSpin())
	session.SetDefault(&c.Grace, 1500*time.Millisecond)
	session.SetDefault(&c.Failure, 10*time.Second)
	session.SetDefault(&c.hello, 5*time.Second)
	if c.addresses == 0 {
		c.addresses = addressesEnd
	}
	if c.sysfs == nil {
		c.sysfs = thisMachine
	}
	if c.kernel == nil {
		c.kernel = session.QueryOutbound
	}
	if c.clock == nil {
		c.clock = clock.Host()
	}
}

func (c *Config) check() error {
	if err := cmp.Or(
		session.CheckWithin("Rails", c.Rails, 1, railsMax),
		session.CheckWithin("QueueDepth", c.QueueDepth, 2, 1<<14),
		session.CheckWithin("Slice", c.Slice, 4096, 1<<30),
		session.CheckWithin("Entries", c.Entries, 0, 1<<10),
		session.CheckWithin("Flight", c.Flight, c.Slice, 1<<40),
		session.CheckWithin("BatchesMax", c.BatchesMax, 2, 1<<20),
		session.CheckWithin("NotifyMax", c.NotifyMax, 1, 1<<15),
		session.CheckWithin("KeysMax", c.KeysMax, 1, session.KeyLimit),
		session.CheckWithin("ConnsMax", c.ConnsMax, 1, 1<<16),
		session.CheckWithin("Retries", c.Retries, 1, retriesMax),
		session.CheckWithin("Level", c.Level, 0, 15),
		session.CheckWithin("TrafficClass", c.TrafficClass, 0, 255),
	); err != nil {
		return err
	}
	if _, err := c.mtu(); err != nil {
		return err
	}
	switch {
	case c.BatchesMax&(c.BatchesMax-1) != 0:
		return fmt.Errorf("config: BatchesMax %d is no power of two: %w", c.BatchesMax,
			driver.ErrBounds)
	case c.Spin < 0 || c.PacketLife < 0:
		return fmt.Errorf("config: Spin %v or PacketLife %v is negative: %w", c.Spin, c.PacketLife,
			driver.ErrBounds)
	case c.Timeout < ackUnit || c.ackTimeout() > time.Minute:
		return fmt.Errorf("config: Timeout %v is not within %v to a minute: %w", c.Timeout, ackUnit,
			driver.ErrBounds)
	case c.Grace < graceMin || c.Failure < graceMin:
		return fmt.Errorf("config: Grace %v or Failure %v is below %v: peers would be lost in "+
			"the pauses of a busy machine: %w",
			c.Grace, c.Failure, graceMin, driver.ErrBounds)
	}
	if c.Listen != "" {
		if _, _, err := net.SplitHostPort(c.Listen); err != nil {
			return fmt.Errorf("config: Listen %q, want host:port: %w", c.Listen, driver.ErrBounds)
		}
	}
	return nil
}

// timeoutExponent is the Timeout as a queue pair takes it.
func (c *Config) timeoutExponent() uint8 {
	units := uint64((c.Timeout + ackUnit - 1) / ackUnit)
	return uint8(min(bits.Len64(units-1), timeoutLast))
}

// ackTimeout is the Timeout that it comes to.
func (c *Config) ackTimeout() time.Duration { return ackUnit << c.timeoutExponent() }

// FailureTime is after how long without an acknowledgement a queue pair fails: devices may take
// up to four times as long as they are told. One that says nothing at all is given up
// after that and Config.Failure. What the queue pair had not done then goes on over
// others; when there are none for Config.Failure more, the peer is lost.
func (c Config) FailureTime() (least, most time.Duration) {
	c.EnsureDefaults()
	least = time.Duration(c.Retries+1) * c.ackTimeout()
	return least, 4 * least
}

// stall is after how long without any completion a queue pair has failed although its device does
// not say so: by then its queue pair must have given up, but for what a slow wire needs for Flight.
func (c *Config) stall() time.Duration {
	_, most := c.FailureTime()
	return most + c.Failure
}

// mtu is the bound as enum ibv_mtu has it, 0 for none.
func (c *Config) mtu() (uint8, error) {
	for i, bytes := range []int{0, 256, 512, 1024, 2048, 4096} {
		if c.MTU == bytes {
			return uint8(i), nil
		}
	}
	return 0, fmt.Errorf("config: MTU %d, want 256, 512, 1024, 2048 or 4096: %w", c.MTU,
		driver.ErrBounds)
}

// caps are those of a backend whose rails take device memory, or do not. A peer's device
// memory is reached either way: its own NICs must take it, not ours.
func (c *Config) caps(devices bool) driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.DRAM, driver.HBM)
	if devices {
		pairs[driver.HBM] = pairs[driver.DRAM]
	}
	return driver.Caps{
		Name: "rdma", Reach: driver.Network, Pairs: pairs,
		DescsMax: descsMax, RunsMax: runsMax, MessageMax: messageMax,
		Cost: driver.Cost{Setup: 3 * time.Microsecond, PerPiece: 50 * time.Nanosecond, Rate: 10e9},
	}
}

func defaultSpin() time.Duration {
	if runtime.NumCPU() > 4 {
		return 20 * time.Microsecond
	}
	return 3 * time.Microsecond
}
