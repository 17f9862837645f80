// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
)

// GroupReport is the outcome of a replay between two groups of ranks. The JSON keys are an
// interface: keys may be added, never renamed.
type GroupReport struct {
	Model        string `json:"model"`
	Prefill      string `json:"prefill"`
	Decode       string `json:"decode"`
	PrefillRanks int    `json:"prefill_ranks"`
	DecodeRanks  int    `json:"decode_ranks"`
	Route        string `json:"route"`

	Layers      int    `json:"layers"` // that were replayed
	ModelLayers int    `json:"model_layers"`
	PoolBytes   uint64 `json:"pool_bytes"` // of all ranks
	Shortened   int    `json:"requests_shortened"`

	// What the plan of one data-parallel group says of the whole model, for a prompt of
	// layout.ExplainTokens tokens.
	Edges       []GroupEdge `json:"edges"`
	Idle        []int       `json:"idle_ranks"` // prefill ranks that send nothing
	Patterns    int         `json:"patterns"`
	Descriptors uint64      `json:"descriptors_equivalent"`
	PlanUs      float64     `json:"plan_us"`
	BuildUs     float64     `json:"build_us"`

	Requests int    `json:"requests"`
	Finished int    `json:"finished"` // complete on all ranks
	Aborted  int    `json:"aborted"`
	Failed   int    `json:"failed"` // for another reason, that of a killed rank among them
	Tokens   uint64 `json:"tokens"` // of the longest
	Bytes    uint64 `json:"bytes"`  // that have come, of those that finished
	// The bytes of rounds without an end before time, over the time from the word to hand over to
	// the last rank's word that it has.
	GBps        float64 `json:"gbps"`
	RequestMost int     `json:"request_bytes"` // begin and grant of one pair of ranks, at most

	Checked         uint64   `json:"checked_bytes"`
	MismatchedBytes uint64   `json:"mismatched_bytes"` // those written to free blocks among them
	Mismatches      int      `json:"digest_mismatches"`
	Digests         bool     `json:"digests"` // were compared
	FirstMismatches []string `json:"first_mismatches"`
	Hits            int      `json:"prefix_hits"` // requests with first tokens that were there
	HitTokens       uint64   `json:"prefix_tokens"`
	Reused          uint64   `json:"blocks_reused"` // of requests that failed, by other ones
	Leaked          int      `json:"leaked"`        // blocks and leases

	Faults       uint64  `json:"faults"` // that rules have made
	Killed       string  `json:"killed"` // the rank; empty: none
	SlowestEndMs float64 `json:"slowest_end_ms"`

	Unexpected []string   `json:"unexpected"` // why requests failed, where nothing was to make them
	Seconds    GroupTimes `json:"seconds"`

	limit  time.Duration
	rated  uint64 // bytes
	moved  time.Duration
	groups [2]int // data-parallel groups of prefill and of decode
	ruled  bool   // there are rules that make faults
	why    string // the first of Failed did; a killed rank says nothing
}

// GroupEdge is what one rank sends to one other.
type GroupEdge struct {
	PlanEdge
	RequestBytes int `json:"request_bytes"` // of the messages that begin a request, at most
}

// GroupTimes say where the time went.
type GroupTimes struct {
	Setup    float64 `json:"setup"`    // until all ranks were connected
	Replay   float64 `json:"replay"`   // all requests, with filling and comparing
	Transfer float64 `json:"transfer"` // handing them over
}

func newGroupReport(p *groupPlan) *GroupReport {
	w := p.whole
	r := &GroupReport{Model: w.Model, Prefill: p.words[0], Decode: p.words[1],
		PrefillRanks: len(p.prefill), DecodeRanks: len(p.decode), Layers: p.layers,
		ModelLayers: p.of, PoolBytes: p.memory, Shortened: p.cut, Idle: w.Idle,
		Patterns: w.Patterns, Descriptors: w.Descriptors, PlanUs: w.PlanUs, BuildUs: w.BuildUs,
		Digests: p.Digest, FirstMismatches: []string{}, Unexpected: []string{}, limit: p.limit(),
		groups: [2]int{max(1, p.Prefill.DP), max(1, p.Decode.DP)}, ruled: len(p.Faults) > 0}
	for _, e := range w.Edges {
		r.Edges = append(r.Edges, GroupEdge{PlanEdge: e})
	}
	for _, round := range p.Rounds {
		for _, q := range round {
			r.Requests++
			r.Tokens = max(r.Tokens, q.Tokens)
			if r.HitTokens += q.From; q.From > 0 {
				r.Hits++
			}
		}
	}
	return r
}

// round adds one round up. outcomes are by rank and request; those of a killed rank are absent.
func (r *GroupReport) round(p *groupPlan, n int, outcomes [][]groupOutcome, bytes uint64,
	took time.Duration) {
	whole := true
	for i, q := range p.Rounds[n] {
		why, failed, kill := "", false, p.Victim != nil && n == len(p.Rounds)-1
		for rank, list := range outcomes {
			if list == nil {
				failed = true
				continue
			}
			o := &list[i]
			failed, why = failed || o.Error != "", cmp.Or(why, o.Error)
			if o.Damaged {
				r.Mismatches++
			}
			if o.Error != "" && !o.Planned && len(r.Unexpected) < firstMax {
				r.Unexpected = append(r.Unexpected, o.Error)
			}
			for to, n := range o.Begin {
				r.begun(p, rank, to, n)
			}
		}
		switch {
		case !failed:
			r.Finished++
		case q.Abort != nil && !kill:
			r.Aborted++
		default:
			r.Failed++
			r.why = cmp.Or(r.why, why)
		}
		whole = whole && !failed
	}
	r.Bytes += bytes
	r.Seconds.Transfer += took.Seconds()
	if whole {
		r.rated += bytes
		r.moved += took
		r.GBps = figures.GBps(r.rated, r.moved)
	}
}

// begun notes what it took to begin a request.
func (r *GroupReport) begun(p *groupPlan, from, to, bytes int) {
	r.RequestMost = max(r.RequestMost, bytes)
	for i := range r.Edges {
		if e := &r.Edges[i]; e.From == p.prefill[from].Rank && e.To == p.decode[to].Rank {
			e.RequestBytes = max(e.RequestBytes, bytes)
		}
	}
}

// add adds what one rank says at its end.
func (r *GroupReport) add(g *groupRankResult) {
	r.Checked += g.Checked
	r.MismatchedBytes += g.Wrong
	r.Reused += g.Reused
	r.Faults += g.Faults
	r.Leaked += g.Leaked
	if r.Route == "" {
		r.Route = g.Route
	}
	room := firstMax - len(r.FirstMismatches)
	r.FirstMismatches = append(r.FirstMismatches, g.First[:min(room, len(g.First))]...)
}

// Err is what is wrong with a replay that came to its end.
func (r *GroupReport) Err() error {
	switch {
	case r.MismatchedBytes > 0:
		return fmt.Errorf("%d bytes differ, the first: %s", r.MismatchedBytes,
			r.FirstMismatches[0])
	case r.Mismatches > 0:
		return fmt.Errorf("digests differ %d times", r.Mismatches)
	case len(r.Unexpected) > 0:
		return fmt.Errorf("a request failed, the first: %s", r.Unexpected[0])
	case r.Leaked > 0:
		return fmt.Errorf("%d blocks and leases were not given back", r.Leaked)
	case r.SlowestEndMs > figures.Micros(r.limit)/1e3:
		return fmt.Errorf("a rank took %.0f ms to end its requests with %s, which was killed; the "+
			"limit is %v", r.SlowestEndMs, r.Killed, r.limit)
	}
	return nil
}

// Text prints the report for people.
func (r *GroupReport) Text(w io.Writer) error {
	digests, rate := "digests not compared", ""
	if r.GBps > 0 {
		rate = fmt.Sprintf(", %.2f GB/s", r.GBps)
	}
	if r.Digests {
		digests = fmt.Sprintf("%d digests differ", r.Mismatches)
		rate += " with digests on both sides"
	}
	_, err := fmt.Fprintf(w, `model       %s, %d of %d layers, in pools of %s
prefill     %s: %s
decode      %s: %s
plan        %d edges, %d patterns, in lists %d descriptors; %.0f µs once, %.2f µs a layer of an edge
            (the whole model, 8192 tokens)
requests    %d of at most %d tokens (%d shortened): %d finished, %d aborted, %d failed
mismatches  %d of %s; %s
blocks      %d of ended requests used again; %d blocks and leases leaked
route       %s
transfer    %s in %.2f s%s; %d bytes at most to begin a request on a pair of ranks
time        setup %.2f s, replay %.2f s
`,
		r.Model, r.Layers, r.ModelLayers, figures.RoundSize(r.PoolBytes), r.Prefill,
		Ranks(r.PrefillRanks/r.groups[0], r.groups[0]), r.Decode,
		Ranks(r.DecodeRanks/r.groups[1], r.groups[1]), len(r.Edges), r.Patterns,
		r.Descriptors, r.PlanUs, r.BuildUs, r.Requests, r.Tokens, r.Shortened, r.Finished,
		r.Aborted, r.Failed, r.MismatchedBytes, figures.RoundSize(r.Checked), digests, r.Reused,
		r.Leaked, r.Route, figures.RoundSize(r.Bytes), r.Seconds.Transfer, rate, r.RequestMost,
		r.Seconds.Setup, r.Seconds.Replay)
	if err == nil {
		_, err = io.WriteString(w, r.asked())
	}
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// asked are the lines about what only some replays are asked for.
func (r *GroupReport) asked() (text string) {
	if r.Hits > 0 {
		text += fmt.Sprintf("prefixes    %d requests, of which %d tokens were there before\n",
			r.Hits, r.HitTokens)
	}
	if r.Killed != "" {
		text += fmt.Sprintf("killed      %s; the last rank ended its requests after %.1f ms\n",
			r.Killed, r.SlowestEndMs)
	}
	if r.why != "" {
		text += fmt.Sprintf("failed      the first: %s\n", r.why)
	}
	switch {
	case r.Faults > 0:
		text += fmt.Sprintf("faults      %d\n", r.Faults)
	case r.ruled:
		text += "faults      0: no rule met an event; " + r.moves() + "\n"
	}
	return text
}

// moves says by which events the edges move bytes.
func (r *GroupReport) moves() string {
	pull := func(e GroupEdge) bool { return e.Op == "pull" }
	push := func(e GroupEdge) bool { return e.Op == "push" }
	switch {
	case !slices.ContainsFunc(r.Edges, push):
		return "all edges pull (read)"
	case !slices.ContainsFunc(r.Edges, pull):
		return "all edges push (write)"
	}
	return "some edges push (write), others pull (read)"
}
