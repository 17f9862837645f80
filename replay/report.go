// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
)

// Quantiles are of a list of times.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

func quantiles(s *figures.Samples, unit time.Duration) Quantiles {
	return Quantiles{
		P50: float64(s.Percentile(50)) / float64(unit),
		P99: float64(s.Percentile(99)) / float64(unit),
	}
}

func (q *Quantiles) max(o Quantiles) { q.P50, q.P99 = max(q.P50, o.P50), max(q.P99, o.P99) }

// Report is the outcome of a replay. The JSON keys are an interface: keys may be added, never
// renamed.
type Report struct {
	Model        string `json:"model"`
	Prefill      string `json:"prefill"` // layout.GroupSpec.String
	Decode       string `json:"decode"`
	PrefillRanks int    `json:"prefill_ranks"`
	DecodeRanks  int    `json:"decode_ranks"`
	Route        string `json:"route"`
	Threads      int    `json:"threads"`
	Layers       int    `json:"layers"` // that were replayed
	ModelLayers  int    `json:"model_layers"`
	PoolBytes    uint64 `json:"pool_bytes"` // of all ranks, and for memcpy
	Shortened    int    `json:"requests_shortened"`

	Requests int    `json:"requests"`
	Finished int    `json:"finished"` // complete on all ranks
	Aborted  int    `json:"aborted"`  // as planned
	Failed   int    `json:"failed"`   // for another reason, that of a killed rank among them
	Retried  int    `json:"retried"`  // hand-overs that failed and were begun again
	Tokens   uint64 `json:"tokens"`   // of the longest
	Bytes    uint64 `json:"bytes"`    // that have come
	// Of a stream, bytes over the time in which a layer was in flight, without the prefill's
	// digests before that, and beside the decode's digests. Else the bytes of rounds
	// without an end before time, over the time from the order to hand over to the last rank's word
	// that it has.
	GBps       float64 `json:"gbps"`
	MemcpyGBps float64 `json:"memcpy_gbps"` // of a stream: the same bytes, in alternation
	Ratio      float64 `json:"ratio"`       // gbps / memcpy_gbps
	// Of the slowest prefill rank: from the offer to the confirmation, filling and memcpy not
	// counted; and from post to completion of a layer.
	RequestMs Quantiles `json:"request_ms"`
	LayerUs   Quantiles `json:"layer_us"`

	Checked uint64 `json:"checked_bytes"`
	// Cells that are not what they must be, late writes among them, and layers of which ranks have
	// found other digests.
	Mismatches      uint64   `json:"mismatches"`
	FirstMismatches []string `json:"first_mismatches"` // the first few, in words
	Digests         bool     `json:"digests"`          // of both sides were compared
	Hits            int      `json:"prefix_hits"`      // requests with first tokens that were there
	HitTokens       uint64   `json:"prefix_tokens"`
	Watched         uint64   `json:"blocks_watched"`    // poisoned behind requests that failed
	UsedAgain       uint64   `json:"blocks_used_again"` // of those, by other requests
	Leaked          uint64   `json:"leaked"`            // blocks in use by no request, leases
	Faults          uint64   `json:"faults"`            // that rules have brought about
	Killed          string   `json:"killed"`            // the rank; empty: none
	SlowestEndMs    float64  `json:"slowest_end_ms"`
	Unexpected      []string `json:"unexpected"` // failures that the plan cannot cause
	Seconds         Times    `json:"seconds"`

	stream bool
	faulty bool // rules were given: the report says what came of them, be it nothing
	limit  time.Duration
	rated  uint64 // bytes
	moved  time.Duration
	groups [2]int // data-parallel groups of prefill and of decode
	why    string // the first of Failed did; a killed rank says nothing
}

// Times say where the time went.
type Times struct {
	Setup    float64 `json:"setup"`    // until all were connected, memory faulted in
	Replay   float64 `json:"replay"`   // all requests
	Transfer float64 `json:"transfer"` // of a stream, layers in flight; else requests
	Fill     float64 `json:"fill"`     // of a stream: making the content
	Digest   float64 `json:"digest"`   // of a stream: the prefill's digests, before each transfer
	Memcpy   float64 `json:"memcpy"`   // of a stream
}

func newReport(p *plan) *Report {
	r := &Report{Model: p.Spec.Name, Prefill: p.words[0], Decode: p.words[1],
		PrefillRanks: len(p.prefill), DecodeRanks: len(p.decode), Threads: p.Threads,
		Layers: p.layers, ModelLayers: p.of, PoolBytes: p.memory, Shortened: p.cut,
		Digests: p.Digest, FirstMismatches: []string{}, Unexpected: []string{},
		stream: p.Stream, faulty: len(p.Faults) > 0, limit: p.limit(),
		groups: [2]int{max(1, p.Prefill.DP), max(1, p.Decode.DP)}}
	for _, round := range p.rounds {
		r.Requests += len(round)
		for _, q := range round {
			r.Tokens = max(r.Tokens, q.Tokens)
		}
	}
	return r
}

// round adds one attempt at the requests of a round up, and returns those that are to be handed
// over again. outcomes are by rank and request; those of a killed rank are absent.
func (r *Report) round(round []request, kill, mayRetry bool, outcomes [][]outcome, bytes uint64,
	took time.Duration) (again []request) {
	whole := true
	for i, q := range round {
		why, failed, retry := "", false, mayRetry && q.Abort == nil
		for _, list := range outcomes {
			if list == nil {
				failed = true
				continue
			}
			o := &list[i]
			failed, why = failed || o.Error != "", cmp.Or(why, o.Error)
			if o.Damaged {
				r.Mismatches++
			}
			if o.Damaged || o.Error != "" && !o.Planned {
				retry = false
			}
			if o.Error != "" && !o.Planned && len(r.Unexpected) < firstMax {
				r.Unexpected = append(r.Unexpected, o.Error)
			}
		}
		whole = whole && !failed
		switch {
		case failed && retry:
			again = append(again, q)
			continue
		case !failed:
			r.Finished++
		case q.Abort != nil && !kill:
			r.Aborted++
		default:
			r.Failed++
			r.why = cmp.Or(r.why, why)
		}
		if r.HitTokens += q.From; q.From > 0 {
			r.Hits++
		}
	}
	r.Bytes += bytes
	if r.stream {
		return again
	}
	r.Seconds.Transfer += took.Seconds()
	if whole {
		r.rated += bytes
		r.moved += took
		r.GBps = figures.GBps(r.rated, r.moved)
	}
	return again
}

// add adds what one rank says at its end.
func (r *Report) add(g *result) {
	r.Checked += g.Checked
	r.Mismatches += g.Wrong
	r.Watched += g.Watched
	r.UsedAgain += g.Reused
	r.Faults += g.Faults
	r.Leaked += g.Leaked
	r.Route = cmp.Or(r.Route, g.Route)
	r.RequestMs.max(g.RequestMs)
	r.LayerUs.max(g.LayerUs)
	room := firstMax - len(r.FirstMismatches)
	r.FirstMismatches = append(r.FirstMismatches, g.First[:min(room, len(g.First))]...)
	if g.Transfer > 0 {
		r.GBps = figures.GBps(g.Bytes, g.Transfer)
		r.Seconds.Transfer, r.Seconds.Fill = g.Transfer.Seconds(), g.Fill.Seconds()
		r.Seconds.Digest, r.Seconds.Memcpy = g.Digest.Seconds(), g.Memcpy.Seconds()
		if r.MemcpyGBps = figures.GBps(g.MemcpyBytes, g.Memcpy); r.MemcpyGBps > 0 {
			r.Ratio = r.GBps / r.MemcpyGBps
		}
	}
}

// Err is what is wrong with a replay that came to its end.
func (r *Report) Err() error {
	switch {
	case r.Mismatches > 0 && len(r.FirstMismatches) > 0:
		return fmt.Errorf("%d mismatches, the first: %s", r.Mismatches, r.FirstMismatches[0])
	case r.Mismatches > 0:
		return fmt.Errorf("%d mismatches: digests differ", r.Mismatches)
	case r.Leaked > 0:
		return fmt.Errorf("%d blocks or leases were not given back", r.Leaked)
	case len(r.Unexpected) > 0:
		return fmt.Errorf("a request failed, the first: %s", r.Unexpected[0])
	case r.SlowestEndMs > figures.Micros(r.limit)/1e3:
		return fmt.Errorf("a rank took %.0f ms to end its requests with %s, which was killed; the "+
			"limit is %v", r.SlowestEndMs, r.Killed, r.limit)
	case r.Failed > 0 && r.Killed == "":
		return fmt.Errorf("%d requests failed, the first: %s", r.Failed, r.why)
	}
	return nil
}

// Text prints the report for people.
func (r *Report) Text(w io.Writer) error {
	digests, rate, stream := "no digests of layers", "", ""
	if r.GBps > 0 {
		rate = fmt.Sprintf(", %.2f GB/s", r.GBps)
	}
	switch {
	case r.Digests && r.stream:
		rate += " beside the decode's digests"
	case r.Digests:
		rate += " with digests on both sides"
	}
	if r.Digests {
		digests = "and digests of layers"
	}
	if r.stream {
		rate += fmt.Sprintf(", memcpy %.2f GB/s, ratio %.3f", r.MemcpyGBps, r.Ratio)
		stream = fmt.Sprintf("; filling %.2f s, the prefill's digests %.2f s, memcpy %.2f s",
			r.Seconds.Fill, r.Seconds.Digest, r.Seconds.Memcpy)
	}
	_, err := fmt.Fprintf(w, `model       %s, %d of %d layers, in pools of %s, %d thread(s)
prefill     %s: %s
decode      %s: %s
requests    %d of at most %d tokens (%d shortened): %d finished, %d aborted, %d failed
mismatches  %d of %s compared, %s
blocks      %d watched behind ended requests, %d used again; %d blocks and leases leaked
route       %s
transfer    %s in %.2f s%s
times       request p50 %.2f ms, p99 %.2f ms; layer p50 %.1f µs, p99 %.1f µs
time        setup %.2f s, replay %.2f s%s
%s`,
		r.Model, r.Layers, r.ModelLayers, figures.RoundSize(r.PoolBytes), r.Threads, r.Prefill,
		Ranks(r.PrefillRanks/r.groups[0], r.groups[0]), r.Decode,
		Ranks(r.DecodeRanks/r.groups[1], r.groups[1]), r.Requests, r.Tokens, r.Shortened,
		r.Finished, r.Aborted, r.Failed, r.Mismatches, figures.RoundSize(r.Checked), digests,
		r.Watched, r.UsedAgain, r.Leaked, r.Route, figures.RoundSize(r.Bytes), r.Seconds.Transfer,
		rate, r.RequestMs.P50, r.RequestMs.P99, r.LayerUs.P50, r.LayerUs.P99, r.Seconds.Setup,
		r.Seconds.Replay, stream, r.asked())
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

// asked are the lines about what only some replays are asked for.
func (r *Report) asked() (text string) {
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
		text += fmt.Sprintf("faults      %d, %d hand-overs begun again\n", r.Faults, r.Retried)
	case r.faulty:
		text += "faults      0: no rule met an event\n"
	}
	return text
}
