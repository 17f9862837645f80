// SPDX-License-Identifier: Apache-2.0

// Package simulate runs the requests of a trace over prefill and decode instances that are models:
// a queue, a cache without bytes and a link each, with times from curves. See docs/simulate.md for
// what the model leaves out.
package simulate

import (
	"cmp"
	"container/heap"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/schedule"
	"github.com/sluicehq/sluice/kv/trace"
)

// InstancesMax bounds the prefill instances, and the decode instances.
const InstancesMax = 256

// Case is what the instances know of each other's caches, and who chooses among them.
type Case string

// The cases.
const (
	None   Case = "none"   // no cache; the conductor looks at the queues alone
	Local  Case = "local"  // the conductor sees all caches, and nothing is copied between them
	Pool   Case = "pool"   // the conductor sees all caches, and has what is missing copied
	Random Case = "random" // caches as in Local, but any instance is chosen
	Queue  Case = "queue"  // caches as in Local, but the instance with the shortest queue is chosen
)

// Cases are all cases.
func Cases() []Case { return []Case{None, Local, Pool, Random, Queue} }

// Config is a cluster.
type Config struct {
	Prefill, Decode int // instances
	Curves          Curves
	// CacheTokens is the room of each prefill instance's cache, in tokens.
	CacheTokens int64
	Policy      cache.Policy
	// DecodeTokens is the room of each decode instance for contexts.
	DecodeTokens int64
	// TokenBytes are the bytes of the KV cache of a token, Rate how many of them a link of a
	// prefill instance sends a second, and Latency how long the first of them takes.
	TokenBytes, Rate float64
	Latency          time.Duration
	// Threshold, TTFT and TBT are those of the conductor.
	Threshold float64
	TTFT, TBT time.Duration
	// AdmitAll has the conductor refuse nothing for its limits; Result.Within counts by them.
	AdmitAll bool
	// Speed is how many times faster than in the trace requests arrive.
	Speed float64
	// Seed is for Random.
	Seed uint64
}

// Result is what came of the requests.
type Result struct {
	Requests    int
	RefusedTTFT int // as the first token would have come too late
	RefusedTBT  int
	Within      int // served, with both times within the limits
	Blocks      int // of the requests that were served
	Hits        int // of those blocks, the ones that were in the cache
	Copied      int // tokens from one cache to another
	// Computing is for how long the prefill instances computed, all together.
	Computing time.Duration
	// TTFT is of each request that was served, and TBT the mean time between two tokens of each
	// with at least two; in ascending order.
	TTFT, TBT []time.Duration
}

// ConfigError is a field of a Config that is out of bounds.
type ConfigError struct {
	Field            string
	Value, Low, High float64 // of a time in nanoseconds
}

// Error names the bounds, and leaves the field to the caller, who may have another name for it.
func (e *ConfigError) Error() string {
	if slices.Contains([]string{"Latency", "TTFT", "TBT"}, e.Field) {
		return fmt.Sprintf("%v, want %v to %v", time.Duration(e.Value), time.Duration(e.Low),
			time.Duration(e.High))
	}
	return fmt.Sprintf("%v, want %v to %v", e.Value, e.Low, e.High)
}

// Check returns a *ConfigError for the first field that is out of bounds, or wraps ErrCurves.
func (c *Config) Check() error {
	for _, v := range []ConfigError{
		{"Prefill", float64(c.Prefill), 1, InstancesMax},
		{"Decode", float64(c.Decode), 1, InstancesMax},
		{"CacheTokens", float64(c.CacheTokens), trace.BlockTokens, cacheMax},
		{"DecodeTokens", float64(c.DecodeTokens), 1, 1e12},
		{"TokenBytes", c.TokenBytes, 0, 1e9},
		{"Rate", c.Rate, 1e6, 1e15},
		{"Latency", float64(c.Latency), 0, float64(time.Hour)},
		{"Threshold", c.Threshold, 0, math.Inf(1)},
		{"TTFT", float64(c.TTFT), 0, float64(longest)},
		{"TBT", float64(c.TBT), 0, float64(longest)},
		{"Speed", c.Speed, 1e-6, 1e6},
	} {
		if !(v.Value >= v.Low && v.Value <= v.High) {
			return &v
		}
	}
	return c.Curves.check()
}

// cacheMax is the most tokens that a cache may have: 128 million blocks.
const cacheMax = trace.BlockTokens << 27

// prefillInstance is one. Its requests are computed in the order in which they are placed, so that
// all of their times are known then.
type prefillInstance struct {
	free     time.Duration               // when it has computed all that it was given
	linkFree time.Duration               // when its link has sent all that it was asked for
	there    map[cache.Key]time.Duration // when each block of its cache is, or will be, there
	order    *cache.Order
}

// prefix is what an instance has of a request.
type prefix struct {
	blocks, tokens int
	there          time.Duration // when the last of them is
}

// run is one simulation.
type run struct {
	Config
	caches    bool
	pick      func() int // who chooses the prefill instance; nil: the conductor
	conductor schedule.Conductor
	prefills  []prefillInstance
	decodes   []decodeInstance
	events    events
	result    Result

	now   time.Duration
	asked request
	has   []prefix // of the request, by prefill instance
}

// request is one that is being placed.
type request struct {
	keys          []cache.Key
	input, output int
}

// Run simulates one case. Equal arguments have equal results.
func Run(ctx context.Context, cfg Config, requests []trace.Request, c Case) (*Result, error) {
	return simulate(ctx, cfg, requests, c, nil)
}

// simulate is Run; pick, if there is one, chooses the prefill instance of each request.
func simulate(ctx context.Context, cfg Config, requests []trace.Request, c Case,
	pick func() int) (*Result, error) {
	if err := cfg.Check(); err != nil {
		if field, ok := errors.AsType[*ConfigError](err); ok {
			err = fmt.Errorf("%s: %w", field.Field, err)
		}
		return nil, fmt.Errorf("simulate: %w", err)
	}
	if !slices.Contains(Cases(), c) {
		return nil, fmt.Errorf("simulate: case %q: there are %v", c, Cases())
	}
	r := &run{Config: cfg, caches: c != None, pick: pick,
		conductor: schedule.Conductor{Threshold: math.Inf(1)},
		prefills:  make([]prefillInstance, cfg.Prefill),
		decodes:   make([]decodeInstance, cfg.Decode), has: make([]prefix, cfg.Prefill)}
	if c == Pool {
		r.conductor.Threshold = cfg.Threshold
	}
	if !cfg.AdmitAll {
		r.conductor.TTFT, r.conductor.TBT = cfg.TTFT, cfg.TBT
	}
	random := rand.New(rand.NewPCG(cfg.Seed, 0))
	switch {
	case c == Random && pick == nil:
		r.pick = func() int { return random.IntN(cfg.Prefill) }
	case c == Queue && pick == nil:
		r.pick = r.shortestQueue
	}
	for i := range r.prefills {
		order, err := cache.NewOrder(cfg.Policy, int(cfg.CacheTokens/trace.BlockTokens))
		if err != nil {
			return nil, fmt.Errorf("simulate: %w", err)
		}
		r.prefills[i].order, r.prefills[i].there = order, map[cache.Key]time.Duration{}
	}
	requests = slices.Clone(requests)
	slices.SortStableFunc(requests, func(a, b trace.Request) int {
		return cmp.Compare(a.Timestamp, b.Timestamp)
	})
	for n := range requests {
		q := &requests[n]
		r.now = nanoseconds(float64(q.Arrival()) / cfg.Speed)
		if err := r.runEventsUntil(ctx, r.now); err != nil {
			return nil, err
		}
		if err := r.arrive(q); err != nil {
			return nil, fmt.Errorf("simulate: %w", err)
		}
	}
	if err := r.runEventsUntil(ctx, schedule.Never); err != nil {
		return nil, err
	}
	slices.Sort(r.result.TTFT)
	slices.Sort(r.result.TBT)
	return &r.result, nil
}

// shortestQueue is the first of the instances that have computed what they were given soonest.
func (r *run) shortestQueue() (least int) {
	for i := range r.prefills {
		if r.prefills[i].free < r.prefills[least].free {
			least = i
		}
	}
	return least
}

// runEventsUntil has happen what does up to a time.
func (r *run) runEventsUntil(ctx context.Context, until time.Duration) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	for n := 1; r.events.Len() > 0 && r.events.list[0].at <= until; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		e := heap.Pop(&r.events).(event)
		d := &r.decodes[e.decode]
		if e.joins != nil {
			d.join(r, e)
		} else if e.turn == d.turn {
			d.complete(r, e.decode)
		}
	}
	return nil
}

// arrive places a request now, or refuses it.
func (r *run) arrive(q *trace.Request) error {
	a := request{input: max(1, q.InputLength), output: q.OutputLength,
		keys: make([]cache.Key, len(q.HashIDs))}
	for k, id := range q.HashIDs {
		binary.LittleEndian.PutUint64(a.keys[k][:], id)
	}
	r.asked = a
	if r.caches {
		for i := range r.prefills {
			r.has[i] = r.prefills[i].prefixOf(&a)
		}
	}
	var p schedule.Prefill = prefillView{r}
	if r.pick != nil {
		p = bound{p, r.pick()}
	}
	r.result.Requests++
	placed, err := r.conductor.Place(p, decodeView{r})
	if refused, ok := errors.AsType[*schedule.RefusedError](err); ok {
		if refused.What == "TTFT" {
			r.result.RefusedTTFT++
		} else {
			r.result.RefusedTBT++
		}
		return nil
	}
	if err != nil {
		return err
	}
	r.serve(&a, &placed)
	return nil
}

// prefixOf returns how much of a request is in the cache.
func (p *prefillInstance) prefixOf(a *request) (has prefix) {
	for _, key := range a.keys {
		at, ok := p.there[key]
		if !ok {
			break
		}
		has.blocks, has.there = has.blocks+1, max(has.there, at)
	}
	// the last token is computed in any case: the first that comes out follows from it
	has.tokens = min(has.blocks*trace.BlockTokens, a.input-1)
	return has
}

// serve simulates the prefill of a request where it was placed, and its decoding.
func (r *run) serve(a *request, placed *schedule.Placement) {
	p := &r.prefills[placed.Prefill]
	start, hits, copied := max(r.now, p.free), r.has[placed.Prefill].blocks, r.now
	if from := placed.From; from >= 0 {
		f := &r.prefills[from]
		copied, f.linkFree = r.copies(from, placed.Copied)
		start, hits = max(start, copied), r.has[from].blocks
		for k := range hits {
			f.order.Use(a.keys[hits-1-k])
		}
	}
	end := later(start, placed.Compute)
	p.free = end
	if r.caches {
		for k := range slices.Backward(a.keys) { // so that the first of them go last
			key := a.keys[k]
			if _, ok := p.there[key]; !ok && k < hits {
				p.there[key] = copied
			} else if !ok {
				p.there[key] = end
			}
			if gone, went := p.order.Add(key); went {
				delete(p.there, gone)
			}
		}
	}
	s := &r.result
	s.Blocks, s.Hits, s.Copied = s.Blocks+len(a.keys), s.Hits+hits, s.Copied+placed.Copied
	s.Computing = later(s.Computing, placed.Compute)
	ttft := end - r.now
	s.TTFT = append(s.TTFT, ttft)
	first := sequence{first: end, inTime: r.TTFT == 0 || ttft <= r.TTFT, output: a.output,
		context: int64(a.input) + 1}
	if a.output < 2 { // the prefill has given all of it
		s.count(first.inTime)
		return
	}
	d := &r.decodes[placed.Decode]
	d.sequences++
	d.context += first.context
	d.tokens += int64(a.input + a.output)
	// Layers go to the decode instance while the later ones are computed.
	sent := later(start, r.sending(a.input))
	r.events.add(event{at: later(max(end, sent), r.Latency), decode: placed.Decode, joins: &first})
}

// count counts a request that was served.
func (s *Result) count(within bool) {
	if within {
		s.Within++
	}
}

// sending is how long a link sends tokens.
func (c *Config) sending(tokens int) time.Duration {
	return nanoseconds(float64(tokens) * c.TokenBytes / c.Rate * 1e9)
}

// copies is when tokens of the request would have come that an instance sends to another one, and
// when its link would be free again. A link sends one copy after the other.
func (r *run) copies(from, tokens int) (come, free time.Duration) {
	free = later(max(r.now, r.prefills[from].linkFree, r.has[from].there), r.sending(tokens))
	return later(free, r.Latency), free
}

// prefillView is what the conductor sees of the prefill instances.
type prefillView struct{ *run }

func (v prefillView) Len() int         { return len(v.prefills) }
func (v prefillView) Cached(i int) int { return v.has[i].tokens }

func (v prefillView) Queue(i int) time.Duration { return max(0, v.prefills[i].free-v.now) }

func (v prefillView) Compute(_, cached int) time.Duration {
	return v.Curves.prefill(v.asked.input, cached)
}

func (v prefillView) Transfer(from, _, tokens int) time.Duration {
	come, _ := v.copies(from, tokens)
	return come - v.now
}

// bound is a view in which only one instance can be chosen.
type bound struct {
	schedule.Prefill
	instance int
}

func (b bound) Queue(i int) time.Duration {
	if i != b.instance {
		return schedule.Never
	}
	return b.Prefill.Queue(i)
}

// decodeView is what the conductor sees of the decode instances: the requests that were placed
// there and have not ended, also those whose prompt is still being computed.
type decodeView struct{ *run }

func (v decodeView) Len() int { return len(v.decodes) }

func (v decodeView) Step(i int) time.Duration {
	d, a := &v.decodes[i], &v.asked
	if d.tokens+int64(a.input+a.output) > v.DecodeTokens {
		return schedule.Never
	}
	return v.Curves.steps(1, d.sequences+1, d.context+int64(a.input)+1)
}
