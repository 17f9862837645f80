// SPDX-License-Identifier: Apache-2.0

// Package pool keeps the books of a bounded pool of KV blocks: which are free,
// which are in use, and which hold a prefix that the next request may share.
//
// It deals in block numbers; where a block lies is package layout's to say, and
// which peers may write to it the engine knows. A block is in one of three states:
//
//   - free: it holds nothing worth keeping;
//   - used: at least one Grant holds it, so that it stays where it is;
//   - cached: no caller holds it, but it is found by its hash until its room is
//     needed. The one released first is evicted first.
//
// A block that a peer may still write to, for want of a proof, is retired: it
// counts as such and is not given out again before there is one.
package pool

import (
	"container/list"
	"errors"
	"fmt"
	"os"
	"sync"
)

// The errors of this package.
var (
	// now; wait, or try again
	ErrFull = errors.New("pool is full")
	// and always will be, unless retired blocks come back
	ErrTooLarge = errors.New("request is larger than the pool")
	// errors.Is os.ErrClosed
	ErrClosed = fmt.Errorf("pool is closed: %w", os.ErrClosed)
	// block numbers are uint32
	errCount = errors.New("pool: the number of blocks must be between 1 and 1<<31")
)

// Hash names the content of a block: the tokens in it and all before them. The
// zero Hash names nothing: such a block is private to its request.
type Hash [16]byte

// HashOf makes a Hash of a number, such as a trace's.
func HashOf(id uint64) Hash {
	h := Hash{1} // so that the number 0 is a name too
	for i := range 8 {
		h[8+i] = byte(id >> (56 - 8*i))
	}
	return h
}

// Private reports whether the hash names nothing.
func (h Hash) Private() bool { return h == Hash{} }

// Pool is a bounded set of blocks, numbered from 0. All methods may be called by
// any goroutine, and none of them waits but Acquire.
type Pool struct {
	mu       sync.Mutex
	blocks   []block
	known    map[Hash]uint32 // cached blocks and published used ones
	free     chain           // last in, first out: its bytes may still be in a CPU cache
	cached   chain           // in order of release
	used     int
	retired  int        // gone, but for restore
	retiring int        // marked, and still held
	waiting  *list.List // of *waiter, in order of arrival
	closed   bool
	closing  chan struct{} // closed with it
	count    Stats         // the running totals only
}

// block is in the chain free, in the chain cached, held refs times, or gone.
type block struct {
	hash       Hash // while published
	refs       int
	prev, next uint32
	published  bool
	retired    bool
}

// New makes a pool of free blocks.
func New(blocks int) (*Pool, error) {
	if blocks < 1 || blocks > 1<<31 {
		return nil, fmt.Errorf("%w, not %d", errCount, blocks)
	}
	p := &Pool{blocks: make([]block, blocks), known: make(map[Hash]uint32), waiting: list.New(),
		closing: make(chan struct{})}
	p.free.init()
	p.cached.init()
	for i := blocks - 1; i >= 0; i-- {
		p.free.pushBack(p.blocks, uint32(i))
	}
	return p, nil
}

// Stats are the counts of a pool at one moment.
type Stats struct {
	Blocks, Free, Used, Cached, Retired int    // the first is the sum of the others
	Waiting                             int    // calls of Acquire
	Hits, Misses, Evictions             uint64 // blocks, since the pool was made
}

// Stats returns the counts.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.count
	s.Blocks, s.Free, s.Used, s.Cached = len(p.blocks), p.free.n, p.used, p.cached.n
	s.Retired, s.Waiting = p.retired, p.waiting.Len()
	return s
}

// Close ends every Acquire, those that wait included, with ErrClosed, and the waits for proofs of
// retired blocks. Grants may still be released. It is idempotent.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	close(p.closing)
	for e := p.waiting.Front(); e != nil; e = e.Next() {
		e.Value.(*waiter).end(nil, ErrClosed)
	}
	p.waiting.Init()
}
