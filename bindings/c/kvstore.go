// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// kvStore is a cache of this process, or one of another.
type kvStore interface {
	namespace(ctx context.Context, name string, o cache.NamespaceOptions) (kvSpace, error)
	Attach(ctx context.Context, r *engine.Region) error
	Detach(ctx context.Context, r *engine.Region) error
	Drain(ctx context.Context) error
	stats() (any, error)
	close() error
}

// kvSpace is a namespace of it.
type kvSpace interface {
	Match(ctx context.Context, keys []cache.Key) (cache.Match, error)
	Remove(ctx context.Context, keys []cache.Key) error
	Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (cache.HintResult, error)
	HintEnvelope(ctx context.Context, data []byte) ([]cache.ActionOutcome, error)
	Estimate(ctx context.Context, keys []cache.Key) (cache.Estimate, error)
	Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error)

	// prepare returns what moves the blocks, and returns when the operation has ended.
	prepare(store bool, keys []cache.Key, r *engine.Region, at cache.Place) (kvMove, error)

	// pin returns the blocks in their places. The error of end says that they were not there all
	// the time.
	pin(ctx context.Context, keys []cache.Key, ttl time.Duration) (outcomes []cache.Outcome,
		blocks [][]byte, end func() error, err error)
}

type kvMove func(ctx context.Context) ([]cache.Outcome, error)

// ownCache is a cache of this process.
type ownCache struct {
	*cache.Cache
	e *engine.Engine

	mu      sync.Mutex // guards what follows
	regions map[*engine.Region]*ownRegion
}

func newOwnCache(e *engine.Engine, c *cache.Cache) *ownCache {
	return &ownCache{Cache: c, e: e, regions: map[*engine.Region]*ownRegion{}}
}

// ownRegion is an attached region. Its fields are guarded by the cache's mu.
type ownRegion struct {
	peer   *engine.Peer
	remote *engine.Remote
	ops    int           // that run
	idle   chan struct{} // of a Detach that waits, which refuses new ones; closed when ops is 0
}

func (c *ownCache) namespace(_ context.Context, name string, o cache.NamespaceOptions) (kvSpace,
	error) {
	n, err := c.Namespace(name, o)
	return ownSpace{c, n}, err
}

// Attach keeps the region as the engine's own peer has it.
func (c *ownCache) Attach(_ context.Context, r *engine.Region) error {
	self, err := c.e.Self()
	if err != nil {
		return err
	}
	m, err := self.Remote(r.Name())
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.regions[r] == nil {
		c.regions[r] = &ownRegion{peer: self, remote: m}
	}
	return nil
}

// Detach refuses new operations on the region at once, and waits for those that run.
func (c *ownCache) Detach(ctx context.Context, r *engine.Region) error {
	c.mu.Lock()
	at := c.regions[r]
	if at == nil || at.ops == 0 {
		delete(c.regions, r)
		c.mu.Unlock()
		return nil
	}
	if at.idle == nil {
		at.idle = make(chan struct{})
	}
	n, idle := at.ops, at.idle
	c.mu.Unlock()
	select {
	case <-idle:
		return c.Detach(ctx, r)
	case <-ctx.Done():
		return fmt.Errorf("detach: %d operations on the region run: %w", n, ctx.Err())
	}
}

// begin counts an operation on a region in; end counts it out.
func (c *ownCache) begin(r *engine.Region) (*ownRegion, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.regions[r]
	if at == nil || at.idle != nil {
		return nil, fmt.Errorf("the region is not attached to the cache: attach it first: %w",
			engine.ErrBounds)
	}
	at.ops++
	return at, nil
}

func (c *ownCache) end(at *ownRegion) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at.ops--; at.ops == 0 && at.idle != nil {
		close(at.idle)
		at.idle = nil
	}
}

func (c *ownCache) stats() (any, error) {
	a := c.Attached()
	return struct { // a part of serve.Report
		cache.Stats
		Attached serve.Attached `json:"attached"`
	}{c.Stats(), serve.Attached{Blocks: a.Blocks, Bytes: a.Bytes, Ms: float64(a.Took) / 1e6,
		Fresh: a.Fresh}}, nil
}

func (c *ownCache) close() error { return c.Close() }

// ownSpace is a namespace of it.
type ownSpace struct {
	c *ownCache
	*cache.Namespace
}

func (s ownSpace) Match(_ context.Context, keys []cache.Key) (cache.Match, error) {
	return s.Namespace.Match(keys), nil
}

func (s ownSpace) Remove(_ context.Context, keys []cache.Key) error {
	return s.Namespace.Remove(keys)
}

func (s ownSpace) Hint(_ context.Context, keys []cache.Key, h cache.Hint) (cache.HintResult,
	error) {
	return s.Namespace.Hint(keys, h)
}

func (s ownSpace) HintEnvelope(_ context.Context, data []byte) ([]cache.ActionOutcome, error) {
	return s.Namespace.HintEnvelope(data)
}

func (s ownSpace) Estimate(_ context.Context, keys []cache.Key) (cache.Estimate, error) {
	return s.Namespace.Estimate(keys), nil
}

func (s ownSpace) Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error) {
	return ended(ctx, s.Namespace.Prefetch(ctx, keys))
}

// ended waits for an operation, which its ctx ends. One that was too late has an error.
func ended(ctx context.Context, op *cache.Op) ([]cache.Outcome, error) {
	<-op.Done()
	err := op.Err()
	if err == nil && slices.Contains(op.Outcomes(), cache.Late) {
		err = context.Cause(ctx)
	}
	return op.Outcomes(), err
}

// prepare counts the operation in, so that a Detach which comes next waits for it.
func (s ownSpace) prepare(store bool, keys []cache.Key, r *engine.Region, at cache.Place) (kvMove,
	error) {
	region, err := s.c.begin(r)
	if err != nil {
		return nil, err
	}
	at.Peer, at.Remote = region.peer, region.remote
	start := s.Load
	if store {
		start = s.Store
	}
	return func(ctx context.Context) ([]cache.Outcome, error) {
		defer s.c.end(region)
		return ended(ctx, start(ctx, keys, at))
	}, nil
}

func (s ownSpace) pin(ctx context.Context, keys []cache.Key, ttl time.Duration) ([]cache.Outcome,
	[][]byte, func() error, error) {
	p, err := s.Pin(ctx, keys, ttl)
	if err != nil {
		return nil, nil, nil, err
	}
	blocks, end, err := holdView(p.View)
	if err != nil {
		p.Close()
		return nil, nil, nil, err
	}
	return p.Outcomes(), blocks, func() error { defer p.Close(); return end() }, nil
}

// holdView has a View run from here until end, which returns what it returned.
func holdView(view func(func([][]byte) error) error) (blocks [][]byte, end func() error,
	err error) {
	shown, over := make(chan [][]byte), make(chan struct{})
	returned := make(chan error, 1)
	go func() {
		returned <- view(func(b [][]byte) error { shown <- b; <-over; return nil })
	}()
	select {
	case blocks = <-shown:
		return blocks, func() error { close(over); return <-returned }, nil
	case err = <-returned:
		return nil, nil, err
	}
}

// dialledCache is a cache of another process.
type dialledCache struct{ *serve.Client }

func (c dialledCache) namespace(ctx context.Context, name string, o cache.NamespaceOptions) (
	kvSpace, error) {
	if (o != cache.NamespaceOptions{Geometry: o.Geometry}) {
		return nil, argument("options of a namespace beside its geometry: of a cache that was " +
			"dialled its server says them")
	}
	s, err := c.Namespace(ctx, name, o.Geometry)
	return dialledSpace{s}, err
}

var errNotHere = fmt.Errorf("the cache was dialled: ask the process that has it: %w",
	engine.ErrNotSupported)

func (c dialledCache) stats() (any, error)         { return nil, errNotHere }
func (c dialledCache) Drain(context.Context) error { return errNotHere }

// kvCloseLimit is how long a close waits for the word of a server.
const kvCloseLimit = 15 * time.Second

func (c dialledCache) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), kvCloseLimit)
	defer cancel()
	return c.Close(ctx)
}

// dialledSpace is a namespace of it.
type dialledSpace struct{ *serve.Space }

func (s dialledSpace) prepare(store bool, keys []cache.Key, r *engine.Region, at cache.Place) (
	kvMove, error) {
	place := serve.Place{Region: r, Base: at.Base, Stride: at.Stride, Slots: at.Slots, Run: at.Run,
		Loops: at.Loops}
	move := s.Load
	if store {
		move = s.Store
	}
	return func(ctx context.Context) ([]cache.Outcome, error) { return move(ctx, keys, place) }, nil
}

func (s dialledSpace) pin(ctx context.Context, keys []cache.Key, ttl time.Duration) (
	[]cache.Outcome, [][]byte, func() error, error) {
	p, err := s.Pin(ctx, keys, ttl)
	if err != nil {
		return nil, nil, nil, err
	}
	life, cancel := context.WithCancel(context.Background())
	blocks, end, err := holdView(func(f func([][]byte) error) error { return p.View(life, f) })
	closed := func(err error) error {
		soon, stop := context.WithTimeout(context.Background(), kvCloseLimit)
		defer stop()
		return errors.Join(err, p.Close(soon))
	}
	if err != nil {
		cancel()
		return nil, nil, nil, closed(err)
	}
	return p.Outcomes(), blocks, func() error {
		defer cancel()
		defer time.AfterFunc(kvCloseLimit, cancel).Stop()
		return closed(end())
	}, nil
}
