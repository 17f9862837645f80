// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"math/bits"
	"os"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/kv/cache"
)

// Report says how a server is. The names in JSON are an interface.
type Report struct {
	Name     string             `json:"name"` // of its engine
	PID      int                `json:"pid"`
	Started  time.Time          `json:"started"`
	Attached Attached           `json:"attached"`
	Clients  int                `json:"clients"`
	Running  int                `json:"running"`  // requests, now
	Requests map[string]Latency `json:"requests"` // match, load, store
	// Copies says what it moves between nodes; nil: it is in no cluster.
	Copies *Copies `json:"copies,omitempty"`
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
	// Requests by the time that they took at most, in microseconds: powers of two of which there
	// are some, up to LatencyMost.
	AtMost map[int64]uint64 `json:"at_most_us"`
}

const (
	latencyBuckets = 28
	// LatencyMost stands in Latency.AtMost also for all requests that took longer; 134 s.
	LatencyMost = 1 << (latencyBuckets - 1)
)

// Count returns the number of requests.
func (l Latency) Count() (n uint64) {
	for _, b := range l.AtMost {
		n += b
	}
	return n
}

// Percentile returns the least time of AtMost by which percent of the requests had ended; 0 without
// requests.
func (l Latency) Percentile(percent float64) time.Duration {
	left := percent / 100 * float64(l.Count())
	if left == 0 {
		return 0
	}
	us := int64(1)
	for ; us < LatencyMost; us *= 2 {
		if left -= float64(l.AtMost[us]); left <= 0 {
			break
		}
	}
	return time.Duration(us) * time.Microsecond
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
	r = Latency{Seconds: float64(l.ns.Load()) / 1e9, AtMost: map[int64]uint64{}}
	for k := range l.buckets {
		if n := l.buckets[k].Load(); n > 0 {
			r.AtMost[1<<k] = n
		}
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
		r.Requests[name] = s.latency[k].read()
	}
	if s.cfg.Member != nil {
		copies := s.cfg.Member.Report()
		r.Copies = &copies
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Clients, r.Running = len(s.clients), s.count
	return r
}

// blockText is a block, and what Explain says of it.
type blockText struct {
	cache.BlockInfo
	Text string
}

// Report asks the server how it is. It is told to those alone whom Config.Inspect names, as are
// Spaces, Find, and a Space's Blocks.
func (c *Client) Report(ctx context.Context) (Report, error) {
	return askJSON[Report](ctx, c, kindReport, request{})
}

// Spaces lists the namespaces of the cache, by name.
func (c *Client) Spaces(ctx context.Context) ([]cache.SpaceInfo, error) {
	return askJSON[[]cache.SpaceInfo](ctx, c, kindSpaces, request{})
}

// Find opens a namespace that the cache knows by its digest, with what it has.
func (c *Client) Find(ctx context.Context, digest [16]byte) (*Space, error) {
	return c.openSpace(ctx, kindFind, digest[:])
}

// Blocks lists blocks, as Namespace.Blocks does.
func (s *Space) Blocks(ctx context.Context, from uint32) (list []cache.BlockInfo, next uint32,
	err error) {
	body, err := s.c.ask(ctx, kindBlocks,
		request{number: s.number, rest: le.AppendUint32(nil, from)})
	if err != nil {
		return nil, 0, err
	}
	body, err = readFixed(body, &next)
	list = make([]cache.BlockInfo, len(body)/binary.Size(cache.BlockInfo{}))
	if body, errList := readFixed(body, list); err != nil || errList != nil || len(body) > 0 {
		return nil, 0, errGarbled
	}
	return list, next, nil
}

// Block tells of one block, and those whom Config.Inspect names also in words.
func (s *Space) Block(ctx context.Context, key cache.Key) (b cache.BlockInfo, text string,
	err error) {
	told, err := askJSON[blockText](ctx, s.c, kindBlock, s.about([]cache.Key{key}))
	return told.BlockInfo, told.Text, err
}
