// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"strings"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/member"
	"github.com/sluicehq/sluice/kv/directory"
)

// copies makes the part of a node that sends copies and is sent them, for its server; nil: the
// server is no node of a cluster.
func (m *membership) copies(c *cache.Cache) (serve.Member, error) {
	if len(m.cfg.cluster.etcd) == 0 {
		return nil, nil
	}
	var err error
	m.member, err = member.New(member.Config{Name: m.cfg.name, Cache: c,
		BytesASecond: m.cfg.cluster.bytesASecond})
	return m.member, err
}

// sendCopies has the node send copies to others until ctx ends; await waits for the end of that.
// The node is a client of the others, by an engine of its own. Where that does not open, the node
// says so and serves without sending copies.
func (m *membership) sendCopies(ctx context.Context, d directory.Directory) (await func()) {
	id, err := m.cfg.openIdentity()
	var e *engine.Engine
	if err == nil {
		e, err = m.cfg.ofClient().openEngine(m.say)
	}
	if err != nil {
		m.say("sends no copies to other nodes: %v", sentence(err))
		return func() {}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := m.member.Run(ctx, member.Net{Engine: e, Directory: d, Identity: id}); err != nil {
			m.say("sends no copies to other nodes any more: %v", sentence(err))
		}
		if err := e.Close(); err != nil {
			m.say("%v", sentence(err))
		}
	}()
	return func() { <-ended }
}

// ofClient is the config of an engine beside the server's, by which it is a client of nodes:
// without disks, and at ports that are free.
func (c *cacheConfig) ofClient() *cacheConfig {
	mine := *c
	mine.name += ".copies"
	mine.cache.Disks, mine.backends = nil, nil
	for _, spec := range c.backends {
		name, words, _ := byname.Split(spec) // it was checked
		if name == "posix" {
			continue
		}
		for k, w := range words {
			if host, _, err := net.SplitHostPort(strings.TrimPrefix(w, "listen=")); err == nil &&
				strings.HasPrefix(w, "listen=") {
				words[k] = "listen=" + net.JoinHostPort(host, "0")
			}
		}
		if len(words) > 0 {
			name += ":" + strings.Join(words, ",")
		}
		mine.backends = append(mine.backends, name)
	}
	return &mine
}
