// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluicehq/sluice/csrc/ring"
	ucp "github.com/sluicehq/sluice/csrc/ucx"
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

	// Settings are further settings of UCX, NAME=VALUE without the prefix UCX_, which win over
	// those that only tune. What the backend relies on is refused: TLS and NET_DEVICES, for which
	// Transports and Devices are there, and RNDV_THRESH.
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

	importMax time.Duration // zero: session.ImportMax
}

const (
	messageMax = 4 << 10 // 4 KiB: a notification names blocks, it does not carry them
	descsMax   = 4096
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
	session.SetDefault(&c.Spin, session.DefaultSpin())
	session.SetDefault(&c.Grace, 1500*time.Millisecond)
	session.SetDefault(&c.Failure, max(10*time.Second, c.Grace))
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
	case c.Spin < 0:
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
	return c.checkSettings()
}

// checkSettings refuses what would undo a decision of the backend: UCX would take its transport
// within a process for a peer that is ourselves, or send by rendezvous, which no end of ours reads.
func (c *Config) checkSettings() error {
	for _, s := range c.Settings {
		name, _, ok := strings.Cut(s, "=")
		fault := ""
		switch {
		case !ok || strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" || name == "":
			fault = "want NAME=VALUE, with a name that `ucx_info -cf` lists, without UCX_"
		case name == "TLS":
			fault = "use Transports, from which those that share memory are left out"
		case name == "NET_DEVICES":
			fault = "use Devices"
		case name == "RNDV_THRESH":
			fault = "leave it out: messages are eager, so that their age is known when they land"
		}
		if fault != "" {
			return fmt.Errorf("config: Settings %q: %s: %w", s, fault, driver.ErrBounds)
		}
	}
	return nil
}

// caps ranks behind shm on one host.
func (c *Config) caps() driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.DRAM)
	return driver.Caps{
		Name: "ucx", Reach: driver.Network, Pairs: pairs,
		DescsMax: descsMax, RunsMax: ring.RunsMax, MessageMax: messageMax,
		Cost: driver.Cost{Setup: 2 * time.Microsecond, PerPiece: 100 * time.Nanosecond, Rate: 5e9},
	}
}

// What was tried out for one message of csrc/ucx, which is eager.
const (
	tcpSendBytes    = 64 << 10
	tcpReceiveBytes = 128 << 10
)

// sharing are UCX's names of transports within one host, aliases at the end.
var sharing = []string{"posix", "sysv", "cma", "self", "xpmem", "knem", "sm", "shm", "mm"}

// networkTransports is Config.Transports without those that share memory, as UCX_TLS takes it. A
// leading ^ negates a whole list, as in UCX.
func networkTransports(list string) (string, error) {
	rest, negated := strings.CutPrefix(strings.TrimSpace(list), "^")
	var names []string
	for name := range strings.SplitSeq(rest, ",") {
		name = strings.TrimSpace(name)
		if name == "" || strings.ContainsAny(name, "^ =") {
			return "", fmt.Errorf("config: Transports %q: %q is no name of a transport: %w", list,
				name, driver.ErrBounds)
		}
		if !slices.Contains(sharing, name) {
			names = append(names, name)
		}
	}
	switch {
	case negated:
		return "^" + strings.Join(append(slices.Clone(sharing[:6]), names...), ","), nil
	case slices.Contains(names, "all"):
		return "^" + strings.Join(sharing[:6], ","), nil
	case len(names) == 0:
		return "", fmt.Errorf("config: Transports %q shares memory, which is the shm backend's "+
			"work: use that, or add tcp: %w", list, driver.ErrBounds)
	}
	return strings.Join(names, ","), nil
}

// listed reports whether a transport may be chosen from a list of UCX_TLS.
func listed(list, name string) bool {
	rest, negated := strings.CutPrefix(list, "^")
	return slices.Contains(strings.Split(rest, ","), name) != negated
}

// context returns the configuration of the UCX context. It excludes the rendezvous protocol, by
// which UCX would copy from memory of the program, and only after we have checked the age of a
// message.
func (c *Config) context(transports string) ucp.Config {
	u := ucp.Config{
		Transports: transports, Devices: c.Devices,
		Workers: c.Workers, BatchesMax: c.BatchesMax, NotifyMax: c.NotifyMax,
		SpinNanos: uint64(c.Spin), GraceNanos: uint64(c.Grace),
		Settings: []string{"RNDV_THRESH=inf"},
	}
	if listed(transports, "tcp") {
		u.Settings = append(u.Settings, "TCP_TX_SEG_SIZE="+strconv.Itoa(tcpSendBytes),
			"TCP_RX_SEG_SIZE="+strconv.Itoa(tcpReceiveBytes))
	}
	u.Settings = append(u.Settings, c.Settings...)
	return u
}
