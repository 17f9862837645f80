// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"context"
	"slices"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
)

// kvSpace is a namespace of a cache: serve.Space is one.
type kvSpace interface {
	Match(ctx context.Context, keys []cache.Key) (cache.Match, error)
	Remove(ctx context.Context, keys []cache.Key) error
	Blocks(ctx context.Context, from uint32) (list []cache.BlockInfo, next uint32, err error)
	Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (cache.HintResult, error)
	HintEnvelope(ctx context.Context, data []byte) ([]cache.ActionOutcome, error)
	Estimate(ctx context.Context, keys []cache.Key) (cache.Estimate, error)
	Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error)
	Load(ctx context.Context, keys []cache.Key, to serve.Place) ([]cache.Outcome, error)
	Store(ctx context.Context, keys []cache.Key, from serve.Place) ([]cache.Outcome, error)
	Replace(ctx context.Context, keys []cache.Key, from serve.Place) ([]cache.Outcome, error)
	Close() error
}

// ownSpace is one of a cache of this process.
type ownSpace struct {
	*cache.Namespace
	peer   *engine.Peer   // the engine itself, of a load or a store
	remote *engine.Remote // its region
}

func (s ownSpace) Match(_ context.Context, keys []cache.Key) (cache.Match, error) {
	return s.Namespace.Match(keys), nil
}

func (s ownSpace) Remove(_ context.Context, keys []cache.Key) error {
	return s.Namespace.Remove(keys)
}

func (s ownSpace) Blocks(_ context.Context, from uint32) ([]cache.BlockInfo, uint32, error) {
	list := make([]cache.BlockInfo, kvListedMax)
	n, next := s.Namespace.Blocks(from, list)
	return list[:n], next, nil
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

func (s ownSpace) Load(ctx context.Context, keys []cache.Key, to serve.Place) ([]cache.Outcome,
	error) {
	return ended(ctx, s.Namespace.Load(ctx, keys, s.place(to)))
}

func (s ownSpace) Store(ctx context.Context, keys []cache.Key, from serve.Place) ([]cache.Outcome,
	error) {
	return ended(ctx, s.Namespace.Store(ctx, keys, s.place(from)))
}

func (s ownSpace) Replace(ctx context.Context, keys []cache.Key, from serve.Place) (
	[]cache.Outcome, error) {
	return ended(ctx, s.Namespace.Replace(ctx, keys, s.place(from)))
}

func (s ownSpace) Close() error {
	s.Namespace.Close()
	return nil
}

func (s ownSpace) place(p serve.Place) cache.Place {
	return cache.Place{Peer: s.peer, Remote: s.remote, Base: p.Base, Stride: p.Stride,
		Slots: p.Slots, Run: p.Run, Loops: p.Loops}
}

// clusterSpace is one of a cluster: by keys, each of which has a place of its own, or by chains.
type clusterSpace struct {
	*cluster.Space
	chains *cluster.Space
}
