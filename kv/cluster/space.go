// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
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
	c         *Cluster
	name      spaceName
	before    int       // blocks of the chain that are before those of a call
	head      cache.Key // first of the segment of the last of these
	unchained bool      // each key is a chain of its own
	first     string    // node that is asked first; "": see way.choose
	closed    *atomic.Bool
	known     *known
}

// Behind returns the namespace for calls about blocks that come behind others of their chain.
func (s *Space) Behind(chain []cache.Key) *Space {
	if len(chain) == 0 || s.unchained {
		return s
	}
	b := new(*s)
	b.before += len(chain)
	if _, first := placement.SegmentOf(b.before - 1); first >= s.before {
		b.head = chain[first-s.before]
	}
	return b
}

// Unchained returns the namespace for calls whose keys are in no order: each lies where its own
// hash says. All processes that use a namespace must agree on it, since they look elsewhere
// otherwise. A call asks more nodes then.
func (s *Space) Unchained() *Space {
	u := new(*s)
	u.unchained = true
	return u
}

// From returns the namespace for calls that ask a node first, such as the source of a router's
// hint: where that does not have the blocks, or is not reached, it is as without.
func (s *Space) From(node string) *Space {
	f := new(*s)
	f.first = node
	return f
}

// Close ends its use, and that of what the methods above have made of it; the blocks stay. Wait for
// its operations before. It waits at most a second for a node.
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
	w := s.way(l, keys)
	defer w.free()
	for k := range w.runs {
		r := &w.runs[k]
		copies = r.copies // of all runs
		for range r.to - r.from {
			owners = append(owners, w.found[r.found[0]:][:copies]...)
		}
	}
	return owners, copies
}

// part is what one node is asked for in a call.
type part struct {
	n        *node
	at       []int // places in the keys of the call
	keys     []cache.Key
	segments []serve.Segment // of the keys
	tries    int             // the most of their runs
}

// add asks for one more key, of a run.
func (p *part) add(k int, key cache.Key, r *stretch) {
	last := len(p.at) - 1
	if last < 0 || p.at[last] != k-1 || k == r.from {
		p.segments = append(p.segments, serve.Segment{Head: r.head,
			First: uint32(r.first + k - r.from)})
		p.tries = max(p.tries, r.tries)
	}
	p.segments[len(p.segments)-1].Blocks++
	p.at, p.keys = append(p.at, k), append(p.keys, key)
}

// takeOutcomes puts what became of the keys where it belongs, and returns the places of those that
// are to be asked of another node.
func (p *part) takeOutcomes(outcomes, got []cache.Outcome) (lacks []int) {
	for k, o := range got {
		if outcomes[p.at[k]] = o; o != cache.Done {
			lacks = append(lacks, p.at[k])
		}
	}
	return lacks
}

// upTo lists the numbers of n keys.
func upTo(n int) []int {
	list := make([]int, n)
	for k := range list {
		list[k] = k
	}
	return list
}

// owned makes the parts of all keys, by the nodes that own them.
func (w *way) owned() (parts []*part) {
	for nth := range directory.CopiesMax {
		of, _ := w.split(upTo(len(w.keys)), func(r *stretch) int {
			if nth < r.copies {
				return w.found[r.found[0]+nth]
			}
			return -1
		})
		parts = append(parts, of...)
	}
	return parts
}

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
	n.running.Add(1)
	defer n.running.Add(-1)
	space, err := at.space(l.nodes, s.name)
	if err == nil {
		err = do(at, space)
	}
	switch over := l.nodes.Err(); {
	case err == nil:
	case hedged(l):
		n.doubts.Add(1)
		go at.suspect()
	case !errors.Is(over, context.Canceled): // by the caller
		at.failedBy(err, over != nil)
	}
	return at, err
}

// hedged reports whether a request has ended since its node was late, and another one may be asked.
func hedged(l limits) bool { return errors.Is(context.Cause(l.nodes), errLate) }

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
	l, w := s.c.limit(ctx), s.way(s.c.layout.Load(), keys)
	defer l.free()
	defer w.free()
	w.moves = func([]cache.Key) [2]uint64 { return [2]uint64{} }
	m.Blocks, at = make([]cache.Found, len(keys)), make([]*node, len(keys))
	var mu sync.Mutex
	_, err = s.inTurn(l, w, upTo(len(keys)), 0, func(l limits, p *part) (lacks []int, err error) {
		var found cache.Match
		_, err = s.ask(l, p.n, func(_ *conn, space *serve.Space) (err error) {
			began, busy := time.Now(), p.n.busy(1)
			found, err = space.Match(l.nodes, p.keys)
			if err == nil || hedged(l) {
				p.n.learn([2]uint64{}, time.Since(began), busy)
			}
			return err
		})
		if errors.Is(err, os.ErrPermission) { // by the lists of the namespace
			return nil, fmt.Errorf("match: node %s: %w", p.n.name, err)
		}
		if err != nil {
			return p.at, nil
		}
		mu.Lock()
		defer mu.Unlock()
		for k, f := range found.Blocks {
			to := p.at[k]
			s.known.note(&p.keys[k], f)
			if m.Blocks[to] |= f; f.There() {
				at[to] = p.n
			} else {
				lacks = append(lacks, to)
			}
		}
		return lacks, nil
	})
	for m.Prefix < len(keys) && m.Blocks[m.Prefix].There() {
		m.Prefix++
	}
	return m, at, err
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
	size := sizeOf(&to)
	s.known.size.Store(size)
	l, w := s.c.limit(ctx), s.way(s.c.layout.Load(), keys)
	defer l.free()
	defer w.free()
	w.moves = func(keys []cache.Key) [2]uint64 { return s.known.bytes(keys, size) }
	slowest, bytes := w.slowest()
	began := time.Now()
	outcomes := slices.Repeat([]cache.Outcome{cache.Missing}, len(keys))
	var mu sync.Mutex
	lacks, err := s.inTurn(l, w, upTo(len(keys)), 0, func(l limits, p *part) ([]int, error) {
		got, err := s.moveOne(l, p, reg, &to, func(space *serve.Space, ctx context.Context,
			keys []cache.Key, mine serve.Place) ([]cache.Outcome, error) {
			began, busy := time.Now(), p.n.busy(1)
			got, err := space.Load(ctx, keys, mine)
			s.loaded(p, got, size, time.Since(began), busy, err == nil, hedged(l))
			return got, err
		})
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			err = fmt.Errorf("node %s: %w", p.n.name, err)
		}
		return p.takeOutcomes(outcomes, got), err
	})
	if err != nil {
		return outcomes, fmt.Errorf("load: %w", err)
	}
	if slowest > 0 && len(lacks) == 0 {
		more := float64(time.Since(began)) / float64(slowest)
		s.c.wholes.add(bytes, time.Duration(min(more, 100)*float64(even)))
	}
	return outcomes, nil
}

// loaded has the estimates count a Load of a node that has ended, or was late.
func (s *Space) loaded(p *part, got []cache.Outcome, size uint64, took time.Duration, busy float64,
	ended, late bool) {
	moved := p.keys
	if ended {
		moved = nil
		for k, o := range got {
			if o == cache.Done {
				moved = append(moved, p.keys[k])
			}
		}
	}
	if ended || late {
		p.n.learn(s.known.bytes(moved, size), took, busy)
	}
	for k := range moved {
		if ended {
			s.known.note(&moved[k], cache.InMemory) // as it is now
		}
	}
}

// sizeOf returns how large the blocks of a place are.
func sizeOf(p *serve.Place) uint64 {
	size := p.Run
	for _, a := range p.Loops {
		size *= uint64(a.N)
	}
	return size
}

// Prefetch has the nodes bring blocks into their memory, as serve.Space.Prefetch does: each block
// one node. Those of a node that does not answer are told as of Load.
func (s *Space) Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error) {
	if err := checkKeys(keys); err != nil {
		return nil, fmt.Errorf("prefetch: %w", err)
	}
	l, w := s.c.limit(ctx), s.way(s.c.layout.Load(), keys)
	defer l.free()
	defer w.free()
	outcomes := slices.Repeat([]cache.Outcome{cache.Missing}, len(keys))
	var mu sync.Mutex
	_, err := s.inTurn(l, w, upTo(len(keys)), 0, func(l limits, p *part) ([]int, error) {
		var got []cache.Outcome
		_, err := s.ask(l, p.n, func(_ *conn, space *serve.Space) (err error) {
			got, err = space.Prefetch(l.nodes, p.keys)
			return err
		})
		if len(got) != len(p.keys) {
			got = slices.Repeat([]cache.Outcome{missOf(l, err)}, len(p.keys))
		}
		if errors.Is(err, os.ErrPermission) {
			err = fmt.Errorf("prefetch: node %s: %w", p.n.name, err)
		} else {
			err = nil // of the node
		}
		mu.Lock()
		defer mu.Unlock()
		return p.takeOutcomes(outcomes, got), err
	})
	return outcomes, err
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
	s.known.size.Store(sizeOf(&from))
	l, w := s.c.limit(ctx), s.way(s.c.layout.Load(), keys)
	defer l.free()
	defer w.free()
	outcomes := slices.Repeat([]cache.Outcome{cache.Failed}, len(keys))
	rank := func(o cache.Outcome) int {
		if r := slices.Index(storeRank[:], o); r >= 0 {
			return r
		}
		return len(storeRank)
	}
	err = s.moveAll(l, w.owned(), reg, &from, (*serve.Space).Store, func(k int, o cache.Outcome) {
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
	mine.Segments = p.segments
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
	if len(outcomes) != len(p.keys) {
		outcomes = slices.Repeat([]cache.Outcome{missOf(l, err)}, len(p.keys))
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
	if errors.Is(err, os.ErrPermission) || // by the lists of the namespace
		errors.Is(err, engine.ErrBounds) && !at.hasRevoked(revoked) { // the place, or the keys
		return outcomes, err
	}
	return outcomes, nil
}

// missOf is what became of blocks that a node was asked for in vain.
func missOf(l limits, err error) cache.Outcome {
	switch {
	case l.nodes.Err() != nil:
		return cache.Late
	case errors.Is(err, engine.ErrPeerLost): // also where it is not reached
		return cache.Missing
	}
	return cache.Failed
}

// Replace is not supported: it would have to reach each copy that a node may be asked for, and two
// processes may have different lists of the nodes. Remove the block, and store it by another key.
func (s *Space) Replace(context.Context, []cache.Key, serve.Place) ([]cache.Outcome, error) {
	return nil, fmt.Errorf("replace: a cluster cannot promise that no copy of the old block is "+
		"read: store the new one by another key: %w", engine.ErrNotSupported)
}

// Blocks is not supported: each node lists its own, by serve.Space.Blocks.
func (s *Space) Blocks(context.Context, uint32) ([]cache.BlockInfo, uint32, error) {
	return nil, 0, fmt.Errorf("the blocks of a cluster are listed by no one: ask each node: %w",
		engine.ErrNotSupported)
}

// Remove forgets blocks at all nodes, as Namespace.Remove does: also copies of when there were
// other nodes. An error names the nodes that may still have them.
func (s *Space) Remove(ctx context.Context, keys []cache.Key) error {
	if err := checkKeys(keys); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	l := s.c.limit(ctx)
	defer l.free()
	err := s.each(l, "may still have the blocks", func(space *serve.Space) error {
		return space.Remove(l.nodes, keys)
	})
	if err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return nil
}

// each asks all nodes at once. An error says of each that has failed what that means.
func (s *Space) each(l limits, failed string, do func(space *serve.Space) error) error {
	list := s.c.layout.Load().nodes
	errs := make([]error, len(list))
	var nodes sync.WaitGroup
	for k, n := range list {
		nodes.Go(func() {
			_, err := s.ask(l, n, func(_ *conn, space *serve.Space) error { return do(space) })
			if err != nil {
				errs[k] = fmt.Errorf("node %s %s: %w", n.name, failed, err)
			}
		})
	}
	nodes.Wait()
	return errors.Join(errs...)
}

// Hint has the nodes that have the blocks heed a hint, as serve.Space.Hint does: each node counts
// its own. A node that is not reached has none.
func (s *Space) Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (cache.HintResult,
	error) {
	if err := checkKeys(keys); err != nil {
		return cache.HintResult{}, fmt.Errorf("hint: %w", err)
	}
	l, w := s.c.limit(ctx), s.way(s.c.layout.Load(), keys)
	defer l.free()
	defer w.free()
	var mu sync.Mutex
	var sum cache.HintResult
	var refused error
	var nodes sync.WaitGroup
	for _, p := range w.owned() {
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
	nodes.Wait()
	return sum, refused
}

// noteFetch keeps which node has blocks, as a router says.
func (s *Space) noteFetch(f *cache.Fetch) {
	address, lay := strings.Replace(f.Source, "://", ":", 1), s.c.layout.Load()
	k := slices.IndexFunc(lay.Nodes, func(n directory.Node) bool {
		return n.Name == f.Source || slices.Contains(n.Addresses, address)
	})
	if k < 0 {
		return
	}
	for _, key := range f.Keys {
		s.known.noteHolder(key, lay.nodes[k].id)
	}
}

// HintEnvelope has all nodes heed an envelope of hints, as serve.Space.HintEnvelope does, since its
// hashes are in no order, and sums what became of each action: a block of two copies is applied
// twice, so that fewer may be Missing than are. The source of a kv.fetch is taken as a node that
// has the blocks. An error is one of all nodes.
func (s *Space) HintEnvelope(ctx context.Context, data []byte) ([]cache.ActionOutcome, error) {
	for _, f := range cache.Fetches(data) {
		s.noteFetch(&f)
	}
	l := s.c.limit(ctx)
	defer l.free()
	var mu sync.Mutex
	var sum []cache.ActionOutcome
	err := s.each(l, "has heeded no hint", func(space *serve.Space) error {
		got, err := space.HintEnvelope(l.nodes, data)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil:
			return err
		case sum == nil:
			sum = got
		case len(got) != len(sum):
			return fmt.Errorf("%d outcomes, others have %d: %w", len(got), len(sum),
				engine.ErrCorrupt)
		default:
			for k := range got {
				to, of := &sum[k], &got[k]
				if of.Status == cache.ActionApplied { // else Reason is of the other status
					to.Status = of.Status
				}
				to.Reason = cmp.Or(to.Reason, of.Reason)
				to.Applied += of.Applied
				to.Refused += of.Refused
				to.Missing = max(0, to.Missing-of.Applied-of.Refused) // of those before
			}
		}
		return nil
	})
	if sum == nil {
		return nil, fmt.Errorf("hints: %w", cmp.Or(err, errNotReached))
	}
	return sum, nil
}
