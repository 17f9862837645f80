// SPDX-License-Identifier: Apache-2.0

package member

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/cluster/placement"
)

// queue has the segments that are still to be sent, which come at a rate.
type queue struct {
	wake chan struct{} // has room for one

	mu    sync.Mutex // guards what follows
	plans []*placement.Handover
	left  int // segments, also the one that is sent now
	epoch int // of replace
}

var born = time.Now()

// since is the clock of the queues.
func since() time.Duration { return time.Since(born) }

// add has further segments be sent, behind all others.
func (q *queue) add(h *placement.Handover, n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.plans, q.left = append(q.plans, h), q.left+n
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// replace has these segments be sent, and no others.
func (q *queue) replace(h *placement.Handover, n int) {
	q.mu.Lock()
	q.plans, q.left, q.epoch = nil, 0, q.epoch+1
	q.mu.Unlock()
	q.add(h, n)
}

// next returns the segment that is to be sent now or, if wait is greater than 0, after that. ended
// is to be called once it is sent.
func (q *queue) next() (move placement.Move, ended func(), wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.plans) > 0 {
		move, wait, ok := q.plans[0].Next(since())
		if ok {
			epoch := q.epoch
			return move, func() {
				q.mu.Lock()
				defer q.mu.Unlock()
				if q.epoch == epoch {
					q.left--
				}
			}, wait
		}
		q.plans = q.plans[1:]
	}
	return move, nil, idle
}

// idle is how long a sender waits to be woken.
const idle = time.Hour

// pending is how many segments are still to be sent.
func (q *queue) pending() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.left
}

// sender is a goroutine that sends what is in a queue, some blocks at a time, through a buffer.
type sender struct {
	m      *Member
	name   string // of the buffer
	e      *engine.Engine
	memory *engine.Memory
	region *engine.Region // of that; nil: there is none yet
	unsure bool           // a call has ended without the proof that nothing of it moves any more
	spaces map[[16]byte]*cluster.Space
	lost   map[string]int // since which tick a node has not done what it was asked in sendLimit
}

const (
	bufferBytes = 8 << 20 // at least; as long as a block, where that is longer
	callMax     = 1 << 11 // blocks at a time
	spacesMax   = 16      // that a sender has open
	sendLimit   = 10 * time.Second
	dialPause   = 20 * time.Millisecond
)

func (s *sender) run(ctx context.Context, q *queue) {
	for ctx.Err() == nil {
		move, ended, wait := q.next()
		if wait > 0 {
			if wait == idle {
				s.closeSpaces()
			}
			select {
			case <-ctx.Done():
			case <-q.wake:
			case <-time.After(wait):
			}
			continue
		}
		err := s.send(ctx, &move)
		if err != nil && ctx.Err() == nil {
			s.m.failed.Add(1)
		}
		s.m.ask(ctx, func() {
			ended()
			if q == &s.m.hot {
				s.m.arrived(move.Segment, err == nil)
				return
			}
			if now := s.m.segments[move.Segment]; err != nil {
				s.m.again = true
				if now != nil {
					now.grown = true
				}
			}
			if q.pending() == 0 {
				s.m.survey() // what is sent may go
				s.m.publish()
			}
		})
	}
}

// ask has the goroutine of know call a function, unless ctx ends before.
func (m *Member) ask(ctx context.Context, f func()) {
	done := make(chan struct{})
	select {
	case m.do <- func() { f(); close(done) }:
		<-done
	case <-ctx.Done():
	}
}

// send sends a segment as it is now. A copy that does not arrive is read from where it is. A node
// that has let sendLimit pass is sent nothing until the next tick: others would wait for it.
func (s *sender) send(ctx context.Context, move *placement.Move) error {
	var node string
	var tick int
	var of segment
	s.m.ask(ctx, func() {
		node, tick = s.m.names[move.To], s.m.ticks
		if now := s.m.segments[move.Segment]; now != nil {
			now.grown, of.first = false, now.first
			for _, p := range now.parts {
				of.parts = append(of.parts, &part{p.of, p.bytes, slices.Clone(p.blocks)})
			}
		}
	})
	if node == "" { // it has left
		return nil
	}
	if since, is := s.lost[node]; is && since == tick {
		return fmt.Errorf("node %s was late: %w", node, engine.ErrPeerLost)
	}
	delete(s.lost, node)
	for _, p := range of.parts {
		slices.SortFunc(p.blocks, func(a, b block) int { return cmp.Compare(a.at, b.at) })
		each := int(max(1, min(bufferBytes/p.bytes, callMax)))
		for blocks := range slices.Chunk(p.blocks, each) {
			soon, cancel := context.WithTimeout(ctx, sendLimit)
			err := s.sendBlocks(soon, node, move.Segment, of.first, &part{p.of, p.bytes, blocks})
			if soon.Err() != nil && ctx.Err() == nil {
				s.lost[node] = tick
			}
			cancel()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// sendBlocks reads blocks into the buffer, and has the node read them from there.
func (s *sender) sendBlocks(ctx context.Context, node string, head placement.Key, first int,
	p *part) error {
	space, err := s.space(ctx, p.of)
	if err == nil {
		err = s.grow(ctx, max(bufferBytes, p.bytes))
	}
	if err != nil {
		return err
	}
	found, err := space.MatchAt(ctx, node, p.keys())
	for errors.Is(err, engine.ErrPeerLost) && ctx.Err() == nil { // it has just joined
		select {
		case <-time.After(dialPause):
			found, err = space.MatchAt(ctx, node, p.keys())
		case <-ctx.Done():
		}
	}
	if err != nil {
		return err
	}
	keys, place := s.place(p, head, first, func(k int) bool {
		return found.Blocks[k] == cache.Nowhere
	})
	if len(keys) == 0 {
		return nil
	}
	outcomes, err := space.LoadFrom(ctx, s.m.cfg.Name, keys, place)
	if err != nil {
		s.unsure = errors.Is(err, engine.ErrUnproven)
		return err
	}
	testpoint.At("member: read")
	read := map[cache.Key]bool{}
	var unread error
	for k, o := range outcomes {
		switch o {
		case cache.Done:
			read[keys[k]] = true
		case cache.Missing, cache.Damaged, cache.Unlike: // it has gone meanwhile
		default:
			unread = fmt.Errorf("a block to be sent is %v: %w", o, engine.ErrBusy)
		}
	}
	if len(read) == 0 {
		return unread
	}
	keys, place = s.place(p, head, first, func(k int) bool { return read[p.blocks[k].key] })
	if outcomes, err = space.StoreAt(ctx, node, keys, place); err != nil {
		s.unsure = errors.Is(err, engine.ErrUnproven)
		return err
	}
	for _, o := range outcomes {
		switch o {
		case cache.Done:
			s.m.sent.Add(1)
			s.m.bytes.Add(p.bytes)
		case cache.Known, cache.Pending:
		default:
			err = fmt.Errorf("node %s: a copy is %v: %w", node, o, engine.ErrBusy)
		}
	}
	if err = cmp.Or(err, unread); err == nil && slices.Contains(outcomes, cache.Pending) {
		select { // another Store brings some, and may fail yet
		case <-time.After(dialPause):
			return s.sendBlocks(ctx, node, head, first, p)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

// place is where some of the blocks of a part lie in the buffer.
func (s *sender) place(p *part, head placement.Key, first int, which func(k int) bool) (
	keys []cache.Key, at serve.Place) {
	at = serve.Place{Region: s.region, Stride: p.bytes, Run: p.bytes, Copy: true}
	for k, b := range p.blocks {
		if which(k) {
			keys, at.Slots = append(keys, b.key), append(at.Slots, uint32(k))
			at.Segments = append(at.Segments, serve.Segment{Head: head,
				First: uint32(first + int(b.at)), Blocks: 1})
		}
	}
	return keys, at
}

// space opens a namespace, or returns the one that is open.
func (s *sender) space(ctx context.Context, of *serve.SpaceName) (*cluster.Space, error) {
	if open := s.spaces[of.Digest]; open != nil {
		return open, nil
	}
	if len(s.spaces) >= spacesMax {
		s.closeSpaces()
	}
	open, err := s.m.cluster.Namespace(ctx, of.Name, of.Geometry)
	if err != nil {
		return nil, err
	}
	s.spaces[of.Digest] = open
	return open, nil
}

func (s *sender) closeSpaces() {
	for _, open := range s.spaces {
		_ = open.Close()
	}
	clear(s.spaces)
}

// grow has the buffer be so long. One that a node may still reach stays as it is.
func (s *sender) grow(ctx context.Context, n uint64) error {
	if s.region != nil {
		if s.region.Size() >= n && !s.unsure {
			return s.m.cluster.Attach(ctx, s.region)
		}
		if err := s.m.cluster.Detach(ctx, s.region); err != nil {
			return err
		}
		if s.unsure = false; s.region.Size() >= n {
			return s.m.cluster.Attach(ctx, s.region)
		}
		if err := errors.Join(s.region.Close(), s.memory.Close()); err != nil {
			return err
		}
		s.region = nil
	}
	memory, err := s.e.Alloc(n, engine.AllocOptions{})
	if err != nil {
		return err
	}
	region, err := s.e.RegisterPrivate(s.name, memory.Segment())
	if err != nil {
		return errors.Join(err, memory.Close())
	}
	s.memory, s.region = memory, region
	return s.m.cluster.Attach(ctx, region)
}
