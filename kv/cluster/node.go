// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/directory"
)

const (
	dialLimit  = 2 * time.Second // of one address
	closeLimit = 2 * time.Second // of one try
	pauseMin   = 20 * time.Millisecond
	pauseMax   = 2 * time.Second
)

// node is a node of the directory, until its connection is closed for good.
type node struct {
	c     *Cluster
	name  string
	id    uint64 // of placement
	stop  context.CancelFunc
	moved chan struct{} // has room for one: the description is of another process
	ended chan struct{} // closed when run has
	tried chan struct{} // closed once it has been dialled

	requests, late, failed, lost, hedged atomic.Uint64

	doubts  atomic.Int64 // calls of suspect that run: others are asked, where they may be
	running atomic.Int64 // requests of this process
	told    atomic.Int64 // requests of all, as the directory says
	usual   mean         // of how busy it was in the Loads of curves
	curves  [2]curve     // by tier

	mu          sync.Mutex // guards what follows
	description directory.Node
	at          *conn         // nil: not reached
	closing     *serve.Client // that may reach memory of this process still
	why         error         // of the last failure
}

// conn is a connection to a node.
type conn struct {
	*serve.Client
	n        *node
	revoking atomic.Int64  // calls of revoke that run; one more once the connection is over
	revoked  atomic.Uint64 // that have ended

	mu     sync.Mutex // guards what follows
	silent bool
	spaces map[spaceName]*opening
}

// opening is a namespace of a node. The fields hold once done is closed.
type opening struct {
	done  chan struct{}
	space *serve.Space
	err   error
}

func (c *Cluster) newNode(d *directory.Node) *node {
	n := &node{c: c, name: d.Name, id: NodeID(d.Name),
		moved: make(chan struct{}, 1), ended: make(chan struct{}), tried: make(chan struct{}),
		description: *d}
	n.told.Store(int64(d.Load.Running))
	var ctx context.Context
	ctx, n.stop = context.WithCancel(c.life)
	go n.run(ctx)
	return n
}

func (n *node) describe(d *directory.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.description.Generation != d.Generation {
		select {
		case n.moved <- struct{}{}:
		default:
		}
	}
	n.description = *d
	n.told.Store(int64(d.Load.Running))
}

// run is the story of a node: dial, serve, close, and again, until ctx ends. Where the directory
// has another process of the name, the one that is connected is the node no more: it may stand
// still.
func (n *node) run(ctx context.Context) {
	defer close(n.ended)
	tried := sync.OnceFunc(func() { close(n.tried) })
	defer tried()
	pause := pauseMin
	for ctx.Err() == nil {
		select {
		case <-n.moved:
		default:
		}
		client, err := n.dial(ctx)
		at := &conn{Client: client, n: n, spaces: map[spaceName]*opening{}}
		n.mu.Lock()
		if err == nil {
			n.at = at
		} else if ctx.Err() == nil {
			n.why = err
		}
		n.mu.Unlock()
		tried()
		if err == nil {
			pause = pauseMin
			var following sync.WaitGroup
			if n.name != n.c.cfg.Node {
				following.Go(func() { at.follow(ctx) })
			}
			why := errors.New("the connection was lost")
			select {
			case <-client.Lost():
				n.lost.Add(1)
			case <-n.moved:
				why = errors.New("another process has the name now")
			case <-ctx.Done():
			}
			at.revoking.Add(1) // for good: calls that run may fail by it
			n.mu.Lock()
			n.at, n.closing = nil, client
			n.why = why
			n.mu.Unlock()
			n.close(client)
			following.Wait()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, pauseMax)
	}
}

// close returns once a lost node reaches no memory of this process any more.
func (n *node) close(client *serve.Client) {
	for pause := pauseMin; ; pause = min(2*pause, pauseMax) {
		soon, cancel := context.WithTimeout(context.Background(), closeLimit)
		err := client.Close(soon)
		cancel()
		n.mu.Lock()
		if err == nil {
			n.closing = nil
			n.mu.Unlock()
			return
		}
		n.why = err
		n.mu.Unlock()
		time.Sleep(pause)
	}
}

// dial tries the addresses one after the other.
func (n *node) dial(ctx context.Context) (*serve.Client, error) {
	n.mu.Lock()
	d := n.description
	n.mu.Unlock()
	var errs []error
	for _, text := range d.Addresses {
		network, address, err := directory.SplitAddress(text)
		if err == nil && network == "unix" {
			_, err = os.Stat(address) // perhaps of another host
		}
		var client *serve.Client
		if err == nil {
			client, err = n.meet(ctx, &d, network, address)
		}
		if err == nil {
			return client, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", text, err))
	}
	return nil, errors.Join(errs...)
}

// meet dials one address. A server of another name is none of this node: where two hosts have the
// same path, it is of this one.
func (n *node) meet(ctx context.Context, d *directory.Node, network, address string) (
	*serve.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	var p *engine.Peer
	var err error
	if id := n.c.cfg.Identity; id != nil && d.Certificate != "" && network == "tcp" {
		var plain, secure net.Conn
		if plain, err = (&net.Dialer{}).DialContext(ctx, network, address); err != nil {
			return nil, err
		}
		secure, err = id.CheckName(d.Certificate).Call(ctx, plain, "")
		if err != nil {
			return nil, errors.Join(err, plain.Close())
		}
		p, err = n.c.cfg.Engine.DialConn(ctx, secure)
	} else {
		p, err = n.c.cfg.Engine.Dial(ctx, network, address)
	}
	if err != nil {
		return nil, err
	}
	if p.Name() != d.Name {
		return nil, errors.Join(fmt.Errorf("the server there has the name %q: the directory must "+
			"have the name that is in its config: %w", p.Name(), os.ErrPermission), p.Close())
	}
	return n.c.group.Meet(ctx, p)
}

// usable returns the connection, where the node is reached and not silent; else nil.
func (n *node) usable() *conn {
	n.mu.Lock()
	at := n.at
	n.mu.Unlock()
	if at == nil {
		return nil
	}
	at.mu.Lock()
	defer at.mu.Unlock()
	if at.silent {
		return nil
	}
	return at
}

// clients lists those that may have leases.
func (n *node) clients() (list []*serve.Client) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.at != nil {
		list = append(list, n.at.Client)
	}
	if n.closing != nil {
		list = append(list, n.closing)
	}
	return list
}

func (n *node) stats() NodeStats {
	at := n.usable()
	n.mu.Lock()
	defer n.mu.Unlock()
	s := NodeStats{Node: n.description, State: Serving, Requests: n.requests.Load(),
		Late: n.late.Load(), Failed: n.failed.Load(), Lost: n.lost.Load(),
		Hedged: n.hedged.Load()}
	s.Addresses = slices.Clone(s.Addresses)
	switch {
	case n.at == nil:
		s.State = Unreachable
	case at == nil:
		s.State = Silent
	}
	if n.why != nil {
		s.Why = n.why.Error()
	}
	return s
}

// failedBy counts a request that was not answered, or by an error. A node that was late is asked
// for nothing more until it answers.
func (c *conn) failedBy(err error, late bool) {
	n := c.n
	n.mu.Lock()
	n.why = err
	n.mu.Unlock()
	if !late {
		n.failed.Add(1)
		return
	}
	n.late.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent {
		return
	}
	c.silent = true
	go func() {
		for pause := pauseMin; c.Ping(context.Background()) != nil; pause = min(2*pause, pauseMax) {
			select { // a node that is busy refuses it
			case <-c.Lost():
				return
			case <-time.After(pause):
			}
		}
		c.mu.Lock()
		c.silent = false
		names := slices.Collect(maps.Keys(c.spaces))
		c.mu.Unlock()
		for _, name := range names { // those that were closed meanwhile
			n.c.mu.Lock()
			open := n.c.opens[name] > 0
			n.c.mu.Unlock()
			if !open {
				c.leave(name)
			}
		}
	}()
}

// suspect waits until a node that was late has answered anything.
func (c *conn) suspect() {
	defer c.n.doubts.Add(-1)
	soon, cancel := context.WithTimeout(context.Background(), c.n.c.cfg.Limit)
	defer cancel()
	if err := c.Ping(soon); err != nil {
		c.failedBy(err, soon.Err() != nil)
	}
}

// attach has the node have a lease of a region.
func (c *conn) attach(ctx context.Context, reg *region) error {
	reg.mu.Lock()
	if reg.over {
		reg.mu.Unlock()
		return fmt.Errorf("region %s is detached: %w", reg.Name(), engine.ErrBounds)
	}
	ended := make(chan error, 1)
	reg.attaching.Go(func() { // at the end of ctx it is not known whether the node has it
		soon, cancel := context.WithTimeout(reg.life, c.n.c.cfg.Limit)
		defer cancel()
		ended <- c.Attach(soon, reg.Region)
	})
	reg.mu.Unlock()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// revoke takes the lease of a region from the node, as the proof was missing that a call has ended.
// Others that run on that region fail by it.
func (c *conn) revoke(ctx context.Context, reg *region) error {
	c.revoking.Add(1)
	defer c.revoking.Add(-1)
	defer c.revoked.Add(1)
	return c.Detach(ctx, reg.Region)
}

// hasRevoked reports whether a call may have failed by revoke that began when so many had ended.
func (c *conn) hasRevoked(before uint64) bool {
	return c.revoking.Load() > 0 || c.revoked.Load() != before
}

// space opens a namespace, or returns the one that is open.
func (c *conn) space(ctx context.Context, name spaceName) (*serve.Space, error) {
	c.mu.Lock()
	o := c.spaces[name]
	if o == nil {
		o = &opening{done: make(chan struct{})}
		c.spaces[name] = o
		go func() {
			defer close(o.done)
			o.space, o.err = c.Namespace(context.Background(), name.name, name.geometry)
			if o.err != nil {
				c.mu.Lock()
				defer c.mu.Unlock()
				delete(c.spaces, name)
			}
		}()
	}
	c.mu.Unlock()
	select {
	case <-o.done:
		return o.space, o.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// leave closes a namespace, where it is open. A node that does not answer has it until the
// connection ends.
func (c *conn) leave(name spaceName) {
	c.mu.Lock()
	o := c.spaces[name]
	c.mu.Unlock()
	if o == nil {
		return
	}
	select {
	case <-o.done:
	default:
		return // it opens now, for who still uses it
	}
	c.mu.Lock()
	mine := c.spaces[name] == o
	if mine {
		delete(c.spaces, name)
	}
	c.mu.Unlock()
	if mine && o.err == nil {
		_ = o.space.Close()
	}
}
