// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// Client is a process that uses a cache of another one. All methods may be called by any goroutine,
// and wait for an answer until their context ends; Load, Store, Prefetch and Pin then wait for the
// word that nothing of them runs any more, for up to ten seconds.
type Client struct {
	e      *engine.Engine
	peer   *engine.Peer
	cancel context.CancelFunc
	ended  chan struct{} // closed when no answer comes any more
	room   chan struct{} // one for each request that runs

	attaching sync.Mutex // one Attach at a time: a region has one lease
	mu        sync.Mutex
	last      uint64
	waiting   map[uint64]chan []byte
	regions   map[*engine.Region]*region
}

// region is memory that was leased out to the server.
type region struct {
	number uint16
	lease  *engine.Lease
}

// cancelGrace is how long a request whose context has ended waits for the answer that nothing of it
// moves any more.
const cancelGrace = 10 * time.Second

// forgetLimit is how long Detach may wait for a server that takes no word.
const forgetLimit = time.Second

// Dial connects to a server at an address, as Engine.Dial does. The engine's notifications are the
// client's until Close.
func Dial(ctx context.Context, e *engine.Engine, network, address string) (*Client, error) {
	p, err := e.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &Client{e: e, peer: p, ended: make(chan struct{}), room: make(chan struct{}, 1),
		waiting: map[uint64]chan []byte{}, regions: map[*engine.Region]*region{}}
	var life context.Context
	life, c.cancel = context.WithCancel(context.Background())
	go c.listen(life)
	body, err := c.ask(ctx, kindHello, binary.LittleEndian.AppendUint32(nil, version))
	if err == nil && len(body) != 2 {
		err = errGarbled
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("meet the cache: %w", err), c.Close(ctx))
	}
	c.room = make(chan struct{}, max(1, binary.LittleEndian.Uint16(body)))
	return c, nil
}

// listen hands answers to who waits for them.
func (c *Client) listen(ctx context.Context) {
	defer close(c.ended)
	go func() {
		select {
		case <-c.peer.Lost():
			c.cancel()
		case <-ctx.Done():
		}
	}()
	for {
		n, err := c.e.Next(ctx)
		if err != nil {
			return
		}
		if n.Peer != c.peer || n.Err != nil {
			continue
		}
		r := &reader{p: n.Data}
		if kind(r.u8()) != kindAnswered {
			continue
		}
		id := r.u64()
		c.mu.Lock()
		to := c.waiting[id]
		delete(c.waiting, id)
		c.mu.Unlock()
		if to != nil && !r.bad {
			to <- r.p // it has room
		}
	}
}

// ask sends a request and waits for its answer, and before it until fewer run than the server takes
// at a time: what is too many it may leave without an answer.
func (c *Client) ask(ctx context.Context, what kind, body []byte) ([]byte, error) {
	room := c.room
	select {
	case room <- struct{}{}:
		defer func() { <-room }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-c.ended:
		return nil, errGone
	}
	to := make(chan []byte, 1)
	c.mu.Lock()
	c.last++
	id := c.last
	c.waiting[id] = to
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
	}()
	if err := c.peer.Notify(ctx, append(head(what, id), body...)); err != nil {
		return nil, gone(err)
	}
	select {
	case p := <-to:
		return readAnswer(&reader{p: p})
	case <-c.ended:
		return nil, errGone
	case <-ctx.Done():
	}
	if !what.waits() {
		return nil, context.Cause(ctx)
	}
	// Until the server says that the request has ended, bytes of it may move.
	soon, cancel := context.WithTimeout(context.Background(), cancelGrace)
	defer cancel()
	_ = c.peer.Notify(soon, head(kindCancel, id))
	select {
	case p := <-to:
		body, err := readAnswer(&reader{p: p})
		return body, errors.Join(context.Cause(ctx), err)
	case <-c.ended:
	case <-soon.Done():
	}
	if what != kindLoad && what != kindStore {
		return nil, context.Cause(ctx)
	}
	return nil, fmt.Errorf("%w: %w: Detach the region before you use its memory",
		context.Cause(ctx), engine.ErrUnproven)
}

// Attach leases a region out to the server, so that requests may name it. One that is attached
// stays so.
func (c *Client) Attach(ctx context.Context, r *engine.Region) error {
	c.attaching.Lock()
	defer c.attaching.Unlock()
	c.mu.Lock()
	at := c.regions[r]
	c.mu.Unlock()
	if at != nil {
		return nil
	}
	lease, err := r.Lease(0, r.Size(), engine.LeaseOptions{})
	if err != nil {
		return err
	}
	body, err := c.ask(ctx, kindRegion, lease.Token())
	if err == nil && len(body) != 2 {
		err = errGarbled
	}
	if err != nil {
		soon, cancel := context.WithTimeout(context.Background(), cancelGrace)
		defer cancel()
		return errors.Join(fmt.Errorf("attach region %s: %w", r.Name(), err), lease.Revoke(soon))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.regions[r] = &region{binary.LittleEndian.Uint16(body), lease}
	return nil
}

// Detach ends Attach. When it returns nil the server neither reads nor writes the memory any more,
// whatever state it is in.
func (c *Client) Detach(ctx context.Context, r *engine.Region) error {
	at, err := c.revoke(ctx, r)
	if at == nil || err != nil {
		return err
	}
	// So that the server gives its number to another. One that takes no word keeps the number.
	soon, cancel := context.WithTimeout(ctx, forgetLimit)
	defer cancel()
	_ = c.peer.Notify(soon, head(kindForget, uint64(at.number)))
	return nil
}

// revoke ends the lease of a region, and returns what it was to the server; nil: nothing, or
// another call has ended it.
func (c *Client) revoke(ctx context.Context, r *engine.Region) (*region, error) {
	c.mu.Lock()
	at := c.regions[r]
	c.mu.Unlock()
	if at == nil {
		return nil, nil
	}
	if err := at.lease.Revoke(ctx); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.regions[r] != at {
		return nil, nil
	}
	delete(c.regions, r)
	return at, nil
}

// Close detaches all regions and ends the connection. An error says that the server may still reach
// memory of this process; Close may be called again.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	var list []*engine.Region
	for r := range c.regions {
		list = append(list, r)
	}
	c.mu.Unlock()
	var errs []error
	for _, r := range list {
		_, err := c.revoke(ctx, r)
		errs = append(errs, err)
	}
	c.cancel()
	<-c.ended
	return errors.Join(append(errs, c.peer.Close())...)
}

// Space is a namespace of the server's cache.
type Space struct {
	c      *Client
	number uint16
}

// Namespace opens a namespace; geometry is as in cache.NamespaceOptions. What it may have the
// server says.
func (c *Client) Namespace(ctx context.Context, name string, geometry [32]byte) (*Space, error) {
	body, err := c.ask(ctx, kindSpace, append(geometry[:], name...))
	if err == nil && len(body) != 2 {
		err = errGarbled
	}
	if err != nil {
		return nil, fmt.Errorf("namespace %q: %w", name, err)
	}
	return &Space{c, binary.LittleEndian.Uint16(body)}, nil
}

// Place says where blocks lie in a region of this process, as cache.Place does.
type Place struct {
	Region *engine.Region // attached
	Base   uint64         // bytes
	Stride uint64         // bytes
	Slots  []uint32       // of each key
	Run    uint64         // contiguous bytes
	Loops  []cache.Axis   // outermost first; none: a block is one run
}

// Match looks for blocks.
func (s *Space) Match(ctx context.Context, keys []cache.Key) (m cache.Match, err error) {
	body, err := s.ask(ctx, kindMatch, nil, keys, nil)
	if err == nil && len(body) != len(keys) {
		err = errGarbled
	}
	if err != nil {
		return m, fmt.Errorf("match: %w", err)
	}
	m.Blocks = make([]cache.Found, len(keys))
	for k := range m.Blocks {
		m.Blocks[k] = cache.Found(body[k])
	}
	for m.Prefix < len(keys) && m.Blocks[m.Prefix].There() {
		m.Prefix++
	}
	return m, nil
}

// Remove forgets blocks, as Namespace.Remove.
func (s *Space) Remove(ctx context.Context, keys []cache.Key) error {
	_, err := s.ask(ctx, kindRemove, nil, keys, nil)
	return err
}

// Load has the server write blocks to a place, and returns what became of each. When ctx ends
// first, Load waits up to ten seconds for the word that nothing moves any more; without it the
// error is engine.ErrUnproven.
func (s *Space) Load(ctx context.Context, keys []cache.Key, to Place) ([]cache.Outcome, error) {
	return s.move(ctx, kindLoad, keys, &to)
}

// Store has the server read blocks from a place, which may be used again then; it is as Load.
func (s *Space) Store(ctx context.Context, keys []cache.Key, from Place) ([]cache.Outcome, error) {
	return s.move(ctx, kindStore, keys, &from)
}

func (s *Space) move(ctx context.Context, what kind, keys []cache.Key, at *Place) (
	[]cache.Outcome, error) {
	s.c.mu.Lock()
	r := s.c.regions[at.Region]
	s.c.mu.Unlock()
	if r == nil {
		return nil, fmt.Errorf("the region of the place is not attached: %w", engine.ErrBounds)
	}
	if len(at.Slots) != len(keys) || len(at.Loops) > math.MaxUint8 {
		return nil, fmt.Errorf("%d slots for %d keys: %w", len(at.Slots), len(keys),
			engine.ErrBounds)
	}
	place := appendPlace(nil, r.number, &cache.Place{Base: at.Base, Stride: at.Stride, Run: at.Run,
		Loops: at.Loops})
	body, err := s.ask(ctx, what, place, keys, at.Slots)
	return outcomesOf(body, len(keys), err)
}

// outcomesOf reads an answer of so many outcomes.
func outcomesOf(body []byte, n int, err error) ([]cache.Outcome, error) {
	if len(body) != n {
		if err == nil {
			err = errGarbled
		}
		return nil, err
	}
	list := make([]cache.Outcome, n)
	for k := range list {
		list[k] = cache.Outcome(body[k])
	}
	return list, err
}

func (s *Space) ask(ctx context.Context, what kind, place []byte, keys []cache.Key,
	slots []uint32) ([]byte, error) {
	if len(keys) > keysMax {
		return nil, fmt.Errorf("%d keys, at most %d a call: %w", len(keys), keysMax,
			engine.ErrBounds)
	}
	p := binary.LittleEndian.AppendUint16(nil, s.number)
	p = appendKeys(append(p, place...), keys)
	for _, slot := range slots {
		p = binary.LittleEndian.AppendUint32(p, slot)
	}
	return s.c.ask(ctx, what, p)
}
