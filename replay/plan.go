// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/trace"
)

// Side is one of the two groups of processes.
type Side string

// The sides.
const (
	PrefillSide Side = "prefill"
	DecodeSide  Side = "decode"
)

// The bounds of a replay between groups, where nothing says otherwise.
const (
	TokensMax  = 8192      // of a request
	PoolsBytes = 768 << 20 // of the pools of all ranks
	atOnceMax  = 2         // requests that are on their way together
)

// Options say what to replay between two groups of ranks, each a process of its own.
type Options struct {
	Spec            layout.Spec
	Prefill, Decode layout.GroupSpec // their Blocks are chosen
	Backend         string
	Requests        []trace.Request
	Speed           float64 // of the arrivals; 0: as fast as possible
	TokensMax       uint64  // longer requests are cut; 0: TokensMax
	Scale           int     // one layer of so many is kept; 0: as many as Memory allows
	Memory          uint64  // of the pools of all ranks; 0: PoolsBytes
	AbortRate       float64 // share of the requests, 0 to 1: above 0 at least one
	HitRate         float64 // of those whose first tokens the decode side has already
	Kill            Side    // of which a rank is killed in the last requests; "": none
	Digest          bool    // have ranks compare digests of all layers, too
	// Faults names what befalls the backends of a side, FaultNames with commas between; absent:
	// nothing. With any, a request that fails is handed over again.
	Faults  map[Side]string
	Threads int           // of each process that copy
	Seed    uint64        // of block tables, aborts and the rank to kill
	Limit   time.Duration // without a sign of life, and for each wait of a rank

	// Stream is for one rank on each side, of equal layouts, that hand over whole requests of a
	// trace, one at a time. The prefill fills a layer while it hands it over, in memory for two
	// layers, and copies the same bytes by memcpy in turn. The decode keeps the blocks of requests
	// by their hashes, in a pool of PoolBytes, and has the first blocks of later ones from there.
	Stream    bool
	PoolBytes uint64 // 0: half as much again as the largest request, if memory allows

	// Start starts a process that runs Rank.
	Start func(s Side, rank int) (*proc.Child, error)
	// Say is called with a few words about what begins; nil: nothing is.
	Say func(what string)
	// Progress is called with how many requests are done of how many.
	Progress func(done, total int64)
}

// plan is what all ranks get.
type plan struct {
	Spec            layout.Spec      `json:"spec"` // cut
	Prefill, Decode layout.GroupSpec // with blocks, and stages of as many layers
	Backend         string           `json:"backend"`
	Threads         int              `json:"threads"`
	Seed            uint64           `json:"seed"`
	Digest          bool             `json:"digest"`
	Stream          bool             `json:"stream"`
	Scratch         uint64           `json:"scratch"` // bytes for memcpy beside a stream
	Faults          map[Side]string  `json:"faults"`
	LimitMs         int64            `json:"limit_ms"`
	Victim          *victim          `json:"victim"` // in the last round
	rounds          [][]request      // one after the other; each at once
	prefill, decode []*layout.Side   // laid out
	layers, of      int              // kept of the model
	cut             int              // requests that were
	memory          uint64           // of all pools, and of what stands in for the sender's
	words           [2]string        // the groups as they were asked for
}

// request is one hand-over.
type request struct {
	Number  uint64   `json:"number"` // from 1 on
	Try     uint64   `json:"try"`
	Tokens  uint64   `json:"tokens"`
	From    uint64   `json:"from"` // tokens before it are on the decode side already
	Hashes  []uint64 `json:"hashes"`
	DP      [2]int   `json:"dp"` // from which data-parallel group to which
	Abort   *abort   `json:"abort"`
	arrival time.Duration
	// The prefill rank that does not say that it is done, so that the request cannot be complete
	// before it is ended; -1: none.
	Holder int `json:"holder"`
}

// id is the number of one attempt.
func (q *request) id() uint64 { return q.Try<<32 | q.Number }

func (q *request) span() layout.Span { return layout.Span{From: q.From, To: q.Tokens} }

// in reports whether a rank of a group has a part of the request.
func (q *request) in(side Side, s *layout.Side) bool {
	if side == DecodeSide {
		return q.DP[1] == s.DP
	}
	return q.DP[0] == s.DP
}

// abort is the rank that ends a request, and after which of its layers.
type abort struct {
	By    Side `json:"by"`
	Rank  int  `json:"rank"`
	Layer int  `json:"layer"`
}

// victim is the rank that is killed.
type victim struct {
	Side Side `json:"side"`
	Rank int  `json:"rank"`
}

func (p *plan) limit() time.Duration { return time.Duration(p.LimitMs) * time.Millisecond }

// killsIn reports whether a rank is killed in a round.
func (p *plan) killsIn(round int) bool { return p.Victim != nil && round == len(p.rounds)-1 }

// abortSeed makes the same requests abort in every run.
const abortSeed = 0x736c75696365 // "sluice"

// portion is how many of n requests a share of them is: rounded, but none for a share of 0 alone.
func portion(n int, share float64) int {
	if n == 0 || share <= 0 {
		return 0
	}
	return max(int(math.Round(share*float64(n))), 1)
}

// plan makes the plan; what cannot work is an error here.
func (o *Options) plan() (*plan, error) {
	if len(o.Requests) == 0 {
		return nil, errors.New("there are no requests")
	}
	p := &plan{Backend: o.Backend, Threads: o.Threads, Seed: o.Seed, Digest: o.Digest,
		Stream: o.Stream, Faults: o.Faults, LimitMs: o.Limit.Milliseconds(),
		words: [2]string{o.Prefill.String(), o.Decode.String()}}
	if _, err := PlanGroups(o.Spec, o.Prefill, o.Decode); err != nil {
		return nil, err
	}
	most, atOnce := o.TokensMax, atOnceMax
	if most == 0 {
		most = TokensMax
	}
	var requests []request
	longest := 0
	for i := range o.Requests {
		t := &o.Requests[i]
		from, to := max(1, o.Prefill.DP), max(1, o.Decode.DP)
		q := request{Number: uint64(i) + 1, Tokens: uint64(t.InputLength), Holder: -1,
			DP: [2]int{i % from, i / from % to}, arrival: t.Arrival() - o.Requests[0].Arrival()}
		if o.Stream {
			q.Tokens, q.Hashes = uint64(len(t.HashIDs)*trace.BlockTokens), t.HashIDs
		} else if q.Tokens > most {
			q.Tokens, p.cut = most, p.cut+1
		}
		requests = append(requests, q)
		if q.Tokens > requests[longest].Tokens {
			longest = i
		}
	}
	var err error
	if o.Stream {
		atOnce = 1
		err = p.choosePool(o, &requests[longest], hostmem.Limits().Available)
	} else {
		err = p.scale(o, requests[longest].Tokens)
	}
	if err != nil {
		return nil, err
	}
	p.rounds = slices.Collect(slices.Chunk(requests, atOnce))
	r := rand.New(rand.NewPCG(o.Seed, abortSeed))
	last := len(requests)
	if o.Kill != "" {
		if err := p.planKill(r, o.Kill); err != nil {
			return nil, err
		}
		last -= len(p.rounds[len(p.rounds)-1])
	}
	p.planAborts(r, requests[:last], o.AbortRate)
	p.planHits(r, requests, o.HitRate)
	return p, nil
}

// choosePool decides how many blocks the decode has where a trace is streamed. A request that can
// never fit is an error here, before anything starts. Without a size it is half as much again as
// the largest request, but no more than a third of the memory that is available: the prefill takes
// as much at most. available 0: not known.
func (p *plan) choosePool(o *Options, largest *request, available uint64) error {
	p.layers, p.Spec = layersOf(o.Spec), o.Spec
	p.of, p.Prefill, p.Decode = p.layers, o.Prefill, o.Decode
	p.Prefill.Blocks, p.Decode.Blocks = 1, 1
	one, err := p.Decode.Sides(p.Spec, 0)
	if err != nil {
		return err
	}
	if len(one) != 1 || one[0].Groups[0].Window > 0 || len(one[0].Groups) > 1 ||
		p.Prefill.String() != p.Decode.String() {
		return fmt.Errorf("a trace is streamed between two ranks of equal layouts that keep all "+
			"tokens: %w", layout.ErrGeometry)
	}
	block := uint64(0)
	for _, area := range one[0].Regions {
		block += area.Bytes
	}
	need := uint64(len(largest.Hashes))
	pool := o.PoolBytes / block
	if o.PoolBytes == 0 {
		pool = need + need/2
		if available > 0 {
			pool = min(pool, available/3/block)
		}
		pool = max(pool, need)
	}
	if pool < need {
		return fmt.Errorf("request %d needs %d blocks (%s), a pool of %s has %d: give it "+
			"--pool %s or more", largest.Number, need, figures.RoundSize(need*block),
			figures.FormatSize(o.PoolBytes), pool, poolSize(need*block))
	}
	ring, layer := need, block/uint64(p.layers)
	for i, area := range one[0].Regions { // whole pages of each layer
		for ring*area.Bytes/uint64(len(layersOn(one[0], i)))%pageBytes != 0 {
			ring++
		}
	}
	if max(pool, ring) > math.MaxUint32 {
		return fmt.Errorf("%d blocks: %w", pool, layout.ErrGeometry)
	}
	p.Prefill.Blocks, p.Decode.Blocks = uint32(ring), uint32(pool)
	p.Scratch = baselineBytes(need*layer, pool*block)
	beside := p.Scratch + ringLayers*ring*layer
	if p.memory = pool*block + beside; available > 0 && p.memory > available {
		return fmt.Errorf("the pool needs %s for %d blocks of %s, and the prefill %s, %s are "+
			"available: use fewer --requests, a smaller --model or a smaller --pool",
			figures.RoundSize(pool*block), pool, figures.RoundSize(block),
			figures.RoundSize(beside), figures.RoundSize(available))
	}
	if p.prefill, err = allSides(&p.Prefill, p.Spec); err == nil {
		p.decode, err = allSides(&p.Decode, p.Spec)
	}
	return err
}

// poolSize rounds up to a size that is easy to type.
func poolSize(n uint64) string { return figures.FormatSize((n + 1<<20 - 1) &^ (1<<20 - 1)) }

// scale chooses how many layers are kept: the most that fit.
func (p *plan) scale(o *Options, tokens uint64) error {
	p.of = layersOf(o.Spec)
	keep, memory := p.of, o.Memory
	if o.Scale > 0 {
		keep, memory = (p.of+o.Scale-1)/o.Scale, hostmem.Limits().Available
	} else if memory == 0 {
		memory = PoolsBytes
	}
	why := fmt.Errorf("model %q: %d layers are too few for %d and %d stages and each kind of "+
		"layer: use a smaller --scale: %w", o.Spec.Name, keep, o.Prefill.PP, o.Decode.PP,
		layout.ErrGeometry)
	for ; keep > 0; keep-- {
		ok, err := p.cutTo(o, keep, tokens)
		switch {
		case err != nil:
			return err
		case !ok:
			return why
		case p.memory <= memory || memory == 0:
			return nil
		}
		why = fmt.Errorf("the pools for %d requests of %d tokens need %s for %d of %d layers, "+
			"%s may be used: use fewer --tokens", atOnceMax, tokens, figures.RoundSize(p.memory),
			keep, p.of, figures.RoundSize(memory))
		if o.Scale > 0 {
			break
		}
	}
	return why
}

// cutTo lays the first layers of the model out, unless a kind of layer or a stage is without any.
func (p *plan) cutTo(o *Options, keep int, tokens uint64) (ok bool, err error) {
	p.layers, p.Spec = keep, cutLayers(o.Spec, keep)
	for i := range p.Spec.Tensors {
		if len(p.Spec.Tensors[i].Layers) == 0 {
			return false, nil
		}
	}
	kept := layersOf(p.Spec)
	if kept < max(o.Prefill.PP, o.Decode.PP) {
		return false, nil
	}
	p.Prefill, p.Decode = cutStages(o.Prefill, p.of, kept), cutStages(o.Decode, p.of, kept)
	p.memory = 0
	for _, g := range []struct {
		spec  *layout.GroupSpec
		sides *[]*layout.Side
	}{{&p.Prefill, &p.prefill}, {&p.Decode, &p.decode}} {
		if *g.sides, err = layOut(g.spec, p.Spec, tokens); err != nil {
			return false, err
		}
		for _, s := range *g.sides {
			for _, area := range s.Regions {
				p.memory += area.Bytes
			}
		}
	}
	return true, nil
}

// layersOf counts the layers of a model up to the last one that has a cache.
func layersOf(s layout.Spec) (n int) {
	for _, t := range s.Tensors {
		for _, l := range t.Layers {
			n = max(n, l+1)
		}
	}
	return n
}

// cutLayers returns a model of the first layers.
func cutLayers(s layout.Spec, keep int) layout.Spec {
	s.Tensors = slices.Clone(s.Tensors)
	for i := range s.Tensors {
		t := &s.Tensors[i]
		t.Layers = slices.DeleteFunc(slices.Clone(t.Layers), func(l int) bool { return l >= keep })
	}
	return s
}

// cutStages keeps the proportions of stages whose layers were given, and a layer in each.
func cutStages(g layout.GroupSpec, of, keep int) layout.GroupSpec {
	cuts := make([]int, len(g.Cuts))
	sum, at := 0, 0
	for i, n := range g.Cuts {
		sum += n
		next := (sum*keep + of/2) / of
		next = min(max(next, at+1), keep-(len(cuts)-1-i))
		cuts[i], at = next-at, next
	}
	if g.Cuts != nil {
		g.Cuts = cuts
	}
	return g
}

// layOut lays a group out with room for as many requests as are on their way at once.
func layOut(g *layout.GroupSpec, spec layout.Spec, tokens uint64) ([]*layout.Side, error) {
	g.Blocks, g.StateBlocks = 1, atOnceMax
	sides, err := g.Sides(spec, 0) // that of other data-parallel groups does not differ
	if err != nil {
		return nil, err
	}
	need := uint64(1)
	for _, s := range sides {
		for i := range s.Groups {
			if !s.Groups[i].State {
				need = max(need, slots(s, i, tokens))
			}
		}
	}
	g.Blocks = uint32(need * atOnceMax)
	return allSides(g, spec)
}

// allSides are the ranks of all data-parallel groups, one group behind the other.
func allSides(g *layout.GroupSpec, spec layout.Spec) (all []*layout.Side, err error) {
	for dp := range max(1, g.DP) {
		sides, err := g.Sides(spec, dp)
		if err != nil {
			return nil, err
		}
		all = append(all, sides...)
	}
	return all, nil
}

// groups returns where the ranks of two data-parallel groups begin, and where they end.
func (p *plan) groups(dp [2]int) (senders, receivers [2]int) {
	from, to := len(p.prefill)/max(1, p.Prefill.DP), len(p.decode)/max(1, p.Decode.DP)
	return [2]int{dp[0] * from, (dp[0] + 1) * from}, [2]int{dp[1] * to, (dp[1] + 1) * to}
}

// anyOf draws a rank.
func anyOf(r *rand.Rand, ranks [2]int) int { return ranks[0] + r.IntN(ranks[1]-ranks[0]) }

// slots returns how many blocks of a group a request takes on a rank.
func slots(s *layout.Side, group int, tokens uint64) uint64 {
	g := &s.Groups[group]
	switch {
	case g.State:
		return 1
	case g.Ring > 0:
		return uint64(g.Ring)
	}
	for i := range s.Views {
		if v := &s.Views[i]; v.Group == group {
			return (tokens + uint64(v.Tokens) - 1) / uint64(v.Tokens)
		}
	}
	return 0
}

// allRegions is in place of one region.
const allRegions = -1

// layersOn lists the layers of a rank that lie in a region, or all of them.
func layersOn(s *layout.Side, region int) []int {
	var list []int
	for i := range s.Views {
		if region == allRegions || s.Views[i].Region == region {
			list = append(list, s.Views[i].Layer)
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// planAborts chooses that share of the requests, and for each a rank of either side in turn and a
// layer. Of every second pair the end may come too late.
func (p *plan) planAborts(r *rand.Rand, requests []request, rate float64) {
	for i, at := range some(r, len(requests), rate) {
		q, sides := &requests[at], p.prefill
		senders, receivers := p.groups(q.DP)
		a := &abort{By: PrefillSide, Rank: anyOf(r, senders)}
		if i%2 == 1 {
			a.By, a.Rank, sides = DecodeSide, anyOf(r, receivers), p.decode
		}
		a.Layer = r.IntN(len(layersOn(sides[a.Rank], allRegions)))
		q.Abort = a
		if i%4 < 2 || p.Stream {
			q.Holder = anyOf(r, senders)
		}
	}
}

// some returns that share of n requests, in any order.
func some(r *rand.Rand, n int, share float64) []int {
	return r.Perm(n)[:portion(n, share)]
}

// planHits chooses that share of the requests, and how many tokens the decode side has of them: in
// turn whole ones of the smaller blocks, and any.
func (p *plan) planHits(r *rand.Rand, requests []request, share float64) {
	block := max(1, uint64(min(p.Prefill.BlockTokens, p.Decode.BlockTokens)))
	for i, at := range some(r, len(requests), share) {
		q := &requests[at]
		if q.Tokens < 2 {
			continue // the last token is never there
		}
		q.From = 1 + r.Uint64N(q.Tokens-1)
		if i%2 == 0 && q.From > block {
			q.From -= q.From % block
		}
	}
}

// planKill chooses the rank that is killed: one that sends something, or any that receives. The
// requests of the last round all go between the same groups.
func (p *plan) planKill(r *rand.Rand, side Side) error {
	last := p.rounds[len(p.rounds)-1]
	senders, receivers := p.groups(last[0].DP)
	plan, err := layout.NewPlan(p.prefill[senders[0]:senders[1]],
		p.decode[receivers[0]:receivers[1]])
	if err != nil {
		return err
	}
	holder := -1
	for holder < 0 || slices.Contains(plan.Idle(), p.prefill[holder].Rank) {
		holder = anyOf(r, senders)
	}
	p.Victim = &victim{side, holder}
	if side == DecodeSide {
		p.Victim.Rank = anyOf(r, receivers)
	}
	for i := range last {
		last[i].DP, last[i].Holder = last[0].DP, holder
	}
	return nil
}
