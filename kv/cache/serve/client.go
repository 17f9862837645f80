// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
)

// Client is a process that uses a cache of another one. All methods may be called by any goroutine,
// and wait for an answer until their context ends; Load, Store, Prefetch and Drain then wait up to
// two seconds more for the word that nothing of them runs any more.
type Client struct {
	peer   *engine.Peer
	group  *Group
	alone  bool // the group is this client's
	cancel context.CancelFunc
	ended  chan struct{} // closed when no answer comes any more
	room   chan struct{} // one for each of waiting
	grace  time.Duration // cancelGrace

	attaching chan struct{}          // has room for one Attach: a region has one lease
	mu        sync.Mutex             // guards what follows
	last      uint64                 // id of a request
	waiting   map[uint64]chan []byte // of requests without an answer, also those given up
	regions   map[*engine.Region]attached
}

// attached is memory that was leased out to the server.
type attached struct {
	number uint16
	lease  *engine.Lease
}

// cancelGrace is how long a request whose context has ended waits for the answer that nothing of it
// moves any more.
const cancelGrace = 2 * time.Second

// forgetLimit is how long a number's end may wait for a server that takes no word, or has none.
const forgetLimit = time.Second

// errGone is the error of a request to a server that has ended.
var errGone = fmt.Errorf("the server of the cache is gone: connect again: %w", engine.ErrPeerLost)

// Dial connects to a server at an address, as Engine.Dial does. The engine's notifications are the
// client's until Close: a Group has several clients of one engine.
func Dial(ctx context.Context, e *engine.Engine, network, address string) (*Client, error) {
	g := NewGroup(e)
	c, err := g.Dial(ctx, network, address)
	if err != nil {
		g.Close()
		return nil, err
	}
	c.alone = true
	return c, nil
}

// Lost is closed when no answer comes any more: the server is gone, or the client is closed.
func (c *Client) Lost() <-chan struct{} { return c.ended }

// Name returns the name of the server's engine.
func (c *Client) Name() string { return c.peer.Name() }

// Ping waits until the server answers.
func (c *Client) Ping(ctx context.Context) error {
	_, err := c.ask(ctx, kindHello, request{number: version})
	return err
}

// answered ends a request to the server, which makes room for another. It returns where its answer
// goes; nil: it has ended.
func (c *Client) answered(id uint64) chan []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	to := c.waiting[id]
	if to != nil {
		delete(c.waiting, id)
		<-c.room
	}
	return to
}

// ask sends a request and waits for its answer, and before it until the server has answered enough
// of those before, also of those whose context has ended: what is too many it may leave without an
// answer.
func (c *Client) ask(ctx context.Context, what kind, q request) ([]byte, error) {
	if len(q.keys) > keysMax {
		return nil, fmt.Errorf("%d keys, at most %d a call: %w", len(q.keys), keysMax,
			engine.ErrBounds)
	}
	if isClosed(c.ended) {
		return nil, errGone
	}
	select {
	case c.room <- struct{}{}: // until answered
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
	if err := c.peer.Notify(ctx, q.append(head(what, id))); err != nil {
		c.answered(id)
		if errors.Is(err, engine.ErrPeerLost) {
			err = errGone
		}
		if isClosed(c.peer.Lost()) { // perhaps behind the request
			err = c.unproven(&q, err)
		}
		return nil, err
	}
	select {
	case p := <-to:
		return readAnswer(p)
	case <-c.ended:
		return nil, c.unproven(&q, errGone)
	case <-ctx.Done():
	}
	switch what {
	case kindRegion:
		go c.lateNumber(to, func(number uint16) { c.forget(context.Background(), number) })
	case kindSpace, kindFind:
		go c.lateNumber(to, func(number uint16) { _ = (&Space{c: c, number: number}).Close() })
	case kindPin:
		go c.latePin(to)
	}
	if !what.waits() {
		return nil, context.Cause(ctx)
	}

	// Until the server says that the request has ended, bytes of it may move.
	soon, cancel := context.WithTimeout(context.Background(), c.grace)
	defer cancel()
	_ = c.peer.Notify(soon, head(kindCancel, id))
	select {
	case p := <-to:
		body, err := readAnswer(p)
		return body, errors.Join(context.Cause(ctx), err)
	case <-c.ended:
	case <-soon.Done():
	}
	return nil, c.unproven(&q, context.Cause(ctx))
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// unproven returns the error of a request that was sent and not answered: bytes of it may move
// until its region is detached, however the server is.
func (c *Client) unproven(q *request, err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, is := c.regions[q.region]; !is { // it names none, or the lease was revoked
		return err
	}
	return fmt.Errorf("%w: %w: detach the region before its memory is used again", err,
		engine.ErrUnproven)
}

// askJSON is ask for what is answered in JSON, which may come with an error.
func askJSON[T any](ctx context.Context, c *Client, what kind, q request) (v T, err error) {
	body, err := c.ask(ctx, what, q)
	if (err == nil || len(body) > 0) && json.Unmarshal(body, &v) != nil {
		err = errors.Join(err, errGarbled)
	}
	return v, err
}

// askBytes is ask for what is answered by a byte for each key, which may come with an error.
func askBytes[T ~uint8](ctx context.Context, c *Client, what kind, q request) ([]T, error) {
	body, err := c.ask(ctx, what, q)
	if len(body) != len(q.keys) {
		if err == nil {
			err = errGarbled
		}
		return nil, err
	}
	list := make([]T, len(body))
	for k, b := range body {
		list[k] = T(b)
	}
	return list, err
}

// Attach leases a region out to the server, so that requests may name it. One that is attached
// stays so.
func (c *Client) Attach(ctx context.Context, r *engine.Region) error {
	select {
	case c.attaching <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("attach region %s: %w", r.Name(), context.Cause(ctx))
	}
	defer func() { <-c.attaching }()
	c.mu.Lock()
	_, is := c.regions[r]
	c.mu.Unlock()
	if is {
		return nil
	}
	lease, err := r.Lease(0, r.Size(), engine.LeaseOptions{})
	if err != nil {
		return err
	}
	number, err := askJSON[uint16](ctx, c, kindRegion, request{rest: lease.Token()})
	if err != nil {
		soon, cancel := context.WithTimeout(context.Background(), c.grace)
		defer cancel()
		return errors.Join(fmt.Errorf("attach region %s: %w", r.Name(), err), lease.Revoke(soon))
	}
	testpoint.At("serve: attached")
	c.mu.Lock()
	defer c.mu.Unlock()
	c.regions[r] = attached{number, lease}
	return nil
}

// lateNumber gives a number back that comes when nobody waits for it any more.
func (c *Client) lateNumber(answer <-chan []byte, giveBack func(number uint16)) {
	c.lateAnswer(answer, func(body []byte) {
		var number uint16
		if json.Unmarshal(body, &number) == nil {
			giveBack(number)
		}
	})
}

// latePin ends a pin that nobody waits for any more.
func (c *Client) latePin(answer <-chan []byte) {
	c.lateAnswer(answer, func(body []byte) {
		if p, err := readPin(c, body); err == nil {
			_ = p.Close()
		}
	})
}

// lateAnswer waits for the answer to a request that nobody waits for any more.
func (c *Client) lateAnswer(answer <-chan []byte, giveBack func(body []byte)) {
	select {
	case p := <-answer:
		if body, err := readAnswer(p); err == nil {
			giveBack(body)
		}
	case <-c.ended:
	}
}

// forget lets the server give a number to another region. One that takes no word keeps it.
func (c *Client) forget(ctx context.Context, number uint16) {
	soon, cancel := context.WithTimeout(ctx, forgetLimit)
	defer cancel()
	_ = c.peer.Notify(soon, head(kindForget, uint64(number)))
}

// Detach ends Attach. When it returns nil the server neither reads nor writes the memory any more,
// whatever state it is in.
func (c *Client) Detach(ctx context.Context, r *engine.Region) error {
	number, first, err := c.revoke(ctx, r)
	if err != nil || !first {
		return err
	}
	c.forget(ctx, number)
	return nil
}

// revoke ends the lease of a region, and returns the number that it had to the server. first: no
// other call has ended it.
func (c *Client) revoke(ctx context.Context, r *engine.Region) (number uint16, first bool,
	err error) {
	c.mu.Lock()
	at, is := c.regions[r]
	c.mu.Unlock()
	if !is {
		return 0, false, nil
	}
	if err := at.lease.Revoke(ctx); err != nil {
		return 0, false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	first = c.regions[r] == at
	if first {
		delete(c.regions, r)
	}
	return at.number, first, nil
}

// Close detaches all regions and ends the connection. An error says that the server may still reach
// memory of this process; Close may be called again.
func (c *Client) Close(ctx context.Context) error {
	_ = c.revokeAll(ctx)
	c.cancel()
	<-c.ended
	c.attaching <- struct{}{} // one that had its answer at this moment has a lease, too
	err := c.revokeAll(ctx)
	<-c.attaching
	if c.alone {
		c.group.Close()
	}
	return errors.Join(err, c.peer.Close())
}

// revokeAll ends the leases of all regions that are attached.
func (c *Client) revokeAll(ctx context.Context) error {
	c.mu.Lock()
	list := slices.Collect(maps.Keys(c.regions))
	c.mu.Unlock()
	var errs []error
	for _, r := range list {
		_, _, err := c.revoke(ctx, r)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Drain waits until all blocks that the cache was given are on its disks, or will not be.
func (c *Client) Drain(ctx context.Context) error {
	_, err := c.ask(ctx, kindDrain, request{})
	return err
}

// Space is a namespace of the server's cache.
type Space struct {
	c      *Client
	number uint16
	closed atomic.Bool
}

// Close ends its use; the blocks stay. Wait for its operations before, and do not use it again. The
// server gives the name back then, unless the client has opened it more often. Close waits at most
// a second for the server; after context.DeadlineExceeded that has the name until it takes the
// request, or the Client is closed.
func (s *Space) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	ended := make(chan error, 1)
	go func() { // the request goes, however long others take, unless the client ends
		_, err := s.c.ask(context.Background(), kindLeave, s.about(nil))
		ended <- err
	}()
	limit := time.NewTimer(forgetLimit)
	defer limit.Stop()
	select {
	case err := <-ended:
		return err
	case <-limit.C:
		return fmt.Errorf("close a namespace: the server has not answered within %v: %w",
			forgetLimit, context.DeadlineExceeded)
	}
}

// Namespace opens a namespace; geometry is as in cache.NamespaceOptions. What it may have the
// server says.
func (c *Client) Namespace(ctx context.Context, name string, geometry [32]byte) (*Space, error) {
	s, err := c.openSpace(ctx, kindSpace, append(geometry[:], name...))
	if err != nil {
		return nil, fmt.Errorf("namespace %q: %w", name, err)
	}
	return s, nil
}

func (c *Client) openSpace(ctx context.Context, what kind, rest []byte) (*Space, error) {
	number, err := askJSON[uint16](ctx, c, what, request{rest: rest})
	if err != nil {
		return nil, err
	}
	return &Space{c: c, number: number}, nil
}

func (s *Space) about(keys []cache.Key) request { return request{number: s.number, keys: keys} }

// Place says where blocks lie in a region of this process, as cache.Place does.
type Place struct {
	Region *engine.Region // attached
	Base   uint64         // bytes
	Stride uint64         // bytes
	Slots  []uint32       // of each key
	Run    uint64         // contiguous bytes
	Loops  []cache.Axis   // outermost first, at most eight; none: a block is one run

	// Segments are those of all keys, in order, to a node of a cluster; none: the call is not about
	// chains of a cluster.
	Segments []Segment
	// Copy: as of cache.Place. A node of a cluster takes no copy of a block that was removed
	// while it was on its way.
	Copy bool
}

// Match looks for blocks. What it finds may go before a Load, but for what cache.HintRetain keeps.
func (s *Space) Match(ctx context.Context, keys []cache.Key) (m cache.Match, err error) {
	if m.Blocks, err = askBytes[cache.Found](ctx, s.c, kindMatch, s.about(keys)); err != nil {
		return cache.Match{}, fmt.Errorf("match: %w", err)
	}
	for m.Prefix < len(keys) && m.Blocks[m.Prefix].There() {
		m.Prefix++
	}
	return m, nil
}

// Pin keeps blocks in the memory of a server until its Close, its time, or the client's end: as
// cache.Pin, but that it has no View. Any client may load them meanwhile.
type Pin struct {
	c        *Client
	number   uint16
	outcomes []cache.Outcome
	closed   atomic.Bool
}

// Pin has the server's cache keep blocks, as Namespace.Pin; ttl is from a second to an hour.
func (s *Space) Pin(ctx context.Context, keys []cache.Key, ttl time.Duration) (*Pin, error) {
	q := s.about(keys)
	q.rest = le.AppendUint64(nil, uint64(ttl))
	body, err := s.c.ask(ctx, kindPin, q)
	if err != nil {
		return nil, fmt.Errorf("pin: %w", err)
	}
	p, err := readPin(s.c, body)
	if err == nil && len(p.outcomes) != len(keys) {
		err = errors.Join(errGarbled, p.Close())
	}
	return p, err
}

// readPin reads the answer to kindPin.
func readPin(c *Client, body []byte) (*Pin, error) {
	if len(body) < 2 {
		return nil, errGarbled
	}
	p := &Pin{c: c, number: le.Uint16(body)}
	for _, b := range body[2:] {
		p.outcomes = append(p.outcomes, cache.Outcome(b))
	}
	return p, nil
}

// Outcomes says of each block whether it is pinned: Done.
func (p *Pin) Outcomes() []cache.Outcome { return p.outcomes }

// Close ends the pin. It does not wait for the server, whose pin ends by its time at the latest.
func (p *Pin) Close() error {
	if p.closed.Swap(true) {
		return nil
	}
	soon, cancel := context.WithTimeout(context.Background(), forgetLimit)
	defer cancel()
	return p.c.peer.Notify(soon, head(kindUnpin, uint64(p.number)))
}

// Remove forgets blocks, as Namespace.Remove.
func (s *Space) Remove(ctx context.Context, keys []cache.Key) error {
	_, err := s.c.ask(ctx, kindRemove, s.about(keys))
	return err
}

// Load has the server write blocks to a place, and returns what became of each. When ctx ends
// first, Load waits up to two seconds for the word that nothing moves any more; without it, or when
// the connection ends before, the error is engine.ErrUnproven.
func (s *Space) Load(ctx context.Context, keys []cache.Key, to Place) ([]cache.Outcome, error) {
	return s.move(ctx, kindLoad, keys, &to)
}

// Store has the server read blocks from a place, which may be used again then; it is as Load.
func (s *Space) Store(ctx context.Context, keys []cache.Key, from Place) ([]cache.Outcome, error) {
	return s.move(ctx, kindStore, keys, &from)
}

// Replace is Store for blocks that take the place of those that their keys have, as
// Namespace.Replace does.
func (s *Space) Replace(ctx context.Context, keys []cache.Key, from Place) ([]cache.Outcome,
	error) {
	return s.move(ctx, kindReplace, keys, &from)
}

func (s *Space) move(ctx context.Context, what kind, keys []cache.Key, at *Place) (
	[]cache.Outcome, error) {
	s.c.mu.Lock()
	r, is := s.c.regions[at.Region]
	s.c.mu.Unlock()
	if !is {
		return nil, fmt.Errorf("the region of the place is not attached: %w", engine.ErrBounds)
	}
	if len(at.Slots) != len(keys) || len(at.Loops) > loopsMax ||
		!areSegments(at.Segments, len(keys)) {
		return nil, fmt.Errorf("%d slots for %d keys, %d loops of at most %d, %d segments: %w",
			len(at.Slots), len(keys), len(at.Loops), loopsMax, len(at.Segments), engine.ErrBounds)
	}
	q := s.about(keys)
	q.rest, q.region = appendPlace(nil, r.number, at), at.Region
	return askBytes[cache.Outcome](ctx, s.c, what, q)
}

// Prefetch has the server's cache bring blocks into its memory.
func (s *Space) Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error) {
	return askBytes[cache.Outcome](ctx, s.c, kindPrefetch, s.about(keys))
}

// Hint has the server's cache heed a hint.
func (s *Space) Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (cache.HintResult,
	error) {
	q := s.about(keys)
	q.rest, _ = json.Marshal(h) // two numbers
	return askJSON[cache.HintResult](ctx, s.c, kindHint, q)
}

// HintEnvelope has the server's cache heed an envelope of hints, as cache.Namespace.HintEnvelope.
func (s *Space) HintEnvelope(ctx context.Context, data []byte) ([]cache.ActionOutcome, error) {
	return askJSON[[]cache.ActionOutcome](ctx, s.c, kindEnvelope,
		request{number: s.number, rest: data})
}

// Estimate returns the cost of a Load of blocks by the server's cache; the way from there to this
// process is part of the rate of copies.
func (s *Space) Estimate(ctx context.Context, keys []cache.Key) (cache.Estimate, error) {
	return askJSON[cache.Estimate](ctx, s.c, kindEstimate, s.about(keys))
}
