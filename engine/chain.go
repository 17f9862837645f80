// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// Staged is the name of the engine's own route: a chain of backends through staging memory
// in DRAM, for pairs of memories that no single backend serves. HBM of this engine reaches
// HBM of a peer so, or a file: local memory -> staging -> staging of the peer -> its memory.
// The peer's engine makes the last hop, for which its program need do nothing.
//
//   - The bytes go in pieces of at most 1 MiB, several at a time, so that hops overlap.
//     Staging memory is bounded by Config.StagingBytes and taken when first needed.
//   - Route.Only = Staged asks for it, any other Only forbids it, Explain shows the hops.
//   - A transfer has one outcome, and its error names the hop.
//   - Abort and Revoke hold as for every route: see ErrUnproven for the one limit.
//
// It looks like a backend to the rest of the engine: a lane of its own, the last one.
const Staged = "staged"

// The shape of staging memory: see internal/wire.
const (
	pieceBytes  = wire.PieceBytes
	slotBytes   = wire.SlotBytes
	slotsMax    = 8 // pieces under way to one peer
	stagedDescs = 1024
	stagedPages = 64 << 10
	stagedJobs  = 256 // batches of one peer before ErrFull
	windowsMin  = 4   // that one host may have, however little staging memory there is
)

// stager is that lane's backend. The hops are Transfers of this engine; each Peer that is
// reached by chains, and each window that a peer has been given, has a loop to which their
// ends come as tasks.
type stager struct {
	driver.BackendBase
	e    *Engine
	lane *lane

	used      atomic.Int64 // bytes of staging memory
	exchanged atomic.Bool  // tickets were given to other engines

	mu       sync.Mutex // guards the fields below
	memories map[uint32]*stagedMemory
	lastKey  uint32
	windows  map[*window]struct{}
	origins  map[string]int // windows by the origin of the ticket that their connections have shown
	draining bool           // no more goroutines

	serving sync.WaitGroup // goroutines for windows and local peers
}

// addStager gives the engine its last lane, which needs no goroutine of a lane's.
func (e *Engine) addStager() {
	s := &stager{e: e, memories: map[uint32]*stagedMemory{},
		windows: map[*window]struct{}{}, origins: map[string]int{}}
	s.lane = &lane{e: e, index: len(e.lanes), b: s, caps: s.Caps(), kick: make(chan struct{}, 1)}
	e.stager, e.lanes = s, append(e.lanes, s.lane)
}

// pool is staging memory with its region.
type pool struct {
	slots  int
	memory io.Closer
	region *Region
}

// newPool makes staging memory of as many slots as the budget has, at most slotsMax.
func (s *stager) newPool() (*pool, error) {
	n := slotsMax
	for s.used.Add(int64(n)*slotBytes) > s.e.cfg.StagingBytes {
		used := s.used.Add(-int64(n) * slotBytes)
		if n /= 2; n == 0 {
			return nil, fmt.Errorf("%d of %d bytes of staging memory are in use: close peers or "+
				"raise Config.StagingBytes: %w", used, s.e.cfg.StagingBytes, ErrFull)
		}
	}
	m, err := Alloc(uint64(n)*slotBytes, AllocOptions{Purpose: "staging"})
	if err != nil {
		s.used.Add(-int64(n) * slotBytes)
		return nil, err
	}
	r, err := s.e.registerHidden(m.Segment())
	if err != nil {
		if m.Close() == nil { // else its bytes are in use still
			s.used.Add(-int64(n) * slotBytes)
		}
		return nil, err
	}
	return &pool{slots: n, memory: m, region: r}, nil
}

// close gives it back, unless a backend may still use the bytes: then it stays for ever.
func (p *pool) close(s *stager, stuck bool) {
	if stuck || p.region.Close() != nil || p.memory.Close() != nil {
		return
	}
	s.used.Add(-int64(p.slots) * slotBytes)
}

// Caps implements driver.Backend.
func (s *stager) Caps() driver.Caps {
	all := driver.KindsOf(driver.DRAM, driver.HBM, driver.File)
	return driver.Caps{Name: Staged, Reach: driver.Network, Pairs: driver.Pairs{all, all, all},
		DescsMax: stagedDescs, RunsMax: stagedPages, LenMax: pieceBytes}
}

// Register implements driver.Backend; the engine registers by the method of that name in
// lower case, which has the memories of the other lanes.
func (s *stager) Register(driver.Segment) (driver.Memory, error) { return nil, ErrNotSupported }

// Addr implements driver.Backend: the kinds of memory that this engine reaches for peers.
func (s *stager) Addr() []byte {
	if s.e.cfg.StagingBytes < slotBytes {
		return nil
	}
	return []byte{byte(s.reachable())}
}

// FD and Arm implement driver.Backend: no goroutine waits for it.
func (s *stager) FD() int            { return -1 }
func (s *stager) Arm() (bool, error) { return false, nil }

// reachable are the kinds of memory that the engine can move from and to DRAM of its own.
func (s *stager) reachable() (kinds driver.Kinds) {
	for _, l := range s.e.lanes {
		if l != s.lane {
			kinds |= l.caps.Pairs[driver.DRAM]
		}
	}
	return kinds
}

// Connect implements driver.Backend; the engine has connect, which has the other lanes' peers.
func (s *stager) Connect(context.Context, []byte) (driver.Peer, error) {
	return nil, ErrNotSupported
}

// Poll implements driver.Backend: the loops deliver completions themselves.
func (s *stager) Poll([]driver.Completion) (int, error) { return 0, nil }

// complete ends a tag.
func (s *stager) complete(tag uint64, err error) {
	s.e.finish(s.lane, &driver.Completion{Tag: tag, Err: err})
	s.lane.retry()
}

// drain waits for all goroutines. The engine's life has ended.
func (s *stager) drain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.serving.Wait()
}

// serve runs f in a goroutine, unless the engine closes.
func (s *stager) serve(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.serving.Go(f)
	return true
}

// Close implements driver.Backend: Peers and windows are closed by now.
func (s *stager) Close() error { return nil }

// chain is how bytes go between a local memory and one of a peer.
type chain struct {
	near *lane // between the local memory and staging memory; nil: the local memory is DRAM
	by   *lane // from there to the peer's memory, or to staging memory of the peer
	far  bool  // then its engine makes the last hop
	self bool  // the peer is this engine
}

// handOver is the cost of a hop beyond its backend: the goroutine of the loop wakes for it.
const handOver = 10 * time.Microsecond

// chain plans the way, or says why there is none.
func (sp *stagedPeer) chain(local *Region, remote *Remote, durable bool) (c chain,
	obstacle string) {
	s, p := sp.s, sp.p
	c.self = p.isSelf()
	if s.e.cfg.StagingBytes < slotBytes {
		return c, "Config.StagingBytes leaves no staging memory"
	}
	if durable && remote.kind != driver.File {
		return c, fmt.Sprintf("%v does not survive a loss of power, as Route.Durable asks",
			remote.kind)
	}
	if local.Kind() != driver.DRAM {
		if c.near = s.nearest(local, func(*lane) bool { return true }); c.near == nil {
			return c, fmt.Sprintf("no backend moves %v of this engine to and from DRAM",
				local.Kind())
		}
	}

	// The best way goes from DRAM here to the peer's memory by one backend.
	c.by = s.cheapest(p, func(l *lane) bool {
		if !p.alive(l.index) || durable && p.conns[l.index].can&driver.CanDurable == 0 ||
			!l.caps.Pairs.Serves(driver.DRAM, remote.kind) || remote.tokens[l.index] == nil {
			return false
		}
		_, err := remote.key(l.index)
		return err == nil
	})
	switch {
	case c.by != nil && c.near != nil:
		return c, ""
	case c.by != nil && (c.self || remote.kind == driver.DRAM):
		return c, fmt.Sprintf("%s moves %v to and from %v alone", c.by.caps.Name, local.Kind(),
			remote.kind)
	case c.self && durable:
		return c, fmt.Sprintf("no backend moves DRAM to %v and says when it would survive a "+
			"loss of power", remote.kind)
	case c.self:
		return c, fmt.Sprintf("no backend moves %v to and from DRAM", remote.kind)
	}

	// Otherwise the peer's engine makes the last hop. Whether it can make that a durable one is
	// seen when it is asked to.
	c.far = true
	switch {
	case sp.farKinds == 0:
		return c, "the peer gives no staging memory"
	case remote.tokens[s.lane.index] == nil || !sp.farKinds.Has(remote.kind):
		return c, fmt.Sprintf("the peer has no backend that moves %v to and from DRAM",
			remote.kind)
	}
	if c.by = s.cheapest(p, func(l *lane) bool {
		return p.alive(l.index) && p.conns[l.index].notifies() &&
			l.caps.Pairs.Serves(driver.DRAM, driver.DRAM)
	}); c.by == nil {
		return c, "no backend that connects us moves DRAM to DRAM and carries messages"
	}
	return c, ""
}

// nearest returns the cheapest lane that will do, by which the engine reaches memory of its own
// from DRAM.
func (s *stager) nearest(r *Region, will func(*lane) bool) *lane {
	return s.cheapest(nil, func(l *lane) bool {
		return will(l) && r.mems[l.index] != nil && l.caps.Pairs.Serves(driver.DRAM, r.seg.Kind)
	})
}

// cheapest returns the cheapest lane that will do. A last resort to a peer comes behind all others.
func (s *stager) cheapest(p *Peer, will func(*lane) bool) (best *lane) {
	last := func(l *lane) bool { return p != nil && p.conns[l.index].lastResort() }
	cost := func(l *lane) time.Duration { return l.caps.Cost.Estimate(1, nominalBytes) }
	for _, l := range s.e.lanes {
		if l != s.lane && will(l) && (best == nil || last(best) && !last(l) ||
			last(best) == last(l) && cost(l) < cost(best)) {
			best = l
		}
	}
	return best
}

func (p *Peer) alive(lane int) bool { return p.conns[lane] != nil && !p.conns[lane].isLost() }

// cost is that of all hops: one after the other for the first piece, and then as fast as the
// slowest. The cost of the peer's last hop is not known; it is taken for one like ours.
func (c *chain) cost() driver.Cost {
	sum := c.by.caps.Cost
	sum.Setup += handOver
	if c.near != nil {
		hop := c.near.caps.Cost
		sum.Setup += hop.Setup + handOver
		sum.PerPiece += hop.PerPiece
		sum.Rate = min(sum.Rate, hop.Rate)
	}
	if c.far {
		sum.Setup += c.by.caps.Cost.Setup + 2*handOver
	}
	return sum
}

// describe draws the chain.
func (c *chain) describe(local, remote driver.Kind, slots int) string {
	var b strings.Builder
	b.WriteString(local.String())
	if c.near != nil {
		fmt.Fprintf(&b, " -%s- dram", c.near.caps.Name)
	}
	fmt.Fprintf(&b, " -%s- ", c.by.caps.Name)
	if c.far {
		b.WriteString("dram of the peer -its engine- ")
	}
	fmt.Fprintf(&b, "%v, %d pieces of %d KiB at a time", remote, slots, pieceBytes>>10)
	return b.String()
}

// shape encodes the inputs of a chain to one memory of the peer: the kind of the local one, which
// lanes know it, and whether writes are durable.
func shape(r *Region, durable bool) uint64 {
	lanes, kind := uint64(0), uint64(r.seg.Kind)
	if durable {
		kind |= 1 << 7
	}
	for i, m := range r.mems {
		if m != nil {
			lanes |= 1 << i
		}
	}
	return lanes<<8 | kind
}
