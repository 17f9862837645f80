// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"io"

	"github.com/sluicehq/sluice/internal/session"
)

// descriptionsMax is how many times Config.DescriptionMax the descriptions take that came through
// Serve.
const descriptionsMax = 16

// guests counts what the engines that came through Serve hold here, by host. Engine.mu guards it.
type guests struct {
	peers session.HostCount // of Config.PeersMax
	bytes session.HostCount // of descriptions
}

func newGuests(c *Config) guests {
	return guests{session.HostCount{Most: c.PeersMax}, session.HostCount{Most: descriptionsMax *
		c.DescriptionMax}}
}

// guest is an engine that has come through Serve, from its first byte until its Peer is closed.
type guest struct {
	e       *Engine
	host    session.Host
	dialled bool // this engine has begun to connect back

	// Engine.mu guards what follows.
	bytes int
	peer  bool // it has a place among the peers
	bound bool // a Peer stands for it, which ends it
}

// reader counts what is read of a description, and reads no more than there is room for.
func (g *guest) reader(from io.Reader) io.Reader { return guestReader{g, from} }

type guestReader struct {
	g    *guest
	from io.Reader
}

// Read implements io.Reader.
func (r guestReader) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	e := r.g.e
	e.mu.Lock()
	defer e.mu.Unlock()
	c := &e.guests.bytes
	if fits, _ := c.Fits(r.g.host, n); !fits {
		return 0, fmt.Errorf("the descriptions of all peers take %d bytes at most, of one host "+
			"half as many, raise Config.DescriptionMax: %w", c.Most, ErrFull)
	}
	c.Add(r.g.host, n)
	r.g.bytes += n
	return n, err
}

// takePlace reserves a place among the peers.
func (g *guest) takePlace() error {
	g.e.mu.Lock()
	defer g.e.mu.Unlock()
	err := g.e.guests.peers.Take(g.host, "peers", "PeersMax")
	g.peer = err == nil
	return err
}

// leave gives back what the guest holds, unless it has a Peer.
func (g *guest) leave() {
	g.e.mu.Lock()
	defer g.e.mu.Unlock()
	if !g.bound {
		g.end()
	}
}

// end gives back what the guest holds.
// Preconditions: Engine.mu is held.
func (g *guest) end() {
	g.e.guests.bytes.Add(g.host, -g.bytes)
	if g.peer {
		g.e.guests.peers.Add(g.host, -1)
	}
	g.bytes, g.peer = 0, false
}
