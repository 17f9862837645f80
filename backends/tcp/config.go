// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"crypto/tls"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/session"
)

// ConnsDefault is how many connections carry the data to a peer.
const ConnsDefault = 3

// Config says where to listen and how peers prove their identity, and bounds what a Backend
// uses. Every zero field takes its default. Without TLS, Identity and Plaintext the backend makes a
// key of its own, which its address names: a program that is given that may connect, and no other,
// by TLS 1.3. All peers must do it alike.
type Config struct {
	// TLS is the identity of this host and of the peers that it accepts: Certificates, RootCAs and
	// ClientCAs must be set. TLS 1.3 with certificates of both sides is asked for on every
	// connection, whatever else it says. An owner's certificate must be for ServerName where
	// that is set; else any certificate of RootCAs will do, so that these should be of
	// the project's own authority.
	TLS *tls.Config

	// Identity stands in place of TLS: that of the engine, from files that may change.
	Identity *identity.Identity

	// Plaintext lets everybody on the network read and change what passes: only for networks
	// that are trusted. Memory is still opened by tokens alone.
	Plaintext bool

	// Listen is a host, a port, or both: "10.0.0.1:7000", "[::1]:0", "eth.example:7000-7100",
	// where the first free port of a range is taken. Empty: all addresses, any port.
	Listen string

	// Advertise lists hosts, by name or number, at which peers reach us; the port is added.
	// Empty: where we listen, and where that is everywhere all addresses of this host.
	Advertise []string

	Conns      int // connections for data to a peer; default ConnsDefault, at most 64
	Flight     int // bytes on their way over each of them; default 8 MiB
	BatchesMax int // tags accepted and not yet polled; default 1,024
	NotifyMax  int // messages of a peer on their way or not received; default 256
	MessageMax int // bytes of a notification; default 32 KiB, at most 64 KiB
	KeysMax    int // memories registered at a time; default 64 Ki, at most 1 Mi
	// peers connected to us at a time, of one host half as many, also those that have left and of
	// which messages are not received; one with several times as many connections as we open to a
	// peer counts as so many; default 1,024
	PeersMax int
	// connections heard before they have said what they are for, of one host half; default 64
	Handshakes int

	// Grace is how old bytes may be when they land, beside the time of a round trip. Of
	// two peers the larger counts. An owner that finds older bytes in its sockets, such as one
	// that was frozen, asks the sender first; a sender that has given up confirms nothing. So
	// Peer.Close and the end of a lost connection wait that long for an owner that does not
	// answer. Grace bounds no transfer: a slow network costs a question. Default 300 ms.
	Grace time.Duration

	// CloseMax is how long Peer.Close waits for what is on its way to end by itself. In all it
	// takes at most CloseMax and 9/8 of Grace, or 9/8 of Grace and a round trip where
	// that is longer. Keep that below the engine's AbortGrace. Default 500 ms.
	CloseMax time.Duration

	// Failure is after what time a host that acknowledges nothing is gone, while a transfer waits
	// for it; where none waits, six times as long. A process that is stopped, or kept off its
	// processors, is not: its host acknowledges for it, and what began a transfer bounds it.
	// Default 10 s.
	Failure time.Duration

	// Handshake is how long one who connects to us may take to say who it is, and for its other
	// connections to come. Default 5 s.
	Handshake time.Duration
}

const (
	descsMax = 4096
	runsMax  = 64 << 10
	graceMin = 10 * time.Millisecond
	graceMax = 10 * time.Second
	connsMax = 64
)

// EnsureDefaults fills in the zero fields.
func (c *Config) EnsureDefaults() {
	session.SetDefault(&c.Conns, ConnsDefault)
	session.SetDefault(&c.Flight, 8<<20)
	session.SetDefault(&c.BatchesMax, 1024)
	session.SetDefault(&c.NotifyMax, 256)
	session.SetDefault(&c.MessageMax, 32<<10)
	session.SetDefault(&c.KeysMax, 64<<10)
	session.SetDefault(&c.PeersMax, 1024)
	session.SetDefault(&c.Handshakes, 64)
	session.SetDefault(&c.Grace, 300*time.Millisecond)
	session.SetDefault(&c.CloseMax, 500*time.Millisecond)
	session.SetDefault(&c.Failure, 10*time.Second)
	session.SetDefault(&c.Handshake, 5*time.Second)
}

func (c *Config) check() error {
	for _, f := range []struct {
		name            string
		value, low, top int
	}{
		{"Conns", c.Conns, 1, connsMax},
		{"Flight", c.Flight, partBytes, 1 << 30},
		{"BatchesMax", c.BatchesMax, 1, 1 << 20},
		{"NotifyMax", c.NotifyMax, 1, 1 << 16},
		{"MessageMax", c.MessageMax, 1, messageLimit},
		{"KeysMax", c.KeysMax, 1, session.KeyLimit},
		{"PeersMax", c.PeersMax, 1, 1 << 20},
		{"Handshakes", c.Handshakes, 1, 1 << 16},
		{"Grace in ms", int(c.Grace.Milliseconds()), int(graceMin.Milliseconds()),
			int(graceMax.Milliseconds())},
		{"CloseMax in ms", int(c.CloseMax.Milliseconds()), 1, 1 << 20},
		{"Failure in ms", int(c.Failure.Milliseconds()), 100, 1 << 30},
		{"Handshake in ms", int(c.Handshake.Milliseconds()), 10, 1 << 30},
	} {
		if err := session.CheckWithin(f.name, f.value, f.low, f.top); err != nil {
			return err
		}
	}
	return nil
}

// secure returns the identity of the Config, if it has one, and how peers know this backend.
func (c *Config) secure() (*identity.Identity, security, error) {
	switch {
	case c.TLS != nil && (c.Identity != nil || c.Plaintext), c.Identity != nil && c.Plaintext:
		return nil, plain, fmt.Errorf("config: both TLS and Plaintext, or Identity and one of "+
			"them: %w", driver.ErrBounds)
	case c.Plaintext:
		return nil, plain, nil
	case c.Identity != nil:
		return c.Identity, certified, nil
	case c.TLS == nil:
		return nil, pinned, nil
	}
	id, err := identity.FromTLS(c.TLS)
	if err != nil {
		return nil, plain, fmt.Errorf("config: TLS: %w", err)
	}
	return id, certified, nil
}

func (c *Config) caps() driver.Caps {
	var pairs driver.Pairs
	pairs[driver.DRAM] = driver.KindsOf(driver.DRAM)
	return driver.Caps{
		Name: "tcp", Reach: driver.Network, Pairs: pairs,
		DescsMax: descsMax, RunsMax: runsMax, MessageMax: c.MessageMax, Sleep: true,
		Cost: driver.Cost{Setup: 20 * time.Microsecond, PerPiece: 200 * time.Nanosecond, Rate: 3e9},
	}
}
