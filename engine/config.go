// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"net"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/wire"
)

// Config is what Open needs. Only Backends has no default. Values outside their
// range are an error, never a silent correction.
type Config struct {
	// Name is shown to peers, in errors and in statistics; at most 255 bytes.
	Name string

	// Backends that the engine owns from Open on: it closes them, also when Open
	// fails. Their names must differ. Earlier ones win where costs are equal.
	Backends []driver.Backend

	// Identity secures Serve and Dial over a network: TLS 1.3 with certificates of both sides,
	// before a byte of a description goes either way. Give backend tcp the same.
	Identity *identity.Identity

	// Plaintext lets Serve and Dial exchange descriptions over a network in the open: a program
	// that reads one reaches the regions in it, and any that connects is given one. Only for
	// networks that are trusted. A Unix socket needs neither: the kernel tells of which user the
	// other side is.
	Plaintext bool

	// All durations below are at most 8,760 h, a year.

	// TransferTimeout bounds how long a transfer makes no progress: one of which nothing has
	// ended for that time, counted in batches of up to 64 MiB, ends with ErrTimeout. Default 30 s.
	TransferTimeout time.Duration

	// AbortGrace is how long a backend may take to end a transfer that was
	// aborted or timed out before the engine closes the connection instead, and
	// again before it gives up on the proof. Default 1 s.
	AbortGrace time.Duration

	// ConnectTimeout bounds Connect and Dial, which try again until then where the other side is
	// late. Default 30 s.
	ConnectTimeout time.Duration

	// HandshakeTimeout bounds one exchange of descriptions over Serve, which tries each backend for
	// a part of it, and the first try of each in Connect where there are several. Default 5 s.
	HandshakeTimeout time.Duration

	// Spin is how long Wait looks for the end of a transfer before it parks.
	// At most 1 s, since no context ends it; default 20 µs; negative: it parks at once, as it
	// does for a backend whose Caps.Sleep is set. Next looks for messages by it, too.
	Spin time.Duration

	// StagingBytes bounds the staging memory of all peers, for chains of backends:
	// about 8.5 MiB for each peer that is reached by one, and as much for each that
	// reaches this engine so. Default 256 MiB; negative: none, and no such route.
	StagingBytes int64

	TransfersMax     int // live Transfers, at most 1,048,576; default 4,096
	RegionsMax       int // named regions; default 65,536
	LeasesMax        int // standing leases; default 65,536
	PeersMax         int // live peers, of one host half as many by Serve; default 1,024
	NotificationsMax int // depth of the Notifications channel; default 1,024
	// in that channel, or of one notification, and as many of those whose parts have not all
	// come; default 64 MiB
	NotificationBytes int
	// bytes of a peer's description, of all that come by Serve 16 times as many, of one host half
	// of these; default 16 MiB
	DescriptionMax int
	NotifyMax      int // bytes of a notification, sent or received; default 16 MiB
	HandshakesMax  int // exchanges of Serve at a time, of one host half; default 64

	// Schedule keeps less urgent transfers from delaying others: see Transfer.Schedule. Nil: every
	// transfer goes to its backend at once.
	Schedule *Schedule

	// OnPeer is called once for each peer that came through Serve, from a
	// goroutine of its own, after this engine has connected back. The engine does
	// not wait for it. The peer takes a place of PeersMax until it is closed: do
	// that once it is lost. Without OnPeer the engine does.
	OnPeer func(*Peer)

	// OnRefused is called for each connection that Serve ended without a peer, with where it
	// came from and why, from the goroutine of that exchange. It should return soon.
	OnRefused func(from net.Addr, why error)
}

const (
	transfersLimit = 1 << 20 // slots in a tag
	durationMax    = 8760 * time.Hour
	spinMax        = time.Second
	stagingMax     = 1 << 40 // 1 TiB
)

func (c Config) withDefaults() (Config, error) {
	for _, f := range []struct {
		name  string
		field *time.Duration
		value time.Duration
	}{
		{"TransferTimeout", &c.TransferTimeout, 30 * time.Second},
		{"AbortGrace", &c.AbortGrace, time.Second},
		{"ConnectTimeout", &c.ConnectTimeout, 30 * time.Second},
		{"HandshakeTimeout", &c.HandshakeTimeout, 5 * time.Second},
	} {
		if *f.field < 0 || *f.field > durationMax {
			return c, fmt.Errorf("config: %s is %v, from 0 to %v: %w", f.name, *f.field,
				durationMax, ErrBounds)
		}
		if *f.field == 0 {
			*f.field = f.value
		}
	}
	if c.Spin > spinMax {
		return c, fmt.Errorf("config: Spin is %v, at most %v: %w", c.Spin, spinMax, ErrBounds)
	}
	if c.Spin == 0 {
		c.Spin = 20 * time.Microsecond
	}
	if c.StagingBytes > stagingMax {
		return c, fmt.Errorf("config: StagingBytes is %d, at most %d: %w", c.StagingBytes,
			int64(stagingMax), ErrBounds)
	}
	if c.StagingBytes == 0 {
		c.StagingBytes = 256 << 20
	}
	for _, f := range []struct {
		name       string
		field      *int
		value, max int
	}{
		{"TransfersMax", &c.TransfersMax, 4096, transfersLimit},
		{"RegionsMax", &c.RegionsMax, 1 << 16, wire.RegionsMax},
		{"LeasesMax", &c.LeasesMax, 1 << 16, 1 << 24},
		{"PeersMax", &c.PeersMax, 1024, 1 << 20},
		{"NotificationsMax", &c.NotificationsMax, 1024, 1 << 20},
		{"NotificationBytes", &c.NotificationBytes, 64 << 20, 1 << 40},
		{"DescriptionMax", &c.DescriptionMax, 16 << 20, 1 << 30},
		{"NotifyMax", &c.NotifyMax, 16 << 20, wire.NotifyMax},
		{"HandshakesMax", &c.HandshakesMax, 64, 1 << 16},
	} {
		if *f.field < 0 || *f.field > f.max {
			return c, fmt.Errorf("config: %s is %d, at most %d: %w", f.name, *f.field, f.max,
				ErrBounds)
		}
		if *f.field == 0 {
			*f.field = f.value
		}
	}
	if c.Schedule != nil {
		s, err := c.Schedule.complete()
		if err != nil {
			return c, err
		}
		c.Schedule = &s
	}
	return c, c.checkBackends()
}

func (c *Config) checkBackends() error {
	if err := wire.CheckName(c.Name); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	if c.Identity != nil && c.Plaintext {
		return fmt.Errorf("config: both Identity and Plaintext: want one of them: %w", ErrBounds)
	}
	const most = wire.BackendsMax - 1 // the chains count for one
	if len(c.Backends) == 0 || len(c.Backends) > most {
		return fmt.Errorf("config: %d Backends, from 1 to %d: %w", len(c.Backends), most,
			ErrBounds)
	}
	seen := map[string]bool{}
	for _, b := range c.Backends {
		name := b.Caps().Name
		if name == Staged {
			return fmt.Errorf("config: backend name %q is the engine's own: %w", name, ErrBusy)
		}
		if name == "" || seen[name] {
			return fmt.Errorf("config: backend name %q is empty or there twice: %w", name, ErrBusy)
		}
		seen[name] = true
	}
	return nil
}
