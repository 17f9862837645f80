// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/directory"
)

// Member is a node that has joined.
type Member struct {
	d     *Directory
	stop  context.CancelFunc
	ended chan struct{} // closed when keepAlive has ended

	joined bool // who has the name from then on is a later process

	mu      sync.Mutex // guards what follows
	node    directory.Node
	put     directory.Node // as etcd has it
	lease   number         // 0: none
	trouble error
}

// Join puts a node into the directory, until Leave or the end of its process. While another node
// has the name it waits until ctx ends; the error is engine.ErrBusy then. A node of the same
// addresses is one whose process has ended: the new one takes its place at once.
func (d *Directory) Join(ctx context.Context, n directory.Node) (*Member, error) {
	n.Generation = time.Now().UnixNano()
	if err := n.Check(); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	life, stop := context.WithCancel(context.Background())
	m := &Member{d: d, node: n, stop: stop, ended: make(chan struct{})}
	for {
		err := m.step(ctx)
		if err == nil {
			m.joined = true
			go m.keepAlive(life)
			return m, nil
		}
		select {
		case <-ctx.Done():
			stop()
			soon, cancel := context.WithTimeout(context.Background(), callLimit)
			defer cancel()
			m.release(soon)
			return nil, fmt.Errorf("join: %w: %w", context.Cause(ctx), err)
		case <-time.After(pauseMin * 4):
		}
	}
}

// Update says how busy the node is, and what its share is, from the next beat on.
func (m *Member) Update(l directory.Load, weight uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.node.Load, m.node.Weight = l, weight
}

// Trouble is why the node may not be in the directory; nil: it is.
func (m *Member) Trouble() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trouble
}

// Leave takes the node out of the directory. With an error it is there until its lease has run out.
func (m *Member) Leave(ctx context.Context) error {
	m.stop()
	<-m.ended
	return m.release(ctx)
}

// keepAlive keeps the node in the directory until Leave.
func (m *Member) keepAlive(ctx context.Context) {
	defer close(m.ended)
	ticks := time.NewTicker(beat)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		err := m.step(ctx)
		m.mu.Lock()
		m.trouble = err
		m.mu.Unlock()
	}
}

// step renews the lease, and writes the node as it is now under it.
func (m *Member) step(ctx context.Context) error {
	m.mu.Lock()
	id, node, put := m.lease, m.node, m.put
	m.mu.Unlock()
	if id != 0 {
		alive, err := askAny[stream[lease]](ctx, m.d.c, "lease/keepalive",
			map[string]any{"ID": id})
		if err != nil {
			return err
		}
		if alive.Result.TTL <= 0 { // it has run out, and etcd has dropped the node
			id = 0
		}
	}
	if id == 0 {
		granted, err := askAny[lease](ctx, m.d.c, "lease/grant",
			map[string]any{"TTL": number(m.d.lease.Seconds())})
		if err != nil {
			return err
		}
		id, put = granted.ID, directory.Node{}
	}
	m.mu.Lock()
	m.lease, m.put = id, put
	m.mu.Unlock()
	if err := m.claim(ctx, id, node, put); err != nil {
		return err
	}
	m.mu.Lock()
	m.put = node
	m.mu.Unlock()
	return nil
}

// claim puts the node there by its lease, where its key has that lease, or none, or is of the same
// addresses. What is there as it is now it only looks at.
func (m *Member) claim(ctx context.Context, id number, node, put directory.Node) error {
	key := []byte(m.d.nodes + node.Name)
	write := []operation{}
	if put.Name == "" || put.Load != node.Load || put.Weight != node.Weight {
		write = putOf(key, &node, id)
	}
	look := []operation{{Range: &rangeRequest{Key: key}}}
	try := func(c compare, write []operation) (txnAnswer, error) {
		c.Key = key
		return askAny[txnAnswer](ctx, m.d.c, "kv/txn",
			txnRequest{Compare: []compare{c}, Success: write, Failure: look})
	}
	a, err := try(compare{Target: "LEASE", Lease: &id}, write)
	if err != nil || a.Succeeded {
		return err
	}
	var seen number // 0: nobody has the name
	var other directory.Node
	if len(a.Responses) == 1 && len(a.Responses[0].Range.List) == 1 {
		entry := a.Responses[0].Range.List[0]
		seen = entry.ModRevision
		_ = json.Unmarshal(entry.Value, &other) // garbled: it has no addresses
	}
	if seen != 0 && !m.joined && other.Generation >= node.Generation { // by another clock
		node.Generation = other.Generation + 1
		m.mu.Lock()
		m.node.Generation = node.Generation
		m.mu.Unlock()
	}
	if seen != 0 && (other.Generation > node.Generation ||
		!slices.Equal(other.Addresses, node.Addresses)) {
		return fmt.Errorf("another process has the name %q, at %q: give each node a name of its "+
			"own: %w", node.Name, other.Addresses, engine.ErrBusy)
	}
	a, err = try(compare{Target: "MOD", ModRevision: &seen}, putOf(key, &node, id))
	if err == nil && !a.Succeeded {
		err = errors.New("another node came at this moment")
	}
	return err
}

// putOf writes a node under a lease.
func putOf(key []byte, node *directory.Node, id number) []operation {
	value, _ := json.Marshal(node) // texts and numbers
	return []operation{{Put: &putRequest{Key: key, Value: value, Lease: id}}}
}

// release ends the lease, and the node in the directory with it.
func (m *Member) release(ctx context.Context) error {
	m.mu.Lock()
	id := m.lease
	m.lease = 0
	m.mu.Unlock()
	if id == 0 {
		return nil
	}
	_, err := askAny[struct{}](ctx, m.d.c, "lease/revoke", map[string]any{"ID": id})
	return err
}
