// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"container/heap"
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/schedule"
	"github.com/sluicehq/sluice/kv/trace"
)

const ms = time.Millisecond

// simple is a cluster in which a token takes a millisecond to compute and a tenth of one to copy,
// and a step 10 ms.
func simple() Config {
	return Config{Prefill: 2, Decode: 1, CacheTokens: 1 << 20, Policy: cache.LRU,
		DecodeTokens: 1 << 20, TokenBytes: 1e5, Rate: 1e9, Latency: 2 * ms, Threshold: 1, Speed: 1,
		Curves: Curves{Prefill: [3]float64{0, 1e6, 0}, Decode: [3]float64{10e6, 0, 0}}}
}

func ask(at int64, input, output int, ids ...uint64) trace.Request {
	return trace.Request{Timestamp: at, InputLength: input, OutputLength: output, HashIDs: ids}
}

func mustRun(t *testing.T, cfg Config, list []trace.Request, c Case) *Result {
	t.Helper()
	r, err := Run(t.Context(), cfg, list, c)
	require.NoError(t, err)
	return r
}

// TestByHand compares with schedules that were computed on paper.
func TestByHand(t *testing.T) {
	list := []trace.Request{ // in another order than they arrive in
		ask(1001, 1536, 1, 1, 2, 4),
		ask(0, 1024, 1, 1, 2),
		ask(1000, 1536, 3, 1, 2, 3),
	}
	// At 0 both are idle: the first instance, until 1024. At 1000 the first one has two blocks: 24
	// of queue and 512; the other one 1536.
	// At 1001 the first one has 535 of queue and 512: 1047, the other one 1536.
	local := mustRun(t, simple(), list, Local)
	require.Equal(t, &Result{Requests: 3, Within: 3, Blocks: 8, Hits: 4, Computing: 2048 * ms,
		TTFT: []time.Duration{536 * ms, 1024 * ms, 1047 * ms},
		// The first token of three at 1536; it joins 2 ms later, and two steps end at 1558.
		TBT: []time.Duration{11 * ms}}, local)
	// Without a cache the three compute 1024, 1536 from 1000 on by the other one, and 1536 behind
	// the first; the token at 2536, the steps from 2538 on.
	require.Equal(t, &Result{Requests: 3, Within: 3, Blocks: 8, Computing: 4096 * ms,
		TTFT: []time.Duration{1024 * ms, 1536 * ms, 1559 * ms}, TBT: []time.Duration{11 * ms}},
		mustRun(t, simple(), list, None))
	// With the pool the third copies two blocks to the other instance: they are there at 1024, come
	// until 1024+102.4+2, and 512 tokens are computed until 1640.4.
	require.Equal(t, &Result{Requests: 3, Within: 3, Blocks: 8, Hits: 4, Copied: 1024,
		Computing: 2048 * ms,
		TTFT:      []time.Duration{536 * ms, 639400 * time.Microsecond, 1024 * ms},
		TBT:       []time.Duration{11 * ms}}, mustRun(t, simple(), list, Pool))

	cfg := simple()
	cfg.Threshold = math.Inf(1) // nothing is copied
	require.Equal(t, local, mustRun(t, cfg, list, Pool))
	cfg = simple()
	cfg.TTFT = 1030 * ms // less than the third would take
	r := mustRun(t, cfg, list, Local)
	require.Equal(t, []int{2, 1, 0, 2}, []int{len(r.TTFT), r.RefusedTTFT, r.RefusedTBT, r.Within})
	cfg.AdmitAll = true
	r = mustRun(t, cfg, list, Local)
	require.Equal(t, []int{3, 0, 0, 2}, []int{len(r.TTFT), r.RefusedTTFT, r.RefusedTBT, r.Within})
	cfg.TTFT, cfg.TBT = 0, 10*ms // which a step takes, but not all tokens of the second
	r = mustRun(t, cfg, list, Local)
	require.Equal(t, 2, r.Within)
	cfg = simple()
	cfg.TBT = 9 * ms
	require.Equal(t, 3, mustRun(t, cfg, list, Local).RefusedTBT)
	cfg = simple()
	cfg.DecodeTokens = 1538 // of the second, 1539
	require.Equal(t, 1, mustRun(t, cfg, list, Local).RefusedTBT)
	cfg = simple()
	cfg.Speed = 2 // arrivals at 0, 500, 500.5: queues of 524 and 1035.5
	require.Equal(t, []time.Duration{1024 * ms, 1036 * ms, 1536 * ms},
		mustRun(t, cfg, list, Local).TTFT)
	// a cache of one block: the second finds the first block, which goes last
	cfg = simple()
	cfg.Prefill, cfg.CacheTokens = 1, trace.BlockTokens
	require.Equal(t, 2, mustRun(t, cfg, list, Local).Hits)
	// the last token is computed, even if all blocks are there
	cfg = simple()
	cfg.Prefill = 1
	require.Equal(t, []time.Duration{ms, 1024 * ms}, mustRun(t, cfg, []trace.Request{
		ask(0, 1024, 1, 1, 2), ask(5000, 1024, 1, 1, 2)}, Local).TTFT)
}

// TestCopiesQueue: the link of an instance sends one copy after the other.
func TestCopiesQueue(t *testing.T) {
	cfg := simple()
	cfg.Prefill = 3
	n := -1
	r, err := simulate(t.Context(), cfg, []trace.Request{ask(0, 1024, 1, 1, 2),
		ask(2000, 1025, 1, 1, 2), ask(2000, 1025, 1, 1, 2)}, Pool, func() int { n++; return n })
	require.NoError(t, err)
	// 102.4 to send and 2 on the way, then a token; the second copy begins when the first is sent
	require.Equal(t, []time.Duration{105400 * time.Microsecond, 207800 * time.Microsecond,
		1024 * ms}, r.TTFT)
}

// TestCopiesFromCopies: what has come may be copied on, before the rest of its request is computed.
func TestCopiesFromCopies(t *testing.T) {
	cfg := simple()
	cfg.Prefill = 4
	order := []int{0, 1, 3, 2}
	n := -1
	r, err := simulate(t.Context(), cfg, []trace.Request{ask(0, 1024, 1, 1, 2),
		ask(2000, 3072, 1, 1, 2, 3, 4, 5, 6), ask(2149, 1025, 1, 1, 2), ask(2150, 1025, 1, 1, 2)},
		Pool, func() int { n++; return order[n] })
	require.NoError(t, err)
	// The second has its copy at 2104.4, and computes until 4152.4. The first instance sends the
	// third request's copy until 2251.4, so the fourth has its own from the second one.
	require.Equal(t, []time.Duration{105400 * time.Microsecond, 105400 * time.Microsecond,
		1024 * ms, 2152400 * time.Microsecond}, r.TTFT)
}

// TestCopyIsAUse: what is copied from an instance does not go there next.
func TestCopyIsAUse(t *testing.T) {
	cfg := simple()
	cfg.CacheTokens = 2 * trace.BlockTokens
	order := []int{0, 0, 1, 0, 0}
	n := -1
	r, err := simulate(t.Context(), cfg, []trace.Request{ask(0, 512, 1, 1), ask(1000, 512, 1, 2),
		ask(2000, 513, 1, 1), ask(3000, 512, 1, 3), ask(4000, 512, 1, 1)}, Pool,
		func() int { n++; return order[n] })
	require.NoError(t, err)
	require.Equal(t, 2, r.Hits)
	require.Equal(t, 512, r.Copied) // by the third request, and not by the last
}

// TestDecodeLoad: requests that were placed and have not ended count when another one is placed.
func TestDecodeLoad(t *testing.T) {
	cfg := simple()
	cfg.Curves.Decode[1] = 5e6
	list := []trace.Request{ask(0, 512, 9, 1), ask(1, 512, 9, 2), ask(5000, 512, 9, 3)}
	cfg.TBT = 19 * ms // two have 20; the third comes when the first has ended
	require.Equal(t, 1, mustRun(t, cfg, list, None).RefusedTBT)
	cfg.Curves.Decode = [3]float64{10e6, 0, 1e4} // 10 µs for a token: 15.13, and 20.26 of two
	require.Equal(t, 1, mustRun(t, cfg, list, None).RefusedTBT)
	cfg.TBT, cfg.DecodeTokens = 0, 2*521-1
	require.Equal(t, 1, mustRun(t, cfg, list, None).RefusedTBT)
	cfg.DecodeTokens++
	require.Zero(t, mustRun(t, cfg, list, None).RefusedTBT)
	// the prompt comes to the decode instance while it is computed, but no sooner than it is sent
	cfg.TokenBytes = 1e7 // 10 ms a token: 5120, when 512 of computing has ended
	cfg.Curves.Decode = [3]float64{10e6, 0, 0}
	require.Equal(t, []time.Duration{((5120 - 512 + 2) + 10) * ms},
		mustRun(t, cfg, []trace.Request{ask(0, 512, 2, 1)}, None).TBT)
}

// TestDecodeStepByStep compares with a decode instance that takes each step by itself.
func TestDecodeStepByStep(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for range 300 {
		cfg := simple()
		cfg.Curves.Decode = [3]float64{float64(1 + random.IntN(50)), float64(random.IntN(20)),
			float64(random.IntN(3))}
		r := &run{Config: cfg, decodes: make([]decodeInstance, 1)}
		var all []*sequence
		for range 1 + random.IntN(12) {
			s := &sequence{inTime: true, output: 2 + random.IntN(30),
				context: int64(1 + random.IntN(20))}
			s.first = time.Duration(random.IntN(1000))
			all = append(all, s)
			d := &r.decodes[0]
			d.sequences++
			d.context += s.context
			d.tokens += s.context + int64(s.output) - 1
			r.events.add(event{at: s.first, joins: s})
		}
		require.NoError(t, r.runEventsUntil(t.Context(), schedule.Never))
		left := r.decodes[0]
		require.Equal(t, [5]int64{}, [5]int64{int64(left.sequences), left.context, left.tokens,
			left.held, int64(len(left.batch))})

		var want []time.Duration
		done := map[*sequence]int{}
		for now := time.Duration(0); len(want) < len(all); {
			var batch []*sequence
			context := int64(0)
			for _, s := range all {
				if s.first <= now && done[s] < s.output-1 {
					batch = append(batch, s)
					context += s.context + int64(done[s])
				}
			}
			if batch == nil {
				now++
				continue
			}
			now += cfg.Curves.steps(1, len(batch), context)
			for _, s := range batch {
				if done[s]++; done[s] == s.output-1 {
					want = append(want, (now-s.first)/time.Duration(s.output-1))
				}
			}
		}
		require.ElementsMatch(t, want, r.result.TBT)
		require.Equal(t, len(all), r.result.Within)
	}
}

func generated(seed uint64, n int) (list []trace.Request) {
	g := trace.NewGenerator(seed)
	for range n {
		list = append(list, g.Next())
	}
	return list
}

// usual is a cluster of the defaults of the command that is a little too small.
func usual() Config {
	return Config{Prefill: 5, Decode: 2, CacheTokens: 200 * trace.BlockTokens, Policy: cache.S3FIFO,
		DecodeTokens: 1.3e6, TokenBytes: 327680, Rate: 87e9, Latency: ms, Threshold: 1, Speed: 1,
		TTFT: 10 * time.Second, TBT: 13 * ms, Curves: DefaultCurves(), Seed: 1}
}

// TestPoolHitsAsLocal: with requests in the same places a pool has all hits of caches that are kept
// apart, and more.
func TestPoolHitsAsLocal(t *testing.T) {
	for seed := range uint64(4) {
		cfg := usual()
		cfg.CacheTokens, cfg.DecodeTokens = 1<<30, 1e12
		cfg.TTFT, cfg.TBT = 0, 0
		list := generated(seed, 300)
		hits := map[Case]int{}
		for _, c := range []Case{Local, Pool} {
			r := rand.New(rand.NewPCG(seed, 5))
			got, err := simulate(t.Context(), cfg, list, c, func() int { return r.IntN(5) })
			require.NoError(t, err)
			require.Len(t, got.TTFT, 300)
			hits[c] = got.Hits
		}
		require.Greater(t, hits[Pool], hits[Local])
		// all of it is somewhere: what a single cache without bounds has
		cfg.Prefill = 1
		require.Equal(t, mustRun(t, cfg, list, Local).Hits, hits[Pool])
	}
}

// TestServedOrRefused: each request is one of them, what is served keeps the limits, and the same
// seed has the same result.
func TestServedOrRefused(t *testing.T) {
	list := generated(7, 400)
	refused := 0
	for _, c := range Cases() {
		for _, p := range []cache.Policy{cache.S3FIFO, cache.LRU, cache.ARC} {
			cfg := usual()
			cfg.Policy = p
			r := mustRun(t, cfg, list, c)
			require.Equal(t, 400, r.Requests)
			require.Equal(t, 400, len(r.TTFT)+r.RefusedTTFT+r.RefusedTBT)
			require.LessOrEqual(t, r.TTFT[len(r.TTFT)-1], cfg.TTFT)
			require.LessOrEqual(t, r.Within, len(r.TTFT))
			require.Equal(t, c == None, r.Hits == 0)
			require.Equal(t, c == Pool, r.Copied > 0)
			require.Equal(t, r, mustRun(t, cfg, list, c))
			refused += r.RefusedTTFT
			cfg.Seed++
			require.Equal(t, c == Random, r.Hits != mustRun(t, cfg, list, c).Hits)

			cfg.AdmitAll = true
			r = mustRun(t, cfg, list, c)
			require.Equal(t, []int{400, 0, 0}, []int{len(r.TTFT), r.RefusedTTFT, r.RefusedTBT})
		}
	}
	require.Positive(t, refused)
}

// TestTimesEnd: times that are too long stay at the longest.
func TestTimesEnd(t *testing.T) {
	cfg := simple()
	cfg.Curves.Prefill[2], cfg.Curves.Decode[2] = 1e15, 1e15
	var list []trace.Request
	for k := range 20 {
		list = append(list, ask(int64(k), 1<<15, 9))
	}
	r := mustRun(t, cfg, list, None)
	require.Equal(t, 20, r.Within)
	require.Equal(t, longest, r.Computing)
	require.Equal(t, longest-19*ms, r.TTFT[0]) // of the last
	for _, tbt := range r.TBT {
		require.GreaterOrEqual(t, tbt, time.Duration(0))
	}
}

func TestRunEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	cancel(gone)
	_, err := Run(ctx, usual(), generated(1, 3), Pool)
	require.ErrorIs(t, err, gone)
}

func TestConfigErrors(t *testing.T) {
	for name, c := range map[string]struct {
		change func(c *Config)
		want   string
	}{
		"prefill":   {func(c *Config) { c.Prefill = 0 }, "Prefill: 0, want 1 to 256"},
		"cache":     {func(c *Config) { c.CacheTokens = 511 }, "CacheTokens: 511, want 512"},
		"rate":      {func(c *Config) { c.Rate = 0 }, "Rate: 0, want"},
		"threshold": {func(c *Config) { c.Threshold = -1 }, "Threshold: -1, want 0 to +Inf"},
		"policy":    {func(c *Config) { c.Policy = "fifo" }, "s3fifo, lru and arc"},
		"curves":    {func(c *Config) { c.Curves.Decode = [3]float64{0, 0, 1} }, "takes no time"},
		"negative":  {func(c *Config) { c.Curves.Prefill[1] = -1 }, "prefill has a part of -1 ns"},
	} {
		cfg := usual()
		c.change(&cfg)
		_, err := Run(t.Context(), cfg, nil, Pool)
		require.ErrorContains(t, err, c.want, name)
	}
	_, err := Run(t.Context(), usual(), nil, "all")
	require.ErrorContains(t, err, "none local pool random queue")
}

// TestEventsInOrder: of two at one time the older one comes first.
func TestEventsInOrder(t *testing.T) {
	var e events
	for k, at := range []time.Duration{5, 3, 5, 1, 3} {
		e.add(event{at: at, turn: k})
	}
	var turns []int
	for e.Len() > 0 {
		turns = append(turns, heap.Pop(&e).(event).turn)
	}
	require.Equal(t, []int{3, 1, 4, 0, 2}, turns)
}
