// SPDX-License-Identifier: Apache-2.0

// Package cluster makes one cache of the caches of many nodes. docs/cluster.md has the promises.
//
// It is a library of the process that serves a model: it dials the server of each node
// (kv/cache/serve), and has the methods of one. Which nodes there are a Directory says; which of
// them a block belongs to follows from its key and the list (kv/cluster/placement). So no service
// knows where blocks are, and none has to be asked.
//
// The way of a Load (space.go): cut the chain into segments and look up which nodes have them;
// choose one of these for each (source.go), by how long Loads of it have taken (cost.go); send each
// node one request for all of its blocks; what one does not have, or does not answer in time, ask
// the next owners for. A node that has not proved that it moves nothing any more loses its lease on
// the memory before another is asked, and before the Load returns: so no two nodes write to one
// place, and a miss is a miss for good.
//
// The way of a node (node.go): dial until it answers; serve requests until the connection is lost;
// revoke what it has of this process's memory; dial again. A node that is silent is asked for
// nothing more until it has answered.
//
// Several processes that must agree, as the ranks of one model: token.go.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
)

// Config is what Open needs.
type Config struct {
	Engine    *engine.Engine // its notifications are the cluster's until Close
	Directory directory.Directory

	// Identity is for nodes that the directory names a certificate of: that is checked then. Nodes
	// without one the engine dials by its own Config.Identity.
	Identity *identity.Identity

	// Node is the node whose process this is; "": it is none.
	Node string

	// Limit is how long a call may take whose context says nothing, or more. Default 10 s.
	Limit time.Duration
}

// Cluster is a cache of many nodes. Its methods may be called by any goroutine.
type Cluster struct {
	cfg      Config
	group    *serve.Group
	life     context.Context // ends with Close
	stop     context.CancelFunc
	followed chan struct{} // closed when follow has ended
	layout   atomic.Pointer[layout]
	digests  digests
	curves   [2]curve // of all nodes, by tier
	wholes   curve    // of whole Loads; see Cluster.whole
	hedges   budget

	mu      sync.Mutex // guards what follows
	nodes   map[string]*node
	parting map[*node]bool // that the directory has no more, until they have ended
	regions map[*engine.Region]*region
	opens   map[spaceName]int // Spaces that are not closed
}

// layout is a view, and its nodes as placement takes them.
type layout struct {
	*directory.View
	number uint64  // of the Cluster's layouts
	nodes  []*node // of View.Nodes
	bids   []placement.Node
	at     map[uint64]int // places of nodes, by what placement knows them by
}

// region is memory that nodes may have leases of.
type region struct {
	*engine.Region
	life context.Context // ends with Detach
	stop context.CancelFunc

	mu        sync.Mutex
	over      bool // no further attach begins
	attaching sync.WaitGroup
}

// Open dials the nodes of a directory. It waits until each has been tried once, or ctx ends: nodes
// that were not reached by then are misses until they are.
func Open(ctx context.Context, cfg Config) (*Cluster, error) {
	if cfg.Engine == nil || cfg.Directory == nil || cfg.Limit < 0 {
		return nil, fmt.Errorf("cluster: want an engine, a directory, and a limit that is not "+
			"negative: %w", engine.ErrBounds)
	}
	cfg.Limit = cmp.Or(cfg.Limit, 10*time.Second)
	c := &Cluster{cfg: cfg, group: serve.NewGroup(cfg.Engine), followed: make(chan struct{}),
		nodes: map[string]*node{}, parting: map[*node]bool{}, regions: map[*engine.Region]*region{},
		opens: map[spaceName]int{}}
	c.group.Grace = wordLimit
	c.life, c.stop = context.WithCancel(context.Background())
	v, changed := cfg.Directory.View()
	c.arrange(v)
	go c.follow(changed)
	for _, n := range c.layout.Load().nodes {
		select {
		case <-n.tried:
		case <-ctx.Done():
		}
	}
	return c, nil
}

// arrangePause is between two views, as many nodes change how busy they are.
const arrangePause = 20 * time.Millisecond

// follow takes each new view of the directory.
func (c *Cluster) follow(changed <-chan struct{}) {
	defer close(c.followed)
	for {
		select {
		case <-changed:
		case <-c.life.Done():
			return
		}
		var v *directory.View
		v, changed = c.cfg.Directory.View()
		c.arrange(v)
		select {
		case <-time.After(arrangePause):
		case <-c.life.Done():
		}
	}
}

// arrange has the nodes be those of a view.
func (c *Cluster) arrange(v *directory.View) {
	l := &layout{View: v, at: map[uint64]int{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if last := c.layout.Load(); last != nil {
		l.number = last.number + 1
	}
	old := c.nodes
	c.nodes = map[string]*node{}
	for k := range v.Nodes {
		d := &v.Nodes[k]
		n := old[d.Name]
		delete(old, d.Name)
		if n == nil {
			n = c.newNode(d)
		}
		n.describe(d)
		c.nodes[d.Name] = n
		l.at[n.id] = k
		l.nodes = append(l.nodes, n)
		l.bids = append(l.bids, placement.Node{ID: n.id, Weight: d.Weight})
	}
	c.layout.Store(l)
	for _, n := range old { // the directory has them no more
		n.stop()
		c.parting[n] = true
		go func() {
			<-n.ended
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(c.parting, n)
		}()
	}
}

// all lists the nodes, also those that the directory has no more and that have not ended.
func (c *Cluster) all() (list []*node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.nodes {
		list = append(list, n)
	}
	for n := range c.parting {
		list = append(list, n)
	}
	return list
}

// Attach lets nodes reach a region, so that calls may name it, until Detach. Nodes that are not
// reached now have it once they are. An error says what is wrong with the region; Detach it then,
// too, as a node may have it.
func (c *Cluster) Attach(ctx context.Context, r *engine.Region) error {
	c.mu.Lock()
	reg := c.regions[r]
	if reg == nil {
		reg = &region{Region: r}
		reg.life, reg.stop = context.WithCancel(c.life)
		c.regions[r] = reg
	}
	c.mu.Unlock()
	reg.mu.Lock()
	over := reg.over
	reg.mu.Unlock()
	if over {
		return fmt.Errorf("attach region %s: Detach of it has yet to return nil: call that "+
			"again: %w", r.Name(), engine.ErrBusy)
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Limit)
	defer cancel()
	list := c.layout.Load().nodes
	errs := make([]error, len(list))
	var nodes sync.WaitGroup
	for k, n := range list {
		if at := n.usable(); at != nil {
			nodes.Go(func() {
				err := at.attach(ctx, reg)
				_, mine := errors.AsType[*engine.OpError](err) // and of no node
				if mine && !errors.Is(err, engine.ErrPeerLost) && ctx.Err() == nil {
					errs[k] = err
				} // else a Load tries it again
			})
		}
	}
	nodes.Wait()
	return cmp.Or(errs...)
}

// region returns one that is attached.
func (c *Cluster) region(r *engine.Region) (*region, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if reg := c.regions[r]; reg != nil {
		return reg, nil
	}
	return nil, fmt.Errorf("the region of the place is not attached: %w", engine.ErrBounds)
}

// Detach ends Attach. When it returns nil no node reads or writes the memory any more, whatever
// state it is in; with an error, call it again.
func (c *Cluster) Detach(ctx context.Context, r *engine.Region) error {
	reg, err := c.region(r)
	if err != nil {
		return nil
	}
	reg.mu.Lock()
	reg.over = true
	reg.mu.Unlock()
	reg.stop()
	attached := make(chan struct{})
	go func() { reg.attaching.Wait(); close(attached) }() // none goes on for long without reg.life
	select {
	case <-attached:
	case <-ctx.Done():
		return fmt.Errorf("detach region %s: %w: %w", r.Name(), context.Cause(ctx),
			engine.ErrUnproven)
	}
	var errs []error
	for _, n := range c.all() {
		for _, client := range n.clients() {
			errs = append(errs, client.Detach(ctx, r))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detach region %s: %w: %w", r.Name(), err, engine.ErrUnproven)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.regions[r] == reg {
		delete(c.regions, r)
	}
	return nil
}

// Close ends all connections, and detaches all regions. An error says that a node may still reach
// memory of this process; Close may be called again.
func (c *Cluster) Close(ctx context.Context) error {
	c.stop()
	<-c.followed
	for _, n := range c.all() {
		select {
		case <-n.ended:
		case <-ctx.Done():
			return fmt.Errorf("close the cluster: node %s: %w: %w", n.name, context.Cause(ctx),
				engine.ErrUnproven)
		}
	}
	c.group.Close()
	return nil
}

// State is how a node is to this process.
type State string

// The states.
const (
	Serving     State = "serving"
	Silent      State = "silent"      // it has not answered in time, and is asked for nothing yet
	Unreachable State = "unreachable" // see NodeStats.Why
)

// Stats are the counts of a cluster. Programs read the names in JSON.
type Stats struct {
	Nodes []NodeStats `json:"nodes"`
	// Trouble is that of the directory; "": there is none.
	Trouble string   `json:"trouble,omitempty"`
	Refused []string `json:"refused,omitempty"` // entries of the directory that are left out
}

// NodeStats are the counts of one node, as this process has seen it.
type NodeStats struct {
	directory.Node
	State State  `json:"state"`
	Why   string `json:"why,omitempty"` // of the last failure
	// Requests were sent; of these Late were not answered in time, and Failed by an error.
	Requests uint64 `json:"requests"`
	Late     uint64 `json:"late"`
	Failed   uint64 `json:"failed"`
	Lost     uint64 `json:"lost"`   // connections
	Hedged   uint64 `json:"hedged"` // requests that were late, and another node was asked
}

// Stats returns the counts as they are.
func (c *Cluster) Stats() Stats {
	l := c.layout.Load()
	s := Stats{Nodes: []NodeStats{}, Refused: slices.Clone(l.Refused)}
	if l.Trouble != nil {
		s.Trouble = l.Trouble.Error()
	}
	for _, n := range l.nodes {
		s.Nodes = append(s.Nodes, n.stats())
	}
	return s
}

// Drain waits until all blocks that the nodes were given are on their disks, or will not be, for as
// long as ctx lets it: Config.Limit says nothing here.
func (c *Cluster) Drain(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	list := c.layout.Load().nodes
	errs := make([]error, len(list))
	var nodes sync.WaitGroup
	for k, n := range list {
		nodes.Go(func() {
			err := errNotReached
			if at := n.usable(); at != nil {
				err = at.Client.Drain(ctx)
			}
			if err != nil {
				errs[k] = fmt.Errorf("node %s may have blocks in its memory alone: %w", n.name, err)
			}
		})
	}
	nodes.Wait()
	return errors.Join(errs...)
}

// Report asks a node how its cache is, as serve.Client.Report does.
func (c *Cluster) Report(ctx context.Context, node string) (serve.Report, error) {
	c.mu.Lock()
	n := c.nodes[node]
	c.mu.Unlock()
	if n != nil {
		if at := n.usable(); at != nil {
			ctx, cancel := context.WithTimeout(ctx, c.cfg.Limit)
			defer cancel()
			return at.Report(ctx)
		}
	}
	return serve.Report{}, fmt.Errorf("node %q is not reached: %w", node, engine.ErrPeerLost)
}

// Namespace opens a namespace, as serve.Client.Namespace does, at each node. Nodes that are not
// reached open it once they are.
func (c *Cluster) Namespace(ctx context.Context, name string, geometry [32]byte) (*Space, error) {
	s := &Space{c: c, name: spaceName{name, geometry}, closed: new(atomic.Bool),
		known: new(known)}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Limit)
	defer cancel()
	l := c.layout.Load()
	errs := make([]error, len(l.nodes))
	var nodes sync.WaitGroup
	for k, n := range l.nodes {
		if at := n.usable(); at != nil {
			nodes.Go(func() { _, errs[k] = at.space(ctx, s.name) })
		}
	}
	nodes.Wait()
	for _, err := range errs {
		if errors.Is(err, engine.ErrBounds) || errors.Is(err, engine.ErrBusy) ||
			errors.Is(err, cache.ErrNoRoom) || errors.Is(err, os.ErrPermission) {
			return nil, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.opens[s.name]++
	return s, nil
}
