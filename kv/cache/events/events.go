// SPDX-License-Identifier: Apache-2.0

// Package events publishes what a cache has to routers, as vLLM publishes what its prefix cache
// has: batches of BlockStored, BlockRemoved and AllBlocksCleared in MessagePack, over a PUB socket
// of ZeroMQ, and a ROUTER socket that sends again what a subscriber has missed. docs/events.md is
// for its users. Its files:
//
//	events.go  what the cache has, the batches that tell of changes, the log of them
//	batch.go   a batch in MessagePack
//	zmtp.go    the two sockets
//
// The reader of the cache's events (Run) keeps a picture of what it has told, and tells changes of
// it alone: a listing of the cache, which it makes at the start and where it has missed events,
// tells nothing twice. Each peer reads the log at its own pace. One that has fallen behind the log
// misses batches, sees a gap in their numbers, and asks for a replay. A replay from before the log
// is one batch with AllBlocksCleared and the whole picture, under the number of the last batch.
package events

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// Config is what a Publisher needs.
type Config struct {
	Cache   *cache.Cache
	Publish net.Listener // of the PUB socket
	Replay  net.Listener // of the ROUTER socket; nil: there is none
	Topic   string
	Buffer  uint64 // bytes of batches that a replay can have one by one; default 64 MiB
}

// Publisher publishes what a cache has.
type Publisher struct {
	cfg  Config
	pass uint32 // counts listings
	page []cache.BlockInfo
	room chan struct{} // for each replay that may run

	mu      sync.Mutex // guards what follows; who holds it waits for no peer
	held    map[block]place
	spaces  map[[16]byte]int // how many blocks of a namespace are held
	changes []change         // of the batch that is being made
	base    uint64           // number of the first batch of this process
	first   uint64           // and of the first one in the log
	log     [][]byte         // never empty once Run has begun
	size    uint64           // bytes in the log
	grown   chan struct{}    // closed by the next batch
}

// block is one of a namespace, whose digest it has.
type block struct {
	space [16]byte
	key   cache.Key
}

type medium uint8

// The media: a block is told under the fastest one that has it.
const (
	nowhere medium = iota
	cpu
	storage
)

// place is where a block was when the listing of that pass, or an event since, told of it.
type place struct {
	medium medium
	pass   uint32
}

const (
	batchMax      = 1 << 10 // events of the cache in one batch
	readMax       = 16      // batches that a peer takes from the log at a time
	batchExtra    = 64      // bytes that one takes in the log beside its own
	bufferDefault = 64 << 20
	replaysMax    = 4
	replayTime    = 10 * time.Second // that a replay may have its place, and what its bytes take
	replayRate    = 1 << 20          // bytes a second
)

// New makes a Publisher. Run closes its listeners.
func New(cfg Config) (*Publisher, error) {
	if cfg.Cache == nil || cfg.Publish == nil || len(cfg.Topic) > frameMax {
		return nil, fmt.Errorf("events want a cache, a listener, and a topic of at most %d "+
			"bytes: %w", frameMax, engine.ErrBounds)
	}
	cfg.Buffer = cmp.Or(cfg.Buffer, bufferDefault)
	// Numbers begin with the time, so that those of the next process are higher: a subscriber sees
	// a gap, asks for what it has missed, and gets AllBlocksCleared first.
	base := uint64(time.Now().UnixMicro())
	return &Publisher{cfg: cfg, page: make([]cache.BlockInfo, batchMax),
		room: make(chan struct{}, replaysMax), held: map[block]place{}, spaces: map[[16]byte]int{},
		base: base, first: base, grown: make(chan struct{})}, nil
}

// Run publishes until ctx or the cache ends. It returns an error only where a listener fails, or
// where the cache has no room for one more reader of its events: ErrFull.
func (p *Publisher) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	events := p.cfg.Cache.Events(ctx)
	if err := refused(ctx, events); err != nil {
		cancel(nil)
		_ = p.cfg.Publish.Close()
		if p.cfg.Replay != nil {
			_ = p.cfg.Replay.Close()
		}
		return err
	}
	p.mu.Lock()
	p.append(appendBatch(nil, time.Now(), true, nil))
	p.mu.Unlock()
	var sockets sync.WaitGroup
	sockets.Go(func() { cancel(serve(ctx, p.cfg.Publish, "PUB", p.feed)) })
	if p.cfg.Replay != nil {
		sockets.Go(func() { cancel(serve(ctx, p.cfg.Replay, "ROUTER", p.replays)) })
	}
	defer sockets.Wait()
	defer cancel(nil)

	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for lost := p.list(events); ; {
		select {
		case e, open := <-events:
			if !open {
				if err := context.Cause(ctx); err != nil && err != ctx.Err() {
					return err
				}
				return nil
			}
			lost = p.follow(e, events) || lost
		case <-tick.C:
			if lost {
				lost = p.list(events)
			}
		}
	}
}

// refused is an error where the cache gives no events from the beginning. An event that waits
// already is left out: the first listing has what it says.
func refused(ctx context.Context, events <-chan cache.Event) error {
	select {
	case _, open := <-events:
		if !open && ctx.Err() == nil {
			return fmt.Errorf("the cache has as many readers of its events as it may, or is "+
				"closed: end one of them: %w", engine.ErrFull)
		}
	default:
	}
	return nil
}

// follow tells of an event and of those that wait behind it. It reports whether the cache had
// events for which there was no room.
func (p *Publisher) follow(e cache.Event, events <-chan cache.Event) (lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n := 1; ; n++ {
		lost = lost || e.Lost > 0
		switch e.Kind {
		case cache.Stored:
			p.set(block{e.Digest, e.Key}, cpu)
		case cache.Demoted:
			p.set(block{e.Digest, e.Key}, storage)
		case cache.Removed:
			p.set(block{e.Digest, e.Key}, nowhere)
		}
		if n == batchMax || len(events) == 0 {
			p.publish()
			return lost
		}
		var open bool
		if e, open = <-events; !open {
			p.publish()
			return lost
		}
	}
}

// list makes the picture that of the cache, with the events that come meanwhile. A page tells what
// was so when the cache looked, and events from before that wait in the channel still: they end
// with what the page says, as the last one of a block does.
func (p *Publisher) list(events <-chan cache.Event) (lost bool) {
	p.pass++
	for _, s := range p.cfg.Cache.Spaces() {
		n := p.cfg.Cache.Space(s.Digest)
		if n == nil {
			continue // the cache is closed
		}
		for count, next := n.Blocks(0, p.page); ; count, next = n.Blocks(next, p.page) {
			p.mu.Lock()
			for _, b := range p.page[:count] {
				m := nowhere
				switch {
				case b.Found&cache.InMemory != 0:
					m = cpu
				case b.Found&cache.OnDisk != 0:
					m = storage
				}
				p.set(block{s.Digest, b.Key}, m)
			}
			p.publish()
			p.mu.Unlock()
			for len(events) > 0 {
				e, open := <-events
				if !open {
					break
				}
				lost = p.follow(e, events) || lost
			}
			if next == 0 {
				break
			}
		}
		n.Close()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for b, at := range p.held {
		if at.pass != p.pass {
			p.set(b, nowhere)
		}
		if len(p.changes) == batchMax {
			p.publish()
		}
	}
	p.publish()
	return lost
}

// set notes where a block is, and what that changes for routers, which know no namespaces: a key is
// stored while one namespace has it.
func (p *Publisher) set(b block, m medium) {
	was := p.held[b].medium
	if m == nowhere {
		delete(p.held, b)
	} else {
		p.held[b] = place{m, p.pass}
	}
	if was == m {
		return
	}
	if was == nowhere {
		p.spaces[b.space]++
	} else if m == nowhere {
		if p.spaces[b.space]--; p.spaces[b.space] == 0 {
			delete(p.spaces, b.space)
		}
	}
	if m != nowhere && !p.elsewhere(b, m) {
		p.changes = append(p.changes, change{true, m, b.key})
	}
	if was != nowhere && !p.elsewhere(b, was) {
		p.changes = append(p.changes, change{false, was, b.key})
	}
}

// elsewhere reports whether another namespace has the key there.
func (p *Publisher) elsewhere(b block, m medium) bool {
	for space := range p.spaces {
		if space != b.space && p.held[block{space, b.key}].medium == m {
			return true
		}
	}
	return false
}

// publish makes a batch of the changes, where there are some.
func (p *Publisher) publish() {
	if len(p.changes) > 0 {
		p.append(appendBatch(nil, time.Now(), false, p.changes))
		p.changes = p.changes[:0]
	}
}

// append adds a batch to the log, and makes room for it.
func (p *Publisher) append(batch []byte) {
	p.log = append(p.log, batch)
	p.size += uint64(len(batch) + batchExtra)
	for len(p.log) > 1 && p.size > p.cfg.Buffer {
		p.size -= uint64(len(p.log[0]) + batchExtra)
		p.log[0] = nil
		p.log = p.log[1:]
		p.first++
	}
	close(p.grown)
	p.grown = make(chan struct{})
}

// from returns batches of the log from a number on, or from its first one, and the number of the
// first that it returns. Where there is none, grown is closed once there is.
func (p *Publisher) from(number uint64) (batches [][]byte, first uint64, grown <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first = max(number, p.first)
	if first < p.end() {
		past := p.log[first-p.first:]
		return slices.Clone(past[:min(len(past), readMax)]), first, nil
	}
	return nil, first, p.grown
}

// end is the number of the next batch.
func (p *Publisher) end() uint64 { return p.first + uint64(len(p.log)) }

// whole returns a batch that takes the place of all up to the last one, whose number it has.
func (p *Publisher) whole() (batches [][]byte, number uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := make([]change, 0, len(p.held))
	told := map[change]bool{} // where namespaces may share keys
	for _, m := range []medium{cpu, storage} {
		for b, at := range p.held {
			c := change{true, m, b.key}
			if at.medium != m || told[c] {
				continue
			}
			if len(p.spaces) > 1 {
				told[c] = true
			}
			list = append(list, c)
		}
	}
	return [][]byte{appendBatch(nil, time.Now(), true, list)}, p.end() - 1
}

// feed sends a subscriber the batches from now on, once it has subscribed to their topic.
func (p *Publisher) feed(ctx context.Context, c *peer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() { cancel(c.readSubscriptions()) }()
	late := time.NewTimer(helloTime)
	defer late.Stop()
	for !c.subscribed(p.cfg.Topic) {
		select {
		case <-c.wants:
		case <-late.C:
			return fmt.Errorf("no subscription: %w", engine.ErrTimeout)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	// A batch without events comes first: one who was there before sees what it has missed by its
	// number, and waits for no change.
	p.mu.Lock()
	next := p.end()
	p.append(appendBatch(nil, time.Now(), false, nil))
	p.mu.Unlock()
	for {
		batches, first, grown := p.from(next)
		if grown != nil {
			select {
			case <-grown:
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		for n, batch := range batches {
			if !c.subscribed(p.cfg.Topic) {
				continue
			}
			err := c.send([]byte(p.cfg.Topic), numbered(first+uint64(n)), batch)
			if err != nil {
				return err
			}
		}
		next = first + uint64(len(batches))
	}
}

// replays answers the requests of a peer. Each is an empty frame and a number.
func (p *Publisher) replays(ctx context.Context, c *peer) error {
	for {
		_ = c.SetReadDeadline(time.Now().Add(idleTime))
		frames, err := c.receive()
		if err != nil {
			return err
		}
		if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
			continue
		}
		select {
		case p.room <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		c.due = time.Now().Add(replayTime)
		err = p.replay(c, be.Uint64(frames[1]))
		c.due = time.Time{}
		<-p.room
		if err != nil {
			return err
		}
	}
}

// replay sends the batches from a number to the last one that there is now, and a message without
// bytes as the end.
func (p *Publisher) replay(c *peer, next uint64) error {
	p.mu.Lock()
	end := p.end()
	p.mu.Unlock()
	if next > end {
		next = 0 // it follows a process before this one, whose clock was ahead
	}
	for next < end {
		batches, first, _ := p.from(next)
		if first > max(next, p.base) { // the log has dropped the next one
			batches, first = p.whole()
		}
		for n, batch := range batches {
			c.due = c.due.Add(time.Duration(len(batch)) * time.Second / replayRate)
			err := c.send(nil, []byte(p.cfg.Topic), numbered(first+uint64(n)), batch)
			if err != nil {
				return err
			}
		}
		next = first + uint64(len(batches))
	}
	return c.send(nil, nil, numbered(endOfReplay), nil)
}
