// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// What a node needs to send copies: calls to one node that is named, whichever nodes the blocks
// belong to. They end as those to all nodes do.

// MatchAt is Match at one node.
func (s *Space) MatchAt(ctx context.Context, node string, keys []cache.Key) (m cache.Match,
	err error) {
	n, err := s.c.node(node)
	if err != nil {
		return m, err
	}
	l := s.c.limit(ctx)
	defer l.free()
	_, err = s.ask(l, n, func(_ *conn, space *serve.Space) (err error) {
		m, err = space.Match(l.nodes, keys)
		return err
	})
	return m, err
}

// LoadFrom is Load from one node.
func (s *Space) LoadFrom(ctx context.Context, node string, keys []cache.Key, to serve.Place) (
	[]cache.Outcome, error) {
	return s.moveAt(ctx, node, keys, to, (*serve.Space).Load)
}

// StoreAt is Store at one node.
func (s *Space) StoreAt(ctx context.Context, node string, keys []cache.Key, from serve.Place) (
	[]cache.Outcome, error) {
	return s.moveAt(ctx, node, keys, from, (*serve.Space).Store)
}

func (s *Space) moveAt(ctx context.Context, node string, keys []cache.Key, place serve.Place,
	move mover) ([]cache.Outcome, error) {
	n, err := s.c.node(node)
	if err != nil {
		return nil, err
	}
	reg, err := s.check(keys, &place, true)
	if err != nil {
		return nil, err
	}
	l := s.c.limit(ctx)
	defer l.free()
	p := &part{n: n, keys: keys, at: make([]int, len(keys)), segments: place.Segments}
	for k := range keys {
		p.at[k] = k
	}
	return s.moveOne(l, p, reg, &place, move)
}

// node returns a node of the directory.
func (c *Cluster) node(name string) (*node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.nodes[name]; n != nil {
		return n, nil
	}
	return nil, fmt.Errorf("the directory has no node %q: %w", name, engine.ErrPeerLost)
}
