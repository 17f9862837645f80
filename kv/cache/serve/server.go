// SPDX-License-Identifier: Apache-2.0

// Package serve lets other processes use a cache of this one: of this host, or of another.
//
// A client registers the memory that its model is served from, and leases it out to the server. A
// request names keys and slots in that memory; the server's cache writes to them, or reads from
// them, one-sided, and answers with an outcome for each block. So no byte of a block passes a
// message, and the client's own proof that nothing lands any more is the revoke of its lease.
//
// An operator is a client that asks for what all others have in the cache (inspect.go):
// Config.Inspect says who may be one.
//
// Messages go by the notifications of the two engines, each of which is for this alone: the
// server's Run and the Client read them.
package serve

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// Config is what New needs.
type Config struct {
	Cache  *cache.Cache
	Engine *engine.Engine // of the cache; its notifications are the server's

	// Options are what a namespace may have: New asks for each that the cache knows, and a client
	// that names one has it asked again. Nil: no quota, priority 0.
	Options func(name string) cache.NamespaceOptions

	// Inspect says which peers may ask for what is in the cache of all others; nil: those that come
	// over a Unix socket.
	Inspect func(p *engine.Peer) bool

	RequestsMax int // of one client at a time; default 64
	RegionsMax  int // of one client; default 64
	SpacesMax   int // of one client, before it dials again; default 64
	PinsMax     int // of one client, which may have 64 Ki keys together; default 64

	// PinTTLMax bounds how long a client may pin blocks: one that stands still keeps them as long.
	// Default 1 min.
	PinTTLMax time.Duration

	// AnswerTimeout bounds how long an answer may take to leave. Default 10 s.
	AnswerTimeout time.Duration
}

// Server serves a cache. Engine.Serve brings its clients.
type Server struct {
	cfg     Config
	mu      sync.Mutex
	clients map[*engine.Peer]*client
	count   int           // requests that run, of all clients
	drained chan struct{} // closed when none does any more; nil before Drain
	idle    bool          // drained is closed
	running sync.WaitGroup
	started time.Time
	took    map[kind]*latency // of those kinds that are measured

	opening sync.Mutex // one at a time asks Config.Options, and has the cache do as it says
}

// client is a peer that has said hello.
type client struct {
	peer      *engine.Peer
	ctx       context.Context // ends with the peer, or the server
	cancel    context.CancelFunc
	spaces    []*cache.Namespace
	regions   []imported
	importing sync.Mutex
	pins      map[uint32]*cache.Pin
	lastPin   uint32
	pinning   int                           // requests for pins
	pinKeys   int                           // of all pins, and of those requests
	ends      map[uint64]context.CancelFunc // of requests that may wait
	count     int                           // requests that run
	refuses   bool                          // a request that was too many is being answered
	running   sync.WaitGroup                // those, and that answer
}

// New makes a server.
func New(cfg Config) (*Server, error) {
	if cfg.Cache == nil || cfg.Engine == nil {
		return nil, errors.New("serve: no cache or no engine")
	}
	for _, f := range []*int{&cfg.RequestsMax, &cfg.RegionsMax, &cfg.SpacesMax, &cfg.PinsMax} {
		if *f == 0 {
			*f = 64
		}
		if *f < 1 || *f > 1<<16-1 {
			return nil, fmt.Errorf("serve: a bound of %d: %w", *f, engine.ErrBounds)
		}
	}
	if cfg.AnswerTimeout == 0 {
		cfg.AnswerTimeout = 10 * time.Second
	}
	if cfg.PinTTLMax == 0 {
		cfg.PinTTLMax = time.Minute
	}
	s := &Server{cfg: cfg, clients: map[*engine.Peer]*client{}, started: time.Now(),
		took: map[kind]*latency{}}
	for k := range measured {
		s.took[k] = &latency{}
	}
	return s, s.Reassign()
}

// Run serves until ctx ends, and returns when no request runs any more.
func (s *Server) Run(ctx context.Context) error {
	defer s.running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		n, err := s.cfg.Engine.Next(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("serve: %w", err)
		}
		switch {
		case n.Peer == nil: // of nobody that has dialled
		case n.Err != nil:
			s.forget(n.Peer)
		default:
			s.handle(ctx, n.Peer, n.Data)
		}
	}
}

// Drain refuses further requests, and waits until those that run have ended, or ctx has. Run goes
// on until its own context ends.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	if s.drained == nil {
		s.drained = make(chan struct{})
	}
	s.checkDrained()
	n := s.count
	s.mu.Unlock()
	select {
	case <-s.drained:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d requests of clients have not ended: %w", n, context.Cause(ctx))
	}
}

// checkDrained ends the wait of Drain once nothing runs. The caller holds mu.
func (s *Server) checkDrained() {
	if s.drained != nil && s.count == 0 && !s.idle {
		s.idle = true
		close(s.drained)
	}
}

// forget ends what runs for a peer that is gone.
func (s *Server) forget(p *engine.Peer) {
	s.mu.Lock()
	c := s.clients[p]
	delete(s.clients, p)
	s.mu.Unlock()
	if c != nil {
		c.cancel()
	}
}

// handle is the story of a message. It does not wait: what may runs in a goroutine, of which a
// client has RequestsMax.
func (s *Server) handle(ctx context.Context, p *engine.Peer, data []byte) {
	r := &reader{p: data}
	what, id := kind(r.u8()), r.u64()
	s.mu.Lock()
	c := s.clients[p]
	if c == nil {
		if what != kindHello || r.bad {
			s.mu.Unlock()
			return
		}
		c = &client{peer: p, ends: map[uint64]context.CancelFunc{}, pins: map[uint32]*cache.Pin{}}
		c.ctx, c.cancel = context.WithCancel(ctx)
		s.clients[p] = c
		s.running.Go(func() { // the last word of a connection may be left out
			select {
			case <-p.Lost():
			case <-c.ctx.Done():
			}
			s.close(c)
		})
	}
	if what == kindCancel {
		if end := c.ends[id]; end != nil {
			end()
			delete(c.ends, id)
		}
		s.mu.Unlock()
		return
	}
	if what == kindForget {
		if id < uint64(len(c.regions)) {
			c.regions[id].over = true
		}
		s.mu.Unlock()
		return
	}
	// A client has RequestsMax under way. Those whose answer has just left may count still.
	var refusal error
	switch n := c.count; {
	case s.drained != nil:
		refusal = fmt.Errorf("the server is about to end: %w", engine.ErrClosed)
	case n >= 2*s.cfg.RequestsMax:
		refusal = fmt.Errorf("%d requests run: %w", n, engine.ErrBusy)
	}
	if refusal != nil {
		if !c.refuses { // others that are too many by then are left to the client's own limits
			c.refuses = true
			c.running.Go(func() {
				s.send(c, answer(id, refusal, nil))
				s.mu.Lock()
				defer s.mu.Unlock()
				c.refuses = false
			})
		}
		s.mu.Unlock()
		return
	}
	c.count++
	s.count++
	reqCtx, end := context.WithCancel(c.ctx)
	if what.waits() {
		c.ends[id] = end
	}
	c.running.Go(func() {
		defer end()
		begin := time.Now()
		body, err := s.serve(reqCtx, c, what, r)
		if l := s.took[what]; l != nil {
			l.add(time.Since(begin))
		}
		s.mu.Lock()
		delete(c.ends, id)
		s.mu.Unlock()
		s.send(c, answer(id, err, body))
		s.mu.Lock()
		c.count--
		s.count--
		s.checkDrained()
		s.mu.Unlock()
	})
	s.mu.Unlock()
}

func (s *Server) send(c *client, msg []byte) {
	ctx, cancel := context.WithTimeout(c.ctx, s.cfg.AnswerTimeout)
	defer cancel()
	_ = c.peer.Notify(ctx, msg) // the client's own limit ends its wait
}

// close gives back what a client that is gone had, once nothing runs for it.
func (s *Server) close(c *client) {
	s.mu.Lock() // from here on handle begins nothing for it
	if s.clients[c.peer] == c {
		delete(s.clients, c.peer)
	}
	s.mu.Unlock()
	c.cancel()
	c.running.Wait()
	for _, p := range c.pins {
		p.Close()
	}
	for _, m := range c.regions {
		_ = m.Close() // a transfer without a proof may list it still
	}
	for _, n := range c.spaces {
		n.Close()
	}
}

// serve does what a request asks for.
func (s *Server) serve(ctx context.Context, c *client, what kind, r *reader) ([]byte, error) {
	switch what {
	case kindHello:
		if v := r.u32(); r.bad || v != version {
			return nil, fmt.Errorf("the client speaks version %d, this server %d: %w", v, version,
				engine.ErrVersion)
		}
		return binary.LittleEndian.AppendUint16(nil, uint16(s.cfg.RequestsMax)), nil
	case kindSpace:
		return s.openSpace(c, r)
	case kindRegion:
		return s.openRegion(c, r)
	case kindPinned, kindUnpin:
		return s.ofPin(c, what, r)
	}
	if what >= kindReport {
		return s.inspect(c, what, r)
	}
	n, err := s.space(c, r)
	if err != nil {
		return nil, err
	}
	switch what {
	case kindMatch:
		keys := r.keys(0)
		if r.bad {
			return nil, errGarbled
		}
		found := n.Match(keys).Blocks
		body := make([]byte, len(found))
		for k, f := range found {
			body[k] = byte(f)
		}
		return body, nil
	case kindRemove:
		keys := r.keys(0)
		if r.bad {
			return nil, errGarbled
		}
		return nil, n.Remove(keys)
	case kindLoad, kindStore:
		region, at := r.place()
		keys := r.keys(4)
		at.Slots = r.slots(len(keys))
		s.mu.Lock()
		if int(region) < len(c.regions) && !c.regions[region].over {
			at.Remote = c.regions[region].Remote
		}
		s.mu.Unlock()
		if r.bad {
			return nil, errGarbled
		}
		if at.Remote == nil {
			return nil, fmt.Errorf("region %d is none: %w", region, engine.ErrBounds)
		}
		at.Peer = c.peer
		var op *cache.Op
		if what == kindLoad {
			op = n.Load(ctx, keys, at)
		} else {
			op = n.Store(ctx, keys, at)
		}
		return ended(op)
	}
	return s.serveSpace(ctx, c, n, what, r)
}

// imported is a region of a client, until it says that it has revoked its lease.
type imported struct {
	*engine.Remote
	over bool
}

// ended waits for an operation, which its context ends, and returns its outcomes.
func ended(op *cache.Op) ([]byte, error) {
	<-op.Done()
	var body []byte
	for _, o := range op.Outcomes() {
		body = append(body, byte(o))
	}
	return body, op.Err()
}

// space is the namespace that a request begins with.
func (s *Server) space(c *client, r *reader) (*cache.Namespace, error) {
	space := int(r.u16())
	s.mu.Lock()
	defer s.mu.Unlock()
	if space >= len(c.spaces) {
		return nil, fmt.Errorf("namespace %d is none: %w", space, engine.ErrBounds)
	}
	return c.spaces[space], nil
}

func (s *Server) openSpace(c *client, r *reader) ([]byte, error) {
	var o cache.NamespaceOptions
	geometry := [32]byte(r.take(32))
	name := string(r.p)
	if r.bad {
		return nil, errGarbled
	}
	digest := cache.DigestOf(name, geometry)
	s.mu.Lock()
	_, err := s.spaceNumber(c, digest) // before the cache has a name more
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	s.opening.Lock()
	defer s.opening.Unlock()
	if s.cfg.Options != nil {
		o = s.cfg.Options(name)
	} else if n := s.cfg.Cache.Space(digest); n != nil {
		if n.Name() != "" {
			return s.addSpace(c, n) // as the program has it
		}
		n.Close()
	}
	o.Geometry = geometry
	n, err := s.cfg.Cache.Namespace(name, o)
	if err != nil {
		return nil, err
	}
	return s.addSpace(c, n)
}

// addSpace gives a client a namespace, by a number.
func (s *Server) addSpace(c *client, n *cache.Namespace) ([]byte, error) {
	s.mu.Lock()
	number, err := s.spaceNumber(c, n.Digest())
	further := err == nil && number == len(c.spaces)
	if further {
		c.spaces = append(c.spaces, n) // close ends it
	}
	s.mu.Unlock()
	if !further {
		n.Close()
	}
	if err != nil {
		return nil, err
	}
	return binary.LittleEndian.AppendUint16(nil, uint16(number)), nil
}

// spaceNumber is by which number a client has a namespace, or may have it. The caller holds the
// lock.
func (s *Server) spaceNumber(c *client, digest [16]byte) (int, error) {
	for k, n := range c.spaces {
		if n.Digest() == digest {
			return k, nil
		}
	}
	if len(c.spaces) >= s.cfg.SpacesMax {
		return 0, fmt.Errorf("%d namespaces of one client: %w", len(c.spaces), engine.ErrBusy)
	}
	return len(c.spaces), nil
}

func (s *Server) openRegion(c *client, r *reader) ([]byte, error) {
	m, err := c.peer.Import(r.p)
	if err != nil {
		return nil, err
	}
	c.importing.Lock() // so that no other request takes the number
	defer c.importing.Unlock()
	s.mu.Lock()
	regions := slices.Clone(c.regions)
	s.mu.Unlock()
	number := slices.IndexFunc(regions, func(i imported) bool {
		return i.over && i.Close() == nil // a request may list it still
	})
	if number < 0 && len(regions) >= s.cfg.RegionsMax {
		return nil, errors.Join(fmt.Errorf("%d regions of one client: %w", s.cfg.RegionsMax,
			engine.ErrBusy), m.Close())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if number < 0 {
		number = len(regions)
		c.regions = append(c.regions, imported{})
	}
	c.regions[number] = imported{Remote: m}
	return binary.LittleEndian.AppendUint16(nil, uint16(number)), nil
}
