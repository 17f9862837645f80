// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// Member is what a node of a cluster is beside its server: kv/cluster/member. Any goroutine calls
// its methods.
type Member interface {
	// Used is told of each Load and Store whose client has named segments, once it has ended. It
	// does not wait, and may keep the Use, which nobody changes.
	Used(u *Use)
	// Digest returns what a client is to know that has all up to since, and the since for the next
	// call. It waits until there is something new, or ctx ends. An empty since is that of a client
	// that knows nothing.
	Digest(ctx context.Context, since []byte) (digest, next []byte, err error)
	// Report tells what it moves.
	Report() Copies
}

// Segment is some keys in a row of a call that are blocks in a row of a chain, all of one segment
// of it (kv/cluster/placement).
type Segment struct {
	Head   cache.Key // of the first block of the segment
	First  uint32    // place in the chain of the first of these keys
	Blocks uint32    // keys
}

const segmentBytes = 16 + 4 + 4

// areSegments reports whether segments have so many keys together; none are of any number.
func areSegments(list []Segment, keys int) bool {
	left := uint64(keys)
	for _, s := range list {
		if s.Blocks == 0 || uint64(s.Blocks) > left || s.First > math.MaxInt32-s.Blocks {
			return false
		}
		left -= uint64(s.Blocks)
	}
	return left == 0 || len(list) == 0
}

// SpaceName is what a client has opened a namespace by.
type SpaceName struct {
	Name     string
	Geometry [32]byte
	Digest   [16]byte // of both
}

// Use is a Load or a Store of a client of a cluster that has ended.
type Use struct {
	Space       *SpaceName
	Store, Copy bool   // Copy: by another node
	Bytes       uint64 // of a block
	Keys        []cache.Key
	Segments    []Segment
	Outcomes    []cache.Outcome
}

// Copies says what a node moves to others. The names in JSON are an interface.
type Copies struct {
	Segments int    `json:"segments"`       // that it knows
	Blocks   int    `json:"blocks"`         // of these
	Surplus  int    `json:"surplus"`        // blocks that the list of nodes does not give it
	Hot      int    `json:"hot"`            // segments to which it gives further owners
	Pending  int    `json:"pending"`        // segments that it has yet to send
	Sent     uint64 `json:"sent"`           // blocks
	Bytes    uint64 `json:"sent_bytes"`     // of those
	Failed   uint64 `json:"failed"`         // segments that were not sent as a whole
	Rate     uint64 `json:"bytes_a_second"` // at most
	Unseen   uint64 `json:"unseen"`         // calls of clients that it had no time to count
}

// poll is the story of a kindDigest, of which a client has one at a time: it waits for something
// new, and is no request that Drain waits for. The caller holds the lock.
func (s *Server) poll(c *client, id uint64, body []byte) {
	ctx, end := context.WithCancel(c.ctx)
	c.ends[id] = end
	c.polls = true
	c.answers++
	c.running.Go(func() {
		defer end()
		defer context.AfterFunc(s.polling, end)()
		var digest, next []byte
		q, err := readRequest(body)
		if err == nil {
			digest, next, err = s.cfg.Member.Digest(ctx, q.rest)
		}
		s.mu.Lock()
		delete(c.ends, id)
		c.polls = false
		s.mu.Unlock()
		p := append(le.AppendUint16(nil, uint16(len(next))), next...)
		s.send(c, id, err, append(p, digest...))
		s.mu.Lock()
		defer s.mu.Unlock()
		c.answers--
	})
}

// refusePoll says why poll is not for a request.
func (s *Server) refusePoll() error {
	if s.cfg.Member == nil {
		return fmt.Errorf("the server is in no cluster: %w", engine.ErrNotSupported)
	}
	return fmt.Errorf("this client waits for a digest already: %w", engine.ErrBusy)
}

// Digest waits for what the server has to tell as a node of a cluster: a placement.Digest, and the
// since of the next call. An empty since is that of a client which knows nothing. A client waits
// for one at a time. A server of no cluster is engine.ErrNotSupported.
func (c *Client) Digest(ctx context.Context, since []byte) (digest, next []byte, err error) {
	body, err := c.ask(ctx, kindDigest, request{rest: since})
	if err != nil {
		return nil, nil, fmt.Errorf("digest: %w", err)
	}
	if len(body) < 2 || len(body)-2 < int(le.Uint16(body)) {
		return nil, nil, errGarbled
	}
	n := 2 + int(le.Uint16(body))
	return body[n:], body[2:n], nil
}

// use does a Load or a Store, and tells the member of it.
func (s *Server) use(ctx context.Context, n *space, store bool, keys []cache.Key, at cache.Place,
	of []Segment) (body []byte, err error) {
	m := s.cfg.Member
	begin := n.Load
	if store {
		begin = n.Store
		if m != nil && at.Copy {
			var end func()
			if ctx, end, err = s.graves.copying(ctx, n.Digest(), keys); err != nil {
				return nil, err
			}
			defer end()
		}
	}
	op := begin(ctx, keys, at)
	body, err = ended(op)
	if m != nil && len(of) > 0 && n.named != nil {
		bytes := at.Run
		for _, a := range at.Loops {
			bytes *= uint64(a.N)
		}
		m.Used(&Use{n.named, store, at.Copy, bytes, keys, of, op.Outcomes()})
	}
	return body, err
}

// graves are the blocks that were removed lately, and the copies that come in now: a copy that was
// on its way when its block was removed does not bring it back.
type graves struct {
	mu     sync.Mutex
	turned time.Time
	// removed in this gravesTime, and in the one before. Where these are more than gravesMax no
	// copy comes in.
	removed [2]map[blockName]bool
	copies  map[*copyIn]bool
}

type blockName struct {
	space [16]byte
	key   cache.Key
}

// copyIn is a Store of copies that runs.
type copyIn struct {
	space [16]byte
	keys  []cache.Key
	end   context.CancelFunc
	ended chan struct{}
}

const (
	gravesMax  = 1 << 16
	gravesTime = time.Minute // longer than a node takes to send what it has read
)

// turn forgets what was removed long ago. The caller holds the lock.
func (g *graves) turn() {
	switch ago := time.Since(g.turned); {
	case ago < gravesTime:
		return
	case ago < 2*gravesTime:
		g.removed[1] = g.removed[0]
	default:
		g.removed[1] = nil
	}
	g.removed[0], g.turned = map[blockName]bool{}, time.Now()
}

// bury has no copy of blocks come in any more, and returns once none of those that run does.
func (g *graves) bury(space [16]byte, keys []cache.Key) {
	g.mu.Lock()
	g.turn()
	for _, key := range keys {
		if len(g.removed[0]) <= gravesMax {
			g.removed[0][blockName{space, key}] = true
		}
	}
	var ending []*copyIn
	for c := range g.copies {
		if g.refuses(c) {
			ending = append(ending, c)
			c.end()
		}
	}
	g.mu.Unlock()
	for _, c := range ending {
		<-c.ended
	}
}

// refuses reports whether copies must not come in. The caller holds the lock.
func (g *graves) refuses(c *copyIn) bool {
	for _, removed := range g.removed {
		if len(removed) > gravesMax || slices.ContainsFunc(c.keys, func(key cache.Key) bool {
			return removed[blockName{c.space, key}]
		}) {
			return true
		}
	}
	return false
}

// copying lets copies come in, unless their blocks were removed lately. The context ends when one
// of them is; end says that nothing comes any more.
func (g *graves) copying(ctx context.Context, space [16]byte, keys []cache.Key) (
	within context.Context, end func(), err error) {
	c := &copyIn{space: space, keys: keys, ended: make(chan struct{})}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.turn(); g.refuses(c) {
		return nil, nil, fmt.Errorf("copies of blocks that were removed lately: %w",
			engine.ErrBusy)
	}
	within, c.end = context.WithCancel(ctx)
	if g.copies == nil {
		g.copies = map[*copyIn]bool{}
	}
	g.copies[c] = true
	return within, func() {
		g.mu.Lock()
		delete(g.copies, c)
		g.mu.Unlock()
		c.end()
		close(c.ended)
	}, nil
}
