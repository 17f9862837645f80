// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/directory"
	"github.com/sluicehq/sluice/kv/directory/etcd"
)

// served is a cache of other processes: of one, or of the nodes of a cluster.
type served interface {
	Attach(ctx context.Context, r *engine.Region) error
	Detach(ctx context.Context, r *engine.Region) error
	Drain(ctx context.Context) error
	Close(ctx context.Context) error
	namespace(ctx context.Context, name spaceName) (kvSpace, error)
	stats(ctx context.Context) (any, error)
}

// dialled is the cache of one process.
type dialled struct{ *serve.Client }

func (d dialled) namespace(ctx context.Context, name spaceName) (kvSpace, error) {
	return d.Namespace(ctx, name.name, name.geometry)
}

func (d dialled) stats(ctx context.Context) (any, error) { return d.Report(ctx) }

// clustered is the cache of many nodes.
type clustered struct {
	*cluster.Cluster
	directory *etcd.Directory // nil: the nodes are a list
}

func (c clustered) namespace(ctx context.Context, name spaceName) (kvSpace, error) {
	s, err := c.Namespace(ctx, name.name, name.geometry)
	if err != nil {
		return nil, err
	}
	return clusterSpace{Space: s.Unchained(), chains: s}, nil
}

func (c clustered) stats(context.Context) (any, error) { return c.Stats(), nil }

// Close ends the directory behind the nodes: after an error it may be called again.
func (c clustered) Close(ctx context.Context) error {
	err := c.Cluster.Close(ctx)
	if err == nil && c.directory != nil {
		c.directory.Close()
	}
	return err
}

// dialKV opens what sluice_kv_dial names, until ctx or the engine ends.
func (e *openEngine) dialKV(ctx context.Context, network, address string) (served, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-e.gone:
			cancel(engine.ErrClosed)
		case <-ctx.Done():
		}
	}()
	switch network {
	case "unix", "tcp":
		c, err := serve.Dial(ctx, e.Engine, network, address)
		return dialled{c}, err
	case "nodes":
		nodes, err := directory.ParseList(address)
		if err != nil {
			return nil, err
		}
		d, err := directory.List(nodes, nil)
		if err != nil {
			return nil, err
		}
		return e.openCluster(ctx, d, nil)
	case "etcd":
		d, err := etcd.Open(ctx, etcdOf(address))
		if err != nil {
			return nil, err
		}
		return e.openCluster(ctx, d, d)
	}
	return nil, argument("network %q: there are unix, tcp, nodes and etcd", network)
}

// etcdOf reads "URL,URL,.../PREFIX".
func etcdOf(address string) etcd.Config {
	urls := strings.Split(address, ",")
	last := &urls[len(urls)-1]
	scheme, rest, _ := strings.Cut(*last, "://")
	host, prefix, found := strings.Cut(rest, "/")
	if found {
		*last = scheme + "://" + host
	}
	return etcd.Config{Endpoints: urls, Prefix: prefix}
}

const (
	kvClusterLimit = time.Minute           // of a call, whatever its timeout is
	kvReachPause   = 20 * time.Millisecond // between two looks whether a node is reached
)

// openCluster waits until one of the nodes is reached, since a wrong address would be a cache that
// has nothing.
func (e *openEngine) openCluster(ctx context.Context, d directory.Directory,
	following *etcd.Directory) (_ served, err error) {
	if following != nil {
		defer func() {
			if err != nil {
				following.Close()
			}
		}()
	}
	c, err := cluster.Open(ctx, cluster.Config{Engine: e.Engine, Directory: d,
		Identity: e.identity, Limit: kvClusterLimit})
	if err != nil {
		return nil, err
	}
	for {
		nodes := c.Stats().Nodes
		var why strings.Builder
		for _, n := range nodes {
			if n.State == cluster.Serving {
				return clustered{c, following}, nil
			}
			fmt.Fprintf(&why, "%s (%s) ", n.Name, n.Why)
		}
		select {
		case <-time.After(kvReachPause):
			continue
		case <-ctx.Done():
		}
		soon, cancel := context.WithTimeout(context.Background(), kvCloseLimit)
		defer cancel()
		_ = c.Close(soon) // nothing was attached
		return nil, fmt.Errorf("no node of the cluster is reached, of %d: %.512s: %w", len(nodes),
			why.String(), context.Cause(ctx))
	}
}
