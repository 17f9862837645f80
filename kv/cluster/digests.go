// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cluster/placement"
)

// digests have what the nodes tell of what they have beyond what the list of nodes gives them, each
// for as long as its connection lasts. Nothing that a call promises depends on it.
type digests struct {
	mu   sync.RWMutex
	view *placement.View // nil: no node has told anything
}

// viewBlocks is how many blocks of all nodes a view finds: 19 MB.
const viewBlocks = 4 << 20

// NodeID is the identity of a node of a name, by which placement knows it.
func NodeID(name string) uint64 {
	sum := sha256.Sum256([]byte(name))
	return binary.LittleEndian.Uint64(sum[:])
}

// follow takes the digests of a node until its connection is lost. What it cannot take in it asks
// for anew, as a whole.
func (c *conn) follow(ctx context.Context) {
	n, d := c.n, &c.n.c.digests
	defer d.forget(n.id)
	var since []byte
	for pause := pauseMin; ; {
		text, next, err := c.Digest(ctx, since)
		if err == nil {
			err = d.apply(n.id, text)
		}
		if since = next; err == nil {
			pause = pauseMin
			continue
		}
		if errors.Is(err, engine.ErrNotSupported) { // it is a server alone
			return
		}
		since = nil
		select {
		case <-ctx.Done():
			return
		case <-c.Lost():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, pauseMax)
	}
}

// apply takes in a digest of a node.
func (d *digests) apply(id uint64, text []byte) error {
	g, err := placement.DecodeDigest(text)
	if err != nil {
		return err
	}
	if g.Node != id {
		return fmt.Errorf("a digest of another node: %w", engine.ErrCorrupt)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.view == nil {
		d.view = placement.NewView(viewBlocks)
	}
	if err = d.view.Apply(g); errors.Is(err, placement.ErrStale) {
		err = nil // it is known
	}
	return err
}

func (d *digests) forget(id uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.view != nil {
		d.view.Forget(id)
	}
}

// Owners returns how many owners nodes have announced for a segment, or 0.
func (c *Cluster) Owners(segment cache.Key) int {
	d := &c.digests
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.view == nil {
		return 0
	}
	return d.view.Owners(segment)
}

// MeanLoad returns the mean load of the nodes, of which the one of Config.Node has load own.
func (c *Cluster) MeanLoad(own uint64) uint64 {
	d := &c.digests
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.view == nil {
		return own
	}
	return d.view.MeanLoad(own)
}
