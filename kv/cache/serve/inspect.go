// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/bits"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// What an operator asks for, beside what a client does: counts, names and keys of all namespaces,
// whoever has made them. Config.Inspect says who may.
const (
	kindReport kind = 64 + iota // answer: a Report, in JSON
	kindSpaces                  // answer: all SpaceInfo, in JSON
	kindFind                    // digest; answer: number of the namespace
	kindBlocks                  // namespace, where to begin; answer: where to go on, blocks
	kindBlock                   // namespace, key; answer: the block, and what Explain says
)

// blocksMax bounds the blocks of one answer.
const blocksMax = 4 << 10

// listedBytes is a block in an answer: key, bytes, where it is.
const listedBytes = 16 + 4 + 1

// Report says how a server is. The names in JSON are an interface.
type Report struct {
	Name     string             `json:"name"` // of its engine
	PID      int                `json:"pid"`
	Started  time.Time          `json:"started"`
	Attached Attached           `json:"attached"`
	Clients  int                `json:"clients"`
	Running  int                `json:"running"`  // requests, now
	Requests map[string]Latency `json:"requests"` // match, load, store
	cache.Stats
}

// Attached is what the cache found when it was opened.
type Attached struct {
	Blocks int     `json:"blocks"`
	Bytes  uint64  `json:"bytes"`
	Ms     float64 `json:"ms"`
	Fresh  string  `json:"fresh,omitempty"` // why what was there was not used
}

// Latency is how long requests of one kind took in the server.
type Latency struct {
	Seconds float64 `json:"seconds"` // of all together
	// requests that took at most a microsecond, two, four, …; the last bucket: all others
	Buckets [latencyBuckets]uint64 `json:"buckets"`
}

const latencyBuckets = 28 // up to 67 s, and others

// Bound returns up to what time a bucket counts.
func (Latency) Bound(bucket int) time.Duration { return time.Microsecond << bucket }

// Count returns the number of requests.
func (l Latency) Count() (n uint64) {
	for _, b := range l.Buckets {
		n += b
	}
	return n
}

// Percentile returns the bound of the bucket in which percent of the requests had ended; 0 without
// requests.
func (l Latency) Percentile(percent float64) time.Duration {
	left := percent / 100 * float64(l.Count())
	if left == 0 {
		return 0
	}
	for k, b := range l.Buckets {
		if left -= float64(b); left <= 0 {
			return l.Bound(k)
		}
	}
	return l.Bound(latencyBuckets - 1)
}

// latency is a Latency that counts.
type latency struct {
	ns      atomic.Int64
	buckets [latencyBuckets]atomic.Uint64
}

func (l *latency) add(d time.Duration) {
	l.ns.Add(int64(d))
	bucket := bits.Len64(uint64(max(0, d-1) / time.Microsecond)) // so that a bound counts itself
	l.buckets[min(bucket, latencyBuckets-1)].Add(1)
}

func (l *latency) read() (r Latency) {
	r.Seconds = float64(l.ns.Load()) / 1e9
	for k := range l.buckets {
		r.Buckets[k] = l.buckets[k].Load()
	}
	return r
}

var measured = map[kind]string{kindMatch: "match", kindLoad: "load", kindStore: "store"}

// Report says how the server is.
func (s *Server) Report() Report {
	a := s.cfg.Cache.Attached()
	r := Report{Name: s.cfg.Engine.Name(), PID: os.Getpid(), Started: s.started,
		Attached: Attached{Blocks: a.Blocks, Bytes: a.Bytes, Fresh: a.Fresh,
			Ms: float64(a.Took) / 1e6},
		Requests: map[string]Latency{}, Stats: s.cfg.Cache.Stats()}
	for k, name := range measured {
		r.Requests[name] = s.took[k].read()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Clients = len(s.clients)
	for _, c := range s.clients {
		r.Running += c.count
	}
	return r
}

// Reassign asks Config.Options anew for each namespace that the cache knows the name of.
func (s *Server) Reassign() error {
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

// OverUnixSocket reports whether a peer came over a Unix socket: it is of the server's user then.
func OverUnixSocket(p *engine.Peer) bool { return !strings.Contains(p.Origin(), ":") }

// inspect does what an operator asks for.
func (s *Server) inspect(c *client, what kind, r *reader) ([]byte, error) {
	if may := s.cfg.Inspect; may != nil && !may(c.peer) || may == nil && !OverUnixSocket(c.peer) {
		return nil, fmt.Errorf("what others have in the cache is told to those alone who come by "+
			"its Unix socket: %w", os.ErrPermission)
	}
	switch what {
	case kindReport:
		return json.Marshal(s.Report())
	case kindSpaces:
		return json.Marshal(s.cfg.Cache.Spaces())
	case kindFind:
		digest := [16]byte(r.take(16))
		n := s.cfg.Cache.Space(digest)
		if r.bad || n == nil {
			return nil, fmt.Errorf("the cache has no namespace of digest %x: %w", digest,
				engine.ErrBounds)
		}
		return s.addSpace(c, n)
	}
	n, err := s.space(c, r)
	if err != nil {
		return nil, err
	}
	switch what {
	case kindBlocks:
		from := r.u32()
		if r.bad {
			return nil, errGarbled
		}
		list := make([]cache.BlockInfo, blocksMax)
		count, next := n.Blocks(from, list)
		body := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+count*listedBytes), next)
		for _, b := range list[:count] {
			body = appendBlock(body, b)
		}
		return body, nil
	case kindBlock:
		key := cache.Key(r.take(16))
		if r.bad {
			return nil, errGarbled
		}
		return append(appendBlock(nil, n.Block(key)), n.Explain(key)...), nil
	}
	return nil, fmt.Errorf("no request of kind %d: %w", what, engine.ErrNotSupported)
}

func appendBlock(p []byte, b cache.BlockInfo) []byte {
	p = binary.LittleEndian.AppendUint32(append(p, b.Key[:]...), b.Bytes)
	return append(p, byte(b.Found))
}

func (r *reader) block() (b cache.BlockInfo) {
	copy(b.Key[:], r.take(16))
	b.Bytes, b.Found = r.u32(), cache.Found(r.u8())
	return b
}

// Report asks the server how it is. It is told to those alone whom Config.Inspect names, as are
// Spaces, Find, and a Space's Blocks and Block.
func (c *Client) Report(ctx context.Context) (r Report, err error) {
	err = c.askJSON(ctx, kindReport, &r)
	return r, err
}

// Spaces lists the namespaces of the cache, by name.
func (c *Client) Spaces(ctx context.Context) (list []cache.SpaceInfo, err error) {
	err = c.askJSON(ctx, kindSpaces, &list)
	return list, err
}

func (c *Client) askJSON(ctx context.Context, what kind, to any) error {
	body, err := c.ask(ctx, what, nil)
	if err == nil && json.Unmarshal(body, to) != nil {
		err = errGarbled
	}
	return err
}

// Find opens a namespace that the cache knows by its digest, with what it has.
func (c *Client) Find(ctx context.Context, digest [16]byte) (*Space, error) {
	body, err := c.ask(ctx, kindFind, digest[:])
	if err == nil && len(body) != 2 {
		err = errGarbled
	}
	if err != nil {
		return nil, err
	}
	return &Space{c, binary.LittleEndian.Uint16(body)}, nil
}

// Blocks lists blocks, as Namespace.Blocks does.
func (s *Space) Blocks(ctx context.Context, from uint32) (list []cache.BlockInfo, next uint32,
	err error) {
	body, err := s.c.ask(ctx, kindBlocks, binary.LittleEndian.AppendUint32(
		binary.LittleEndian.AppendUint16(nil, s.number), from))
	if err != nil {
		return nil, 0, err
	}
	r := &reader{p: body}
	for next = r.u32(); len(r.p) > 0; {
		list = append(list, r.block())
	}
	if r.bad {
		return nil, 0, errGarbled
	}
	return list, next, nil
}

// Block tells of one block, also in words.
func (s *Space) Block(ctx context.Context, key cache.Key) (b cache.BlockInfo, text string,
	err error) {
	body, err := s.c.ask(ctx, kindBlock, append(binary.LittleEndian.AppendUint16(nil, s.number),
		key[:]...))
	if err != nil {
		return b, "", err
	}
	r := &reader{p: body}
	if b = r.block(); r.bad {
		return b, "", errGarbled
	}
	return b, string(r.p), nil
}
