// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"fmt"
	"math/bits"
	"net"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/csrc/ring"
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
	// overrides the automatic choice. Empty: every active port of every device.
	Devices string

	// Rails bounds the ports that are opened. Default 8, at most 16. They should be alike: a batch
	// of up to Flight a rail is shared evenly, and ends with the slowest.
	Rails int

	// Listen is the address of the control connections: "host:port", "host:0" for a port that the
	// kernel chooses, or ":port" for all addresses. Empty: a port that the kernel chooses, on each
	// address of the rails' network devices. A host that can connect to it can access only memory
	// for which it has a token.
	Listen string

	QueueDepth int // bounds the work requests under way on a queue pair; default 128
	Slice      int // bounds the bytes of one work request; default 1 MiB
	Entries    int // bounds the local pieces of a work request; default: the device's limit
	// bounds the bytes under way on a queue pair, for which a cancel must wait; default 16 MiB, at
	// least Slice
	Flight int

	BatchesMax int // bounds the batches accepted and not yet polled; power of two, default 1,024
	NotifyMax  int // bounds the messages of a connection that are not received yet; default 64
	KeysMax    int // bounds the registered memories; default 64 Ki, at most 1 Mi
	// bounds the peers connected to this backend; one host may have half of them. Default 64. The
	// backend posts NotifyMax receives for each.
	ConnsMax int

	// Timeout is how long a queue pair waits for an acknowledgement before it sends a packet again.
	// It is rounded up to 4.096 us x 2^n: the default of 200 ms becomes 268 ms. A device may take
	// up to four times as long. After Retries attempts, 1 to 6, default 4, the queue pair fails:
	// see FailureTime. (7 means "for ever" on some devices.)
	Timeout time.Duration
	Retries int

	// Level is the service level, TrafficClass that of the global route.
	Level, TrafficClass int

	// MTU bounds that of the path: 256, 512, 1024, 2048 or 4096. Zero: the ports'.
	MTU int

	// Spin is how long the progress thread polls for completions before it sleeps. Default 20 us
	// with more than four CPUs, else 3 us, since the thread then competes with the woken goroutine.
	Spin time.Duration

	// Grace is how long Close waits for a peer to prove that no write of the connection can land
	// any more. Default 1.5 s.
	Grace time.Duration

	// PacketLife is the longest time for which the fabric may delay a packet and still deliver it.
	// On InfiniBand it is the PacketLifeTime of the subnet manager's path records. Ethernet and IP
	// have no such bound, since switches and virtual machines pause.
	//
	// If an owner is frozen or was killed, it cannot say that its queue pairs have ended. Writes
	// that were under way then end with driver.ErrUnproven. With a PacketLife, the backend instead
	// waits for that time after the end of our queue pairs, and the writes end as proved.
	// Default 0: unknown.
	PacketLife time.Duration

	// Failure is the time after which a peer is lost, while a call or a batch waits for it: it has
	// no live queue pair, or its host acknowledges nothing on the control connection. If nothing
	// waits, a host may be silent six times as long. A process that is stopped or gets no CPU is
	// not lost, since its host still acknowledges; the deadline of the transfer bounds the wait.
	// The time that the peer takes to answer for a failed queue pair does not count, nor does time
	// in which this process is stopped. Default 10 s.
	Failure time.Duration

	// RelaxedOrdering lets the NIC write in any order if it can, which is faster on some hosts. It
	// does not change what a completion means.
	RelaxedOrdering bool

	hello     time.Duration                          // bounds the wait for a hello
	addresses uint64                                 // the end of the addresses of a round
	sysfs     *sysfs                                 // nil: this machine's
	clock     clock.Clock                            // nil: the host's
	kernel    func(syscall.RawConn) session.Outbound // nil: session.QueryOutbound
}

const (
	messageMax  = verbs.NotifMax
	descsMax    = 4096
	railsMax    = verbs.RailsMax
	graceMin    = 20 * time.Millisecond
	ackUnit     = 4096 * time.Nanosecond
	retriesMax  = 6
	timeoutLast = 31 // the largest timeout exponent of a queue pair
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
	session.SetDefault(&c.Spin, session.DefaultSpin())
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

// timeoutExponent returns the Timeout as the attribute of a queue pair.
func (c *Config) timeoutExponent() uint8 {
	units := uint64((c.Timeout + ackUnit - 1) / ackUnit)
	return uint8(min(bits.Len64(units-1), timeoutLast))
}

// ackTimeout returns the Timeout after rounding.
func (c *Config) ackTimeout() time.Duration { return ackUnit << c.timeoutExponent() }

// FailureTime returns how long after the last acknowledgement a queue pair fails. Devices may take
// up to four times as long as they are told. If a device reports nothing at all, the backend gives
// the queue pair up Config.Failure after the longest time. Other queue pairs then repeat its
// requests. If there are none for another Config.Failure, the peer is lost.
func (c Config) FailureTime() (least, most time.Duration) {
	c.EnsureDefaults()
	least = time.Duration(c.Retries+1) * c.ackTimeout()
	return least, 4 * least
}

// stall is the time without any completion after which a queue pair counts as failed although its
// device reports no failure. By then the device must have failed it; Failure allows for the time
// that a slow link needs for Flight bytes.
func (c *Config) stall() time.Duration {
	_, most := c.FailureTime()
	return most + c.Failure
}

// mtu returns Config.MTU as an enum ibv_mtu; 0: no bound.
func (c *Config) mtu() (uint8, error) {
	for i, bytes := range []int{0, 256, 512, 1024, 2048, 4096} {
		if c.MTU == bytes {
			return uint8(i), nil
		}
	}
	return 0, fmt.Errorf("config: MTU %d, want 256, 512, 1024, 2048 or 4096: %w", c.MTU,
		driver.ErrBounds)
}

// caps returns the backend's capabilities; devices says whether a rail can pin device memory. A
// peer's device memory is accessible in any case, since only the peer's NICs must pin it.
func (c *Config) caps(devices bool) driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.DRAM, driver.HBM)
	if devices {
		pairs[driver.HBM] = pairs[driver.DRAM]
	}
	return driver.Caps{
		Name: "rdma", Reach: driver.Network, Pairs: pairs,
		DescsMax: descsMax, RunsMax: ring.RunsMax, MessageMax: messageMax,
		Cost: driver.Cost{Setup: 3 * time.Microsecond, PerPiece: 50 * time.Nanosecond, Rate: 10e9},
	}
}
