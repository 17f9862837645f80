// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
)

// keysMax bounds the keys of a call.
const keysMax = 64 << 10

// spaceName is what a namespace is known by.
type spaceName struct {
	name     string
	geometry [32]byte
}

// Space is a namespace of the cluster. The keys of a call are a chain from its first block on, or
// go on where the blocks of Behind end: the nodes of a block follow from its place in the chain.
type Space struct {
	c      *Cluster
	name   spaceName
	before int       // blocks of the chain that are before those of a call
	head   cache.Key // first of the segment of the last of these
	closed *atomic.Bool
}

// Behind returns the namespace for calls about blocks that come behind others of their chain.
func (s *Space) Behind(chain []cache.Key) *Space {
	if len(chain) == 0 {
		return s
	}
	b := &Space{c: s.c, name: s.name, before: s.before + len(chain), head: s.head,
		closed: s.closed}
	if _, first := placement.SegmentOf(b.before - 1); first >= s.before {
		b.head = chain[first-s.before]
	}
	return b
}

// Close ends its use, and that of what Behind has made of it; the blocks stay. Wait for its
// operations before. It waits at most a second for a node.
func (s *Space) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	s.c.mu.Lock()
	s.c.opens[s.name]--
	last := s.c.opens[s.name] == 0
	if last {
		delete(s.c.opens, s.name)
	}
	s.c.mu.Unlock()
	if !last {
		return nil
	}
	var nodes sync.WaitGroup
	for _, n := range s.c.all() {
		if at := n.usable(); at != nil {
			nodes.Go(func() { at.leave(s.name) })
		}
	}
	nodes.Wait()
	return nil
}

// owners lists the nodes of each key: copies of them, from owners[k*copies] on, by their place in
// the layout.
func (s *Space) owners(l *layout, keys []cache.Key) (owners []int, copies int) {
	copies = max(1, min(l.Namespaces[s.name.name].Copies, directory.CopiesMax))
	for k := 0; k < len(keys); {
		segment, first := placement.SegmentOf(s.before + k)
		head := s.head
		if first >= s.before {
			head = keys[first-s.before]
		}
		at := len(owners)
		owners = placement.Owners(owners, l.bids, head, copies)
		if got := len(owners) - at; got < copies { // of all segments: there are so few nodes
			if copies = got; copies == 0 {
				return nil, 0
			}
		}
		of := owners[at:]
		for k++; k < len(keys) && s.before+k < placement.FirstOf(segment+1); k++ {
			owners = append(owners, of...)
		}
	}
	return owners, copies
}

// part is what one node is asked for in a call.
type part struct {
	n    *node
	at   []int // places in the keys of the call
	keys []cache.Key
}

// split makes the parts of those keys that which wants, by copy.
func split(l *layout, keys []cache.Key, owners []int, copies, nth int,
	which func(k int) bool) []*part {
	parts := make([]*part, len(l.nodes))
	for k := range keys {
		if !which(k) {
			continue
		}
		o := owners[k*copies+nth]
		if parts[o] == nil {
			parts[o] = &part{n: l.nodes[o]}
		}
		parts[o].at = append(parts[o].at, k)
		parts[o].keys = append(parts[o].keys, keys[k])
	}
	return slices.DeleteFunc(parts, func(p *part) bool { return p == nil })
}

func all(int) bool { return true }

// limits are when the nodes must have answered, and when the call ends, which is a little later:
// meanwhile a node that has not is made to move nothing any more.
type limits struct {
	nodes context.Context
	end   time.Time
	free  context.CancelFunc
}

const (
	// spareMax is the most that a call spares for proofs; of a short one it is a quarter.
	spareMax = 200 * time.Millisecond
	// wordLimit is how long it waits for the word of a node before it revokes its lease.
	wordLimit = 50 * time.Millisecond
)

func (c *Cluster) limit(ctx context.Context) limits {
	end := time.Now().Add(c.cfg.Limit)
	if d, is := ctx.Deadline(); is && d.Before(end) {
		end = d
	}
	spare := min(time.Until(end)/4, spareMax)
	nodes, cancel := context.WithDeadline(ctx, end.Add(-spare))
	stop := context.AfterFunc(c.life, cancel)
	return limits{nodes, end, func() { stop(); cancel() }}
}

// share is limits of which the nodes have a share of the time that is left.
func (l limits) share(of int) limits {
	d, _ := l.nodes.Deadline()
	soon, cancel := context.WithDeadline(l.nodes, time.Now().Add(time.Until(d)/time.Duration(of)))
	return limits{soon, l.end, cancel}
}

// proof is a context for the proof that nothing moves any more. It has the time for that, also in a
// call that was shorter.
func (l limits) proof() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), max(time.Until(l.end), spareMax))
}

// ask calls a node that is usable, and returns where it was. An error is the node's, which is
// counted; a node that is not usable is one that was asked for nothing.
func (s *Space) ask(l limits, n *node, do func(at *conn, space *serve.Space) error) (*conn, error) {
	at := n.usable()
	if at == nil {
		return nil, errNotReached
	}
	if l.nodes.Err() != nil {
		return nil, context.Cause(l.nodes)
	}
	n.requests.Add(1)
	space, err := at.space(l.nodes, s.name)
	if err == nil {
		err = do(at, space)
	}
	if over := l.nodes.Err(); err != nil && !errors.Is(over, context.Canceled) { // by the caller
		at.failedBy(err, over != nil)
	}
	return at, err
}

var errNotReached = fmt.Errorf("the node is not reached: %w", engine.ErrPeerLost)

// Match looks for blocks, as serve.Space.Match does. A block of a node that does not answer is not
// found.
func (s *Space) Match(ctx context.Context, keys []cache.Key) (cache.Match, error) {
	m, _, err := s.find(ctx, keys)
	return m, err
}

// find is Match, which also returns the node that each block is at; nil: none.
func (s *Space) find(ctx context.Context, keys []cache.Key) (m cache.Match, at []*node, err error) {
	if err := checkKeys(keys); err != nil {
		return m, nil, fmt.Errorf("match: %w", err)
	}
	l, lay := s.c.limit(ctx), s.c.layout.Load()
	defer l.free()
	owners, copies := s.owners(lay, keys)
	m.Blocks, at = make([]cache.Found, len(keys)), make([]*node, len(keys))
	var mu sync.Mutex
	var nodes sync.WaitGroup
	for nth := range copies {
		for _, p := range split(lay, keys, owners, copies, nth, all) {
			nodes.Go(func() {
				var found cache.Match
				_, err := s.ask(l, p.n, func(_ *conn, space *serve.Space) (err error) {
					found, err = space.Match(l.nodes, p.keys)
					return err
				})
				if err != nil {
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for k, f := range found.Blocks {
					to := p.at[k]
					if f.There() && (at[to] == nil || m.Blocks[to]&cache.InMemory == 0 &&
						f&cache.InMemory != 0) {
						at[to] = p.n
					}
					m.Blocks[to] |= f
				}
			})
		}
	}
	nodes.Wait()
	for m.Prefix < len(keys) && m.Blocks[m.Prefix].There() {
		m.Prefix++
	}
	return m, at, nil
}

func checkKeys(keys []cache.Key) error {
	if len(keys) > keysMax {
		return fmt.Errorf("%d keys, at most %d a call: %w", len(keys), keysMax, engine.ErrBounds)
	}
	return nil
}

// Block tells of one block, which is a chain of its own, as serve.Space.Block does: of the first of
// its nodes that has it and may be asked.
func (s *Space) Block(ctx context.Context, key cache.Key) (b cache.BlockInfo) {
	l, lay := s.c.limit(ctx), s.c.layout.Load()
	defer l.free()
	owners, _ := s.owners(lay, []cache.Key{key})
	for k, o := range owners {
		if b.Found.There() {
			break
		}
		within := l.share(len(owners) - k)
		_, _ = s.ask(within, lay.nodes[o], func(_ *conn, space *serve.Space) (err error) {
			b, _, err = space.Block(within.nodes, key)
			return err
		})
		within.free()
	}
	return b
}

// check says what is wrong with a place before a node is asked.
func (s *Space) check(keys []cache.Key, p *serve.Place, distinct bool) (*region, error) {
	if err := checkKeys(keys); err != nil {
		return nil, err
	}
	if len(p.Slots) != len(keys) {
		return nil, fmt.Errorf("%d slots for %d keys: %w", len(p.Slots), len(keys),
			engine.ErrBounds)
	}
	if distinct { // several nodes would write to one slot
		inOrder := slices.Sorted(slices.Values(p.Slots))
		if len(slices.Compact(inOrder)) < len(p.Slots) {
			return nil, fmt.Errorf("a slot is there twice: load each block to one of its own: %w",
				engine.ErrBounds)
		}
	}
	return s.c.region(p.Region)
}

// Load has the nodes write blocks to a place, as serve.Space.Load does, and returns what became of
// each. Blocks of a node that is lost, silent or late are misses (cache.Missing, cache.Late), and
// no error. When it returns without engine.ErrUnproven no node writes to the place any more.
func (s *Space) Load(ctx context.Context, keys []cache.Key, to serve.Place) ([]cache.Outcome,
	error) {
	reg, err := s.check(keys, &to, true)
	if err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	l, lay := s.c.limit(ctx), s.c.layout.Load()
	defer l.free()
	owners, copies := s.owners(lay, keys)
	outcomes := make([]cache.Outcome, len(keys))
	for k := range outcomes {
		outcomes[k] = cache.Missing
	}
	for nth := range copies {
		parts := split(lay, keys, owners, copies, nth,
			func(k int) bool { return outcomes[k] != cache.Done })
		within := l.share(copies - nth)
		err := s.moveAll(within, parts, reg, &to, (*serve.Space).Load,
			func(k int, o cache.Outcome) { outcomes[k] = o })
		within.free()
		if err != nil {
			return outcomes, fmt.Errorf("load: %w", err)
		}
	}
	return outcomes, nil
}

// storeRank is which of the outcomes of a block at several nodes is told: the first one.
var storeRank = [...]cache.Outcome{cache.Conflict, cache.Done, cache.Known, cache.Pending,
	cache.Busy, cache.NoRoom, cache.Late, cache.Failed}

// Store has the nodes of each block read it from a place, as serve.Space.Store does: as many nodes
// as the namespace has copies. A block is Done where one of them has it, and Failed, without an
// error, where none is reached. The place may be used again then, as after Load.
func (s *Space) Store(ctx context.Context, keys []cache.Key, from serve.Place) ([]cache.Outcome,
	error) {
	reg, err := s.check(keys, &from, false)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	l, lay := s.c.limit(ctx), s.c.layout.Load()
	defer l.free()
	owners, copies := s.owners(lay, keys)
	outcomes := make([]cache.Outcome, len(keys))
	for k := range outcomes {
		outcomes[k] = cache.Failed
	}
	var parts []*part
	for nth := range copies {
		parts = append(parts, split(lay, keys, owners, copies, nth, all)...)
	}
	rank := func(o cache.Outcome) int {
		if r := slices.Index(storeRank[:], o); r >= 0 {
			return r
		}
		return len(storeRank)
	}
	err = s.moveAll(l, parts, reg, &from, (*serve.Space).Store, func(k int, o cache.Outcome) {
		if rank(o) < rank(outcomes[k]) {
			outcomes[k] = o
		}
	})
	if err != nil {
		err = fmt.Errorf("store: %w", err)
	}
	return outcomes, err
}

// mover is a Load or a Store of a node.
type mover func(s *serve.Space, ctx context.Context, keys []cache.Key, p serve.Place) (
	[]cache.Outcome, error)

// moveAll has the nodes of the parts move their blocks, and tells what became of each. An error is
// one that is not of a node: a place that is no good, or a proof that is missing.
func (s *Space) moveAll(l limits, parts []*part, reg *region, place *serve.Place, move mover,
	tell func(k int, o cache.Outcome)) error {
	var mu sync.Mutex
	var errs []error
	var nodes sync.WaitGroup
	for _, p := range parts {
		nodes.Go(func() {
			outcomes, err := s.moveOne(l, p, reg, place, move)
			mu.Lock()
			defer mu.Unlock()
			for k, o := range outcomes {
				tell(p.at[k], o)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("node %s: %w", p.n.name, err))
			}
		})
	}
	nodes.Wait()
	return errors.Join(errs...)
}

// moveOne is the story of one node in a Load or a Store. It ends with the limits, and with the
// proof that the node moves nothing any more.
func (s *Space) moveOne(l limits, p *part, reg *region, place *serve.Place, move mover) (
	[]cache.Outcome, error) {
	mine := *place
	mine.Slots = make([]uint32, len(p.at))
	for k, at := range p.at {
		mine.Slots[k] = place.Slots[at]
	}
	var outcomes []cache.Outcome
	var revoked uint64
	at, err := s.ask(l, p.n, func(at *conn, space *serve.Space) error {
		revoked = at.revoked.Load()
		err := at.attach(l.nodes, reg)
		if err == nil {
			outcomes, err = move(space, l.nodes, p.keys, mine)
		}
		return err
	})
	if err == nil {
		return outcomes, nil
	}

	// What failed at the node is a miss, once nothing of it moves any more.
	miss := cache.Failed
	switch {
	case l.nodes.Err() != nil:
		miss = cache.Late
	case at == nil || errors.Is(err, engine.ErrPeerLost):
		miss = cache.Missing
	}
	if len(outcomes) != len(p.keys) {
		outcomes = slices.Repeat([]cache.Outcome{miss}, len(p.keys))
	}
	if errors.Is(err, engine.ErrUnproven) {
		proof, cancel := l.proof()
		defer cancel()
		if unproven := at.revoke(proof, reg); unproven != nil {
			return outcomes, fmt.Errorf("%w: %w: detach the region before its memory is used "+
				"again: %w", err, unproven, engine.ErrUnproven)
		}
		return outcomes, nil
	}
	if errors.Is(err, engine.ErrBounds) && !at.hasRevoked(revoked) { // the place, or the keys
		return outcomes, err
	}
	return outcomes, nil
}

// Remove forgets blocks at all nodes, as Namespace.Remove does: also copies of when there were
// other nodes. An error names the nodes that may still have them.
func (s *Space) Remove(ctx context.Context, keys []cache.Key) error {
	if err := checkKeys(keys); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	l, lay := s.c.limit(ctx), s.c.layout.Load()
	defer l.free()
	errs := make([]error, len(lay.nodes))
	var nodes sync.WaitGroup
	for k, n := range lay.nodes {
		nodes.Go(func() {
			_, err := s.ask(l, n, func(_ *conn, space *serve.Space) error {
				return space.Remove(l.nodes, keys)
			})
			if err != nil {
				errs[k] = fmt.Errorf("node %s may still have the blocks: %w", n.name, err)
			}
		})
	}
	nodes.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return nil
}

// Hint has the nodes that have the blocks heed a hint, as serve.Space.Hint does: each node counts
// its own. A node that is not reached has none.
func (s *Space) Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (cache.HintResult,
	error) {
	if err := checkKeys(keys); err != nil {
		return cache.HintResult{}, fmt.Errorf("hint: %w", err)
	}
	l, lay := s.c.limit(ctx), s.c.layout.Load()
	defer l.free()
	owners, copies := s.owners(lay, keys)
	var mu sync.Mutex
	var sum cache.HintResult
	var refused error
	var nodes sync.WaitGroup
	for nth := range copies {
		for _, p := range split(lay, keys, owners, copies, nth, all) {
			nodes.Go(func() {
				var r cache.HintResult
				_, err := s.ask(l, p.n, func(_ *conn, space *serve.Space) (err error) {
					r, err = space.Hint(l.nodes, p.keys, h)
					return err
				})
				if r == (cache.HintResult{}) {
					r.Missing = len(p.keys)
				}
				mu.Lock()
				defer mu.Unlock()
				sum.Applied += r.Applied
				sum.Missing += r.Missing
				sum.Refused += r.Refused
				if r.Refused > 0 {
					refused = cmp.Or(refused, err)
				}
			})
		}
	}
	nodes.Wait()
	return sum, refused
}
