// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/hex"
	"errors"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/internal/wire"
)

// Stats is a copy of the counters. They only grow, and never block a transfer.
type Stats struct {
	Routes        []RouteStats // one for each peer and backend that are connected
	Posted        int          // transfers in flight now
	Regions       int
	Peers         int // that this engine has connected to
	Leases        int
	Stray         uint64 // completions that no transfer waited for: a backend's fault
	Notifications int    // waiting in the channel now
}

// RouteStats counts the transfers to one peer over one backend.
type RouteStats struct {
	Peer, Backend string
	Engine        string // of the peer: tells two of one name apart
	Transfers     uint64 // that succeeded
	Bytes         uint64 // of those
	Errors        map[string]uint64
	Latency       Histogram // of those that succeeded, post to completion
	Rate          float64   // measured bytes a second of large transfers; 0: not known yet
}

// The kinds under which errors are counted; the first that matches counts.
var errorKinds = []struct {
	name string
	err  error
}{
	{"aborted", ErrAborted}, {"revoked", ErrRevoked}, {"timeout", ErrTimeout},
	{"peer lost", ErrPeerLost},
	{"closed", ErrClosed}, {"bounds", ErrBounds}, {"corrupt", ErrCorrupt}, {"fault", ErrFault},
	{"other", nil},
}

// counters is what a connection counts.
type counters struct {
	bytes   atomic.Uint64
	errors  [9]atomic.Uint64 // by errorKinds
	latency [histogramBuckets]atomic.Uint64
	meter
}

func (c *counters) success(bytes uint64, took time.Duration) {
	if bytes > 0 {
		c.bytes.Add(bytes)
	}
	c.latency[bucketOf(took)].Add(1)
}

func (c *counters) failure(err error) {
	for i, k := range errorKinds {
		if k.err == nil || errors.Is(err, k.err) {
			c.errors[i].Add(1)
			return
		}
	}
}

func (c *counters) snapshot(p *Peer, backend string) RouteStats {
	s := RouteStats{Peer: p.name, Backend: backend, Engine: engineOf(p.id), Bytes: c.bytes.Load(),
		Errors: map[string]uint64{}, Rate: c.measured()}
	for i, k := range errorKinds {
		if n := c.errors[i].Load(); n > 0 {
			s.Errors[k.name] = n
		}
	}
	for i := range c.latency {
		s.Latency.Buckets[i] = c.latency[i].Load()
		s.Transfers += s.Latency.Buckets[i]
	}
	return s
}

// record counts a transfer that ended on the connections that it used.
func (t *Transfer) record(err error) {
	if t.quiet {
		return
	}
	took := t.e.now() - t.postedAt
	if len(t.groups) == 0 && len(t.batches) > 0 { // a message alone
		t.batches[0].conn.count(0, took, err)
	}
	for i := range t.groups {
		g := &t.groups[i]
		g.conn.count(g.bytes, took, err)
		if g.bytes >= rateBytesMin {
			g.conn.counters.leave(t.e.now(), g.bytes, err == nil)
		}
	}
}

func (c *conn) count(bytes uint64, took time.Duration, err error) {
	if err != nil {
		c.counters.failure(err)
		return
	}
	c.counters.success(bytes, took)
}

// Stats returns the counters as they are.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := Stats{
		Posted: e.slots.posted(), Regions: len(e.regions), Peers: len(e.peers) - e.private,
		Leases: len(e.leases), Stray: e.dropped.Load(), Notifications: len(e.inbox),
	}
	for p := range e.peers {
		for _, c := range p.conns {
			if c != nil && !p.isPrivate() {
				s.Routes = append(s.Routes, c.counters.snapshot(p, c.lane.caps.Name))
			}
		}
	}
	return s
}

// engineOf names an engine where its name may be another's, too.
func engineOf(id wire.ID) string { return hex.EncodeToString(id[:8]) }
