// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// GroupConfig configures NewGroupSender and NewGroupReceiver: one rank of one group. Plan,
// Regions and Peers have no default. All ranks of both groups need the same Plan, of the same
// sides in the same order.
type GroupConfig struct {
	Plan    *layout.Plan
	Index   int              // of this rank in Plan.Senders or Plan.Receivers
	Regions []*engine.Region // of this rank, as in Side.Regions; nil: no view lies there
	Peers   []*engine.Peer   // all ranks of the other group, by index

	// Edge, if set, may change the Op of each edge of this rank. The rank at the other end must
	// choose the same one, or it refuses requests with ErrGeometry.
	Edge  func(*layout.Edge)
	Route engine.Route // of the transfers of this rank
	Class engine.Class // of the same; default SwapIn, as the other group waits for them

	Limits

	// OnLayer, if set, is called for each layer that a sender has handed over, in order, by a
	// goroutine of the push. It must not wait.
	OnLayer func(LayerReport)

	// Digest, if set, has a sender send digests of a layer along, which the receivers compare with
	// what has come (layout.Digester). Layers that differ never become ready: the request ends
	// with a *layout.MismatchError. Layer calls it, so it must not wait. Receivers of HBM need a
	// Summer, too.
	Digest func(layer int) bool

	// Summer sums cells of regions in HBM, as a Backend of backends/cuda does: such a layer has a
	// digest only with one. Layer, and the end of a request, wait for it.
	Summer layout.Summer
}

// LayerReport describes the hand-over of one layer of one request.
type LayerReport struct {
	Request uint64
	Layer   int
	Took    time.Duration // from Post to completion
}

// check compares the configuration with the sides of this rank's group and of the other one.
func (c *GroupConfig) check(own, other []*layout.Side) error {
	switch {
	case c.Index < 0 || c.Index >= len(own):
		return fmt.Errorf("group: Index %d of %d ranks: %w", c.Index, len(own), engine.ErrBounds)
	case len(c.Peers) != len(other):
		return fmt.Errorf("group: %d peers, the other group has %d ranks: %w", len(c.Peers),
			len(other), engine.ErrBounds)
	case len(c.Regions) != len(own[c.Index].Regions):
		return fmt.Errorf("group: %d regions, the side of rank %d has %d: %w", len(c.Regions),
			c.Index, len(own[c.Index].Regions), engine.ErrBounds)
	}
	for i, p := range c.Peers {
		same := func(q *engine.Peer) bool { return q.ID() == p.ID() }
		switch {
		case p == nil:
			return fmt.Errorf("group: no peer %d: %w", i, engine.ErrBounds)
		case slices.ContainsFunc(c.Peers[:i], same):
			return fmt.Errorf("group: peer %d (%s) is one of those before, too: a rank is an "+
				"engine: %w", i, p.Name(), engine.ErrBounds)
		}
	}
	for _, v := range own[c.Index].Views {
		area, r := own[c.Index].Regions[v.Region], c.Regions[v.Region]
		switch {
		case r == nil || r.Size() < area.Bytes:
			return fmt.Errorf("group: region %d (%s) needs %d bytes: %w", v.Region, area.Name,
				area.Bytes, engine.ErrBounds)
		case c.Digest != nil && r.Bytes() == nil && (c.Summer == nil || r.Kind() != engine.HBM):
			return fmt.Errorf("group: region %d (%s) is %v: digests need %v, or %v and a "+
				"GroupConfig.Summer, as a backend of backends/cuda is: %w", v.Region, area.Name,
				r.Kind(), engine.DRAM, engine.HBM, engine.ErrNotSupported)
		}
	}
	if c.Digest != nil && c.Summer != nil { // whether it can, before any layer needs it
		if _, err := c.Summer.SumCells(nil); err != nil {
			return fmt.Errorf("group: %w", err)
		}
	}
	return c.Limits.check("group")
}

// rank is the common part of GroupSender and GroupReceiver.
type rank struct {
	cfg      GroupConfig
	mux      *Mux
	unhandle func() // ends the handler of the Mux
	first    byte   // of the messages to the other group
	side     *layout.Side
	others   []*layout.Side
	plan     [sha256.Size]byte     // fingerprint
	edges    []*layout.Edge        // by rank of the other group; nil: no bytes go between
	lines    []*groupLine          // by rank of the other group
	memory   [][]byte              // by region; nil: not DRAM
	device   []layout.DeviceMemory // by region; zero: not HBM
	count    *counters

	rangesMax int          // of a lease
	places    atomic.Int64 // bytes of begins or grants that have come, or are to come

	closing chan struct{}
	running sync.WaitGroup
}

// newRank checks a configuration and makes a rank of it.
func newRank(m *Mux, cfg GroupConfig, sends bool) (*rank, error) {
	cfg.ensureDefaults()
	if cfg.Plan == nil {
		return nil, fmt.Errorf("group: no plan: %w", engine.ErrBounds)
	}
	own, other, first, op := cfg.Plan.Senders(), cfg.Plan.Receivers(), toReceiver, engine.Write
	if !sends {
		own, other, first, op = other, own, toSender, engine.Read
	}
	if err := cfg.check(own, other); err != nil {
		return nil, err
	}
	r := &rank{cfg: cfg, mux: m, first: first, side: own[cfg.Index], others: other,
		edges: make([]*layout.Edge, len(other)), closing: make(chan struct{}),
		rangesMax: driver.RangesMax, count: &counters{}}
	var err error
	if r.plan, err = cfg.Plan.Fingerprint(); err != nil {
		return nil, fmt.Errorf("group: %w", err)
	}
	for to := range cfg.Plan.Receivers() {
		for _, e := range cfg.Plan.Edges(to) {
			at, from := to, e.From
			if !sends {
				at, from = from, to
			}
			if from != cfg.Index {
				continue
			}
			if cfg.Edge != nil {
				cfg.Edge(&e)
			}
			if e.Op != engine.Read && e.Op != engine.Write {
				return nil, fmt.Errorf("group: operation %d of an edge: %w", e.Op,
					engine.ErrNotSupported)
			}
			r.edges[at] = &e
		}
	}
	for _, p := range cfg.Peers {
		r.lines = append(r.lines, &groupLine{eng: m.eng, peer: p, op: op, route: cfg.Route,
			class: cfg.Class, cachedImports: map[int]*engine.Remote{}})
	}
	for _, region := range cfg.Regions {
		var b []byte
		var d layout.DeviceMemory
		if region != nil {
			b = region.Bytes()
		}
		if region != nil && region.Kind() == engine.HBM {
			seg := region.Segment()
			d = layout.DeviceMemory{Device: seg.Device, Addr: seg.Addr, Len: seg.Len}
		}
		r.memory, r.device = append(r.memory, b), append(r.device, d)
	}
	return r, nil
}

// held describes the blocks of a request at this rank, which sends or receives them.
func (r *rank) held(receiver bool, t layout.Tables, s layout.Span) *layout.Held {
	return &layout.Held{Receiver: receiver, Memory: r.memory, Device: r.device,
		Summer: r.cfg.Summer, Tables: t, Span: s}
}

// reserve reports whether there is room for a begin or a grant of so many bytes, and takes it.
func (r *rank) reserve(n uint32) bool {
	if r.places.Add(int64(n)) <= int64(r.cfg.PlacesMax) {
		return true
	}
	r.places.Add(-int64(n))
	return false
}

// op returns the operation of an edge, 0 where there is none.
func (r *rank) op(other int) engine.Op {
	if r.edges[other] == nil {
		return 0
	}
	return r.edges[other].Op
}

// watch calls lost for each rank of the other group that is lost.
func (r *rank) watch(lost func(other int)) {
	for i, p := range r.cfg.Peers {
		r.running.Go(func() {
			select {
			case <-p.Lost():
				lost(i)
			case <-r.closing:
			}
		})
	}
}

// notify sends a rank of the other group a message without a body. Where it cannot be sent within
// NotifyTimeout, the limits of that rank end the request there.
func (r *rank) notify(other int, session uint64, what kind, reason Reason) {
	ctx, cancel := context.WithTimeout(context.Background(), r.cfg.NotifyTimeout)
	defer cancel()
	_ = r.cfg.Peers[other].Notify(ctx, appendHeader(nil, r.first, what, reason, session))
}

// lostPeer returns the first rank of the other group that is lost.
func (r *rank) lostPeer() (other int, lost bool) {
	for i, p := range r.cfg.Peers {
		if isLost(p) {
			return i, true
		}
	}
	return 0, false
}

func isLost(peer *engine.Peer) bool { return isClosed(peer.Lost()) }

// endOf turns an error at a rank of the other group into the end of the request.
func (r *rank) endOf(ctx context.Context, request uint64, other int, err error) *EndError {
	end := endOf(ctx, request, err)
	end.Request, end.Peer = request, r.cfg.Peers[other].Name()
	if end.Reason == Failed && isLost(r.cfg.Peers[other]) {
		end.Reason = PeerLost
	}
	return end
}

// Stats returns the totals.
func (r *rank) Stats() Stats { return r.count.stats() }

func (r *rank) closeLines() error {
	var errs []error
	for _, l := range r.lines {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// layers lists the layers of this rank.
func (r *rank) layers() (list []int) {
	seen := map[int]bool{}
	for i := range r.side.Views {
		if l := r.side.Views[i].Layer; !seen[l] {
			seen[l] = true
			list = append(list, l)
		}
	}
	return list
}
