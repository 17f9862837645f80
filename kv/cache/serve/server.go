// SPDX-License-Identifier: Apache-2.0

// Package serve lets other processes use a cache of this one: of this host, or of another.
//
// A client (client.go) registers the memory that its model is served from, and leases it out to the
// server. A request names keys and slots in that memory; the server's cache writes to them, or
// reads from them, one-sided, and answers with an outcome for each block. So no byte of a block
// passes a message, and a client has no key to the memory of the cache.
//
// What arrives: messages of one shape (wire.go), by the notifications of the two engines, each of
// which is for this alone: the server's Run and the Client read them.
//
//	hello                     the version; nothing else is heard before it
//	space, region, …          number a namespace, or a lease, for the requests that follow
//	leave, forget, unpin      give a number back
//	match, remove, hint, …    about the keys of a namespace; answered at once
//	pin                       keeps blocks; answered once those that were on a disk are read
//	load, store, replace, …   move blocks; answered once nothing of them moves any more
//	cancel                    ends one of those; it is answered all the same
//	digest                    what a node of a cluster has, once that changes (member.go)
//	report, spaces, blocks, … what operators ask for (inspect.go)
//
// What leaves: one answer for each request but forget, unpin and cancel, with the error in words
// and the known error that it is.
//
// The order of a request, in the server: handle looks at its head and admits it; a goroutine reads
// its body, does it (serve: one switch) and sends the answer; then it counts no longer. Each client
// has at most 64 requests, regions and namespaces (wire.go): a Client waits before it sends one
// request more, and one region or namespace more is engine.ErrBusy. All clients together have at
// most 768 namespaces open, so that the server's program can open some: one more is ErrNoRoom.
//
// What is proved to a client: when a Load or a Store has returned, nothing of it moves any more, or
// the error is engine.ErrUnproven. Then Client.Detach has the proof, by the revoke of the lease,
// which does not need the server: it may be stopped or dead.
//
// What is left of a client that is gone: its requests are cancelled, and once they have ended its
// regions, its pins, its namespaces and the connection are closed (Server.close). The blocks of a
// load that ran may go from then on. Blocks that it has retained stay for as long as the hint said,
// at most an hour.
package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
)

// Config is what New needs.
type Config struct {
	Cache  *cache.Cache
	Engine *engine.Engine // of the cache; its notifications are the server's

	// Options are what a namespace may have: New asks for each that the cache knows, and a client
	// that opens one has it asked again. Nil: no quota, priority 0.
	Options func(name string) cache.NamespaceOptions

	// Member makes the server a node of a cluster; nil: it is none.
	Member Member

	// Access says who may use the namespaces of a name, when one is opened, and at each request
	// from the next Reassign on. It is asked by "" for one that a disk alone has and nobody has
	// named since. Nil: whoever the engine serves may use all.
	Access func(name string) Access

	// Log is told of refusals: of up to eight at once, and of one a second, with the count of those
	// since the last one. Nil: nothing is.
	Log *slog.Logger

	// Inspect says which peers may ask for what is in the cache of all others; nil: those that come
	// over a Unix socket.
	Inspect func(p *engine.Peer) bool
}

// answerLimit bounds how long an answer may take to leave: a client that takes none for so long is
// disconnected, since it would wait for that one for ever.
const answerLimit = 10 * time.Second

// fullPause is between two tries to answer while the engine has no transfer left.
const fullPause = 5 * time.Millisecond

var errEnding = fmt.Errorf("the server is about to end: %w", engine.ErrClosed)

// Server serves a cache. Engine.Serve brings its clients.
type Server struct {
	cfg     Config
	started time.Time
	latency map[kind]*latency // of those kinds that are measured
	limit   time.Duration     // answerLimit
	names   int               // namesMax
	most    int               // bytesMax

	turn    atomic.Uint64 // of Reassign, from 1
	refused atomic.Int64  // requests, since the log was told
	telling *rate.Limiter
	logging sync.Mutex // while the log is told

	opening sync.Mutex // one at a time asks Config.Options, and has the cache do as it says

	graves   graves
	polling  context.Context // ends with Drain
	endPolls context.CancelFunc

	mu       sync.Mutex // guards what follows
	clients  map[*engine.Peer]*client
	running  sync.WaitGroup // of clients
	draining bool
	count    int              // requests that run, of all clients
	bytes    int              // of their messages
	open     map[[16]byte]int // namespaces: how many clients have each, also those that end
	requests sync.WaitGroup   // those
}

// client is a peer that has said hello. Its fields are guarded by the server's lock.
type client struct {
	peer       *engine.Peer
	ctx        context.Context // ends with the peer, or the server
	cancel     context.CancelFunc
	spaces     map[uint16]*space
	lastSpace  uint16 // number
	regions    map[uint16]region
	lastRegion uint16 // number
	pins       map[uint16]pin
	lastPin    uint16 // number
	importing  sync.Mutex
	ends       map[uint64]context.CancelFunc // of requests that run, by id
	count      int                           // requests that run
	answers    int                           // that are on their way
	bytes      int                           // of the messages of both
	polls      bool                          // a kindDigest of it waits; that is none of count
	running    sync.WaitGroup                // both
}

// space is a namespace that a client has open, until it has left it and its requests have ended.
type space struct {
	*cache.Namespace
	named   *SpaceName // nil: it was found by its digest
	opens   int        // for which no kindLeave has come
	running int        // requests
	has     rights
	turn    uint64 // for which has holds; 0: none
}

// pin is what a client has pinned, and the number of its namespace.
type pin struct {
	*cache.Pin
	space uint16
}

// region is memory of a client, until it says that it has revoked its lease.
type region struct {
	*engine.Remote
	revoked bool
}

// New makes a server.
func New(cfg Config) (*Server, error) {
	if cfg.Cache == nil || cfg.Engine == nil {
		return nil, errors.New("serve: no cache or no engine")
	}
	if cfg.Inspect == nil {
		cfg.Inspect = OverUnixSocket
	}
	s := &Server{cfg: cfg, clients: map[*engine.Peer]*client{}, started: time.Now(),
		latency: map[kind]*latency{}, limit: answerLimit, names: namesMax,
		most: bytesMax, open: map[[16]byte]int{},
		telling: rate.NewLimiter(1, 8)}
	s.polling, s.endPolls = context.WithCancel(context.Background())
	for k := range measured {
		s.latency[k] = &latency{}
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
		switch {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("serve: %w", err)
		case n.Peer == nil: // of nobody that has dialled
		case n.Err != nil: // its last word
			s.mu.Lock()
			if c := s.clients[n.Peer]; c != nil {
				c.cancel()
			}
			s.mu.Unlock()
		default:
			s.handle(ctx, n.Peer, n.Data)
		}
	}
}

// Drain refuses further requests, and waits until those that run have ended, or ctx has. Run goes
// on until its own context ends.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true // no request is added from here on
	s.endPolls()
	n := s.count
	s.mu.Unlock()
	ended := make(chan struct{})
	go func() { s.requests.Wait(); close(ended) }() // until Run returns, at the latest
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d requests of clients have not ended: %w", n, context.Cause(ctx))
	}
}

// handle is the story of a message. It does not wait: a request runs in a goroutine. It counts
// until its answer is about to leave, so that a client that has an answer may ask again. Who takes
// no answers gets none once answersMax wait for it.
func (s *Server) handle(ctx context.Context, p *engine.Peer, data []byte) {
	what, id, body := readHead(data)
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.clients[p]
	if c == nil {
		if what != kindHello {
			return
		}
		c = &client{peer: p, ends: map[uint64]context.CancelFunc{}, spaces: map[uint16]*space{},
			regions: map[uint16]region{}, pins: map[uint16]pin{}}
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
	switch what {
	case kindCancel:
		if end := c.ends[id]; end != nil {
			end()
			delete(c.ends, id)
		}
		return
	case kindForget:
		if r, is := c.regions[uint16(id)]; is && id <= math.MaxUint16 {
			c.regions[uint16(id)] = region{r.Remote, true}
		}
		return
	case kindUnpin:
		if held, is := c.pins[uint16(id)]; is && id <= math.MaxUint16 {
			c.running.Go(func() { s.unpin(c, uint16(id), held) })
		}
		return
	}

	if c.answers >= answersMax {
		return // a Client never has as many
	}
	if what == kindDigest && s.cfg.Member != nil && !s.draining && !c.polls {
		s.poll(c, id, body)
		return
	}
	var refused error
	switch {
	case s.draining:
		refused = errEnding
	case c.count >= 2*requestsMax: // a Client counts those no more of which it did not hear
		refused = fmt.Errorf("%d requests of this client run: %w", c.count, engine.ErrBusy)
	case what == kindLeave: // a namespace that is not given back stays until the client ends
	case s.count > 0 && s.bytes+len(data) > s.most:
		refused = fmt.Errorf("%d requests of all clients run, of %d bytes: %w", s.count, s.bytes,
			engine.ErrBusy)
	case c.bytes > 0 && c.bytes+len(data) > s.most/4:
		refused = fmt.Errorf("requests of %d bytes of this client run: %w", c.bytes, engine.ErrBusy)
	}
	if refused != nil {
		c.answers++
		c.running.Go(func() {
			s.send(c, id, refused, nil)
			s.mu.Lock()
			defer s.mu.Unlock()
			c.answers--
		})
		return
	}
	c.count++
	s.count++
	s.bytes += len(data)
	c.bytes += len(data)
	s.requests.Add(1)
	reqCtx, end := context.WithCancel(c.ctx)
	c.ends[id] = end
	c.running.Go(func() {
		defer s.requests.Done()
		defer end()
		begin := time.Now()
		body, err := s.serve(reqCtx, c, what, body)
		if l := s.latency[what]; l != nil {
			l.add(time.Since(begin))
		}
		s.mu.Lock()
		delete(c.ends, id)
		c.count--
		c.answers++
		s.mu.Unlock()
		s.send(c, id, err, body)
		testpoint.At("cache server: answered")
		s.mu.Lock()
		defer s.mu.Unlock()
		c.answers--
		s.count--
		s.bytes -= len(data)
		c.bytes -= len(data)
	})
}

// send answers a request. An answer that is longer than the client takes becomes one that says so.
func (s *Server) send(c *client, id uint64, failed error, body []byte) {
	ctx, cancel := context.WithTimeout(c.ctx, s.limit)
	defer cancel()
	msg := answer(id, failed, body)
	for {
		err := c.peer.Notify(ctx, msg)
		switch {
		case err == nil || c.ctx.Err() != nil:
			return
		case errors.Is(err, engine.ErrBounds) && len(body) > 0:
			body = nil
			msg = answer(id, fmt.Errorf("the answer: %w", err), nil)
		case errors.Is(err, engine.ErrFull) && ctx.Err() == nil:
			time.Sleep(fullPause)
		default:
			c.cancel() // and close ends the connection
			return
		}
	}
}

// close gives back what a client that is gone had, once nothing runs for it.
func (s *Server) close(c *client) {
	s.mu.Lock() // from here on handle begins nothing for it
	delete(s.clients, c.peer)
	s.mu.Unlock()
	c.cancel()
	c.running.Wait()
	for _, m := range c.regions {
		_ = m.Close() // a transfer without a proof may list it still
	}
	for number, held := range c.pins {
		s.unpin(c, number, held)
	}
	for _, n := range c.spaces {
		s.endSpace(n)
	}
	_ = c.peer.Close() // so that it learns, where it is not gone, that no answer comes any more
}

// serve does what a request asks for, and returns the body of its answer.
func (s *Server) serve(ctx context.Context, c *client, what kind, body []byte) ([]byte, error) {
	q, err := readRequest(body)
	if err != nil {
		return nil, err
	}
	switch what { // those of no namespace
	case kindHello:
		if q.number != version {
			return nil, fmt.Errorf("the client speaks version %d, this server %d: %w", q.number,
				version, engine.ErrVersion)
		}
		return nil, nil
	case kindSpace:
		return s.openSpace(c, q.rest)
	case kindRegion:
		return s.openRegion(c, q.rest)
	case kindDrain:
		return nil, s.cfg.Cache.Drain(ctx)
	case kindDigest:
		return nil, s.refusePoll()
	}
	if what >= kindReport && what != kindBlock {
		if err := s.mayInspect(c, what); err != nil {
			return nil, err
		}
	}
	switch what {
	case kindReport:
		return json.Marshal(s.Report())
	case kindSpaces:
		return json.Marshal(s.cfg.Cache.Spaces())
	case kindFind:
		return s.findSpace(c, q.rest)
	}

	n := s.useSpace(c, q.number)
	if n == nil {
		return nil, fmt.Errorf("namespace %d is none: %w", q.number, engine.ErrBounds)
	}
	defer s.leaveSpace(c, q.number, &n.running)
	if err := s.mayDo(c, what, n); err != nil {
		return nil, err
	}
	switch what {
	case kindLeave:
		s.leaveSpace(c, q.number, &n.opens)
		return nil, nil
	case kindMatch:
		return bytesOf(n.Match(q.keys).Blocks), nil
	case kindLoad, kindStore, kindReplace:
		at, of, err := s.place(c, &q)
		if err != nil {
			return nil, err
		}
		if what == kindReplace {
			return ended(n.Replace(ctx, q.keys, at))
		}
		return s.use(ctx, n, what == kindStore, q.keys, at, of)
	case kindPrefetch:
		return ended(n.Prefetch(ctx, q.keys))
	case kindPin:
		return s.pin(ctx, c, n, &q)
	case kindRemove:
		if s.cfg.Member != nil {
			s.graves.bury(n.Digest(), q.keys)
		}
		return nil, n.Remove(q.keys)
	case kindHint:
		var h cache.Hint
		if json.Unmarshal(q.rest, &h) != nil {
			return nil, errGarbled
		}
		result, err := n.Hint(q.keys, h)
		return inJSON(result, err)
	case kindEnvelope:
		outcomes, err := n.HintEnvelope(q.rest)
		return inJSON(outcomes, err)
	case kindEstimate:
		return json.Marshal(n.Estimate(q.keys))
	case kindBlocks:
		if len(q.rest) != 4 {
			return nil, errGarbled
		}
		list := make([]cache.BlockInfo, blocksMax)
		count, next := n.Blocks(le.Uint32(q.rest), list)
		return appendFixed(le.AppendUint32(nil, next), list[:count]), nil
	case kindBlock:
		if len(q.keys) != 1 {
			return nil, errGarbled
		}
		b, text := n.Explain(q.keys[0])
		if !s.cfg.Inspect(c.peer) { // who has the key may have the block
			text = ""
		}
		return json.Marshal(blockText{b, text})
	}
	return nil, fmt.Errorf("no request of kind %d: %w", what, engine.ErrNotSupported)
}

// ended waits for an operation, which its context ends, and returns its outcomes.
func ended(op *cache.Op) ([]byte, error) {
	<-op.Done()
	return bytesOf(op.Outcomes()), op.Err()
}

func bytesOf[T ~uint8](list []T) []byte {
	p := make([]byte, len(list))
	for k, v := range list {
		p[k] = byte(v)
	}
	return p
}

// inJSON is the body of an answer that has one beside its error.
func inJSON(v any, err error) ([]byte, error) {
	p, failed := json.Marshal(v)
	return p, errors.Join(err, failed)
}

// place is where the blocks of a request lie in the memory of its client.
func (s *Server) place(c *client, q *request) (cache.Place, []Segment, error) {
	number, at, of, err := readPlace(q.rest, len(q.keys))
	if err != nil {
		return at, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, is := c.regions[number]
	if !is || r.revoked {
		return at, nil, fmt.Errorf("region %d is none: %w", number, engine.ErrBounds)
	}
	at.Peer, at.Remote = c.peer, r.Remote
	return at, of, nil
}

// openSpace opens the namespace of a geometry and a name.
func (s *Server) openSpace(c *client, p []byte) ([]byte, error) {
	if len(p) < 32 {
		return nil, errGarbled
	}
	geometry, name := [32]byte(p), string(p[32:])
	salted, err := s.mayOpen(c, kindSpace, name, geometry)
	if err != nil {
		return nil, err
	}
	digest := cache.DigestOf(name, salted)
	named := &SpaceName{name, geometry, digest}
	return s.addSpace(c, digest, named, func() (*cache.Namespace, error) {
		o := cache.NamespaceOptions{}
		if s.cfg.Options != nil {
			o = s.cfg.Options(name)
		} else if n := s.cfg.Cache.Space(digest); n != nil {
			if n.Name() != "" {
				return n, nil // as the program has it
			}
			n.Close()
		}
		o.Geometry = salted
		return s.cfg.Cache.Namespace(name, o)
	})
}

// findSpace opens a namespace that the cache has, by its digest.
func (s *Server) findSpace(c *client, p []byte) ([]byte, error) {
	if len(p) != 16 {
		return nil, errGarbled
	}
	if n := s.cfg.Cache.Space([16]byte(p)); n != nil {
		_, err := s.mayOpen(c, kindFind, n.Name(), [32]byte{})
		if n.Close(); err != nil {
			return nil, err
		}
	}
	return s.addSpace(c, [16]byte(p), nil, func() (*cache.Namespace, error) {
		if n := s.cfg.Cache.Space([16]byte(p)); n != nil {
			return n, nil
		}
		return nil, fmt.Errorf("the cache has no namespace of digest %x: %w", p, engine.ErrBounds)
	})
}

// addSpace returns the number by which a client has a namespace. One that it has not is opened,
// unless it has too many: the cache then has no name more.
func (s *Server) addSpace(c *client, digest [16]byte, named *SpaceName,
	open func() (*cache.Namespace, error)) ([]byte, error) {
	s.opening.Lock()
	defer s.opening.Unlock()
	s.mu.Lock()
	for number, n := range c.spaces {
		if n.opens > 0 && n.Digest() == digest {
			n.opens++
			s.mu.Unlock()
			return json.Marshal(number)
		}
	}
	has, names, known := len(c.spaces), len(s.open), s.open[digest] > 0
	s.mu.Unlock()
	switch {
	case has == spacesMax:
		return nil, fmt.Errorf("%d namespaces of one client: close one: %w", has, engine.ErrBusy)
	case !known && names >= s.names:
		return nil, fmt.Errorf("the clients of the server have %d namespaces open, at most "+
			"%d: %w", names, s.names, cache.ErrNoRoom)
	}
	n, err := open()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c.lastSpace++; c.spaces[c.lastSpace] != nil; c.lastSpace++ {
	}
	c.spaces[c.lastSpace] = &space{Namespace: n, named: named, opens: 1}
	s.open[digest]++
	return json.Marshal(c.lastSpace)
}

// useSpace returns the namespace that a client has by a number, for a request, or nil.
func (s *Server) useSpace(c *client, number uint16) *space {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := c.spaces[number]
	if n == nil || n.opens == 0 {
		return nil
	}
	n.running++
	return n
}

// leaveSpace ends one use of a namespace: a request, or an open, where one is left. One that its
// client uses no more is given back, with its number, which comes again after all others alone: a
// request that is late finds none by it.
func (s *Server) leaveSpace(c *client, number uint16, uses *int) {
	s.mu.Lock()
	*uses = max(0, *uses-1)
	n := c.spaces[number]
	ends := n.opens == 0 && n.running == 0
	if ends {
		delete(c.spaces, number)
	}
	s.mu.Unlock()
	if ends {
		s.endSpace(n)
	}
}

// endSpace gives a namespace back to the cache that its client has no more.
func (s *Server) endSpace(n *space) {
	digest := n.Digest()
	n.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[digest]--; s.open[digest] == 0 {
		delete(s.open, digest)
	}
}

// openRegion imports a lease, and returns the number that it has from then on: one that comes again
// after all others alone, as of a namespace, so that a request that is late moves nothing
// elsewhere.
func (s *Server) openRegion(c *client, token []byte) ([]byte, error) {
	m, err := c.peer.Import(token)
	if err != nil {
		return nil, err
	}
	testpoint.At("serve: imported")
	c.importing.Lock() // so that no other request closes the same ones
	defer c.importing.Unlock()
	s.mu.Lock()
	gone := maps.Clone(c.regions)
	s.mu.Unlock()
	maps.DeleteFunc(gone, func(_ uint16, r region) bool {
		return !r.revoked || r.Close() != nil // a request may list it still
	})
	s.mu.Lock()
	for number := range gone {
		delete(c.regions, number)
	}
	if len(c.regions) == regionsMax {
		s.mu.Unlock()
		return nil, errors.Join(fmt.Errorf("%d regions of one client: %w", regionsMax,
			engine.ErrBusy), m.Close())
	}
	defer s.mu.Unlock()
	for c.lastRegion++; c.regions[c.lastRegion].Remote != nil; c.lastRegion++ {
	}
	c.regions[c.lastRegion] = region{Remote: m}
	return json.Marshal(c.lastRegion)
}

// pin pins blocks for a client, and returns the number of the pin and the outcomes. The pin counts
// as a request of its namespace, which so stays open.
func (s *Server) pin(ctx context.Context, c *client, n *space, q *request) ([]byte, error) {
	if len(q.rest) != 8 {
		return nil, errGarbled
	}
	ttl := time.Duration(le.Uint64(q.rest))
	if ttl < time.Second || ttl > time.Hour {
		return nil, fmt.Errorf("pin for %v: a second at least, and up to an hour: %w", ttl,
			engine.ErrBounds)
	}
	s.mu.Lock()
	var ended map[uint16]pin
	if len(c.pins) >= pinsMax {
		ended = maps.Clone(c.pins)
	}
	s.mu.Unlock()
	for number, held := range ended {
		select {
		case <-held.Done(): // by its time
			s.unpin(c, number, held)
		default:
		}
	}
	p, err := n.Namespace.Pin(ctx, q.keys, ttl)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	if len(c.pins) >= pinsMax {
		s.mu.Unlock()
		p.Close()
		return nil, fmt.Errorf("%d pins of one client: close one: %w", pinsMax, engine.ErrBusy)
	}
	defer s.mu.Unlock()
	for c.lastPin++; c.pins[c.lastPin].Pin != nil; c.lastPin++ {
	}
	c.pins[c.lastPin] = pin{p, q.number}
	n.running++
	return append(le.AppendUint16(nil, c.lastPin), bytesOf(p.Outcomes())...), nil
}

// unpin ends a pin, unless another goroutine has.
func (s *Server) unpin(c *client, number uint16, held pin) {
	held.Close()
	<-held.Done()
	s.mu.Lock()
	first, n := c.pins[number] == held, c.spaces[held.space]
	if first {
		delete(c.pins, number)
	}
	s.mu.Unlock()
	if first {
		s.leaveSpace(c, held.space, &n.running)
	}
}

// Reassign asks Config.Options anew for each namespace that the cache knows the name of, and
// Config.Access for each that a client has open, before the next request about it.
func (s *Server) Reassign() error {
	s.turn.Add(1)
	if s.cfg.Options == nil {
		return nil
	}
	s.opening.Lock()
	defer s.opening.Unlock()
	for _, n := range s.cfg.Cache.Spaces() {
		if n.Name == "" { // a disk knows its digest alone
			continue
		}
		if _, err := s.cfg.Cache.Set(n.Name, s.cfg.Options(n.Name)); err != nil {
			return err
		}
	}
	return nil
}
