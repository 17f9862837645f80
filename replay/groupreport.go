// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/sluicehq/sluice/internal/figures"
)

// GroupReport is what is reported of groups of ranks alone.
type GroupReport struct {
	Prefill      string `json:"prefill"`
	Decode       string `json:"decode"`
	PrefillRanks int    `json:"prefill_ranks"`
	DecodeRanks  int    `json:"decode_ranks"`

	Layers      int `json:"layers"` // that were replayed
	ModelLayers int `json:"model_layers"`
	Shortened   int `json:"requests_shortened"`

	Finished int    `json:"finished"` // complete on all ranks
	Failed   int    `json:"failed"`   // for another reason, that of a killed rank among them
	Tokens   uint64 `json:"tokens"`   // of the longest

	Checked   uint64 `json:"checked_bytes"`
	Digests   bool   `json:"digests"`     // of both sides were compared
	Hits      int    `json:"prefix_hits"` // requests with first tokens that were there
	HitTokens uint64 `json:"prefix_tokens"`
	UsedAgain uint64 `json:"blocks_used_again"` // of requests that failed, by other ones

	Killed       string   `json:"killed"` // the rank; empty: none
	SlowestEndMs float64  `json:"slowest_end_ms"`
	Unexpected   []string `json:"unexpected"` // why requests failed, where nothing was to make them

	limit  time.Duration
	rated  uint64 // bytes
	moved  time.Duration
	groups [2]int // data-parallel groups of prefill and of decode
	why    string // the first of Failed did; a killed rank says nothing
}

func newGroupReport(p *groupPlan) *Report {
	r := &Report{Model: p.Spec.Name, PoolBytes: p.memory, FirstMismatches: []string{},
		faulty: len(p.Faults) > 0, GroupReport: &GroupReport{
			Prefill: p.words[0], Decode: p.words[1],
			PrefillRanks: len(p.prefill), DecodeRanks: len(p.decode), Layers: p.layers,
			ModelLayers: p.of, Shortened: p.cut, Digests: p.Digest,
			Unexpected: []string{}, limit: p.limit(),
			groups: [2]int{max(1, p.Prefill.DP), max(1, p.Decode.DP)}}}
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
func (r *Report) round(p *groupPlan, n int, outcomes [][]groupOutcome, bytes uint64,
	took time.Duration) {
	whole := true
	for i, q := range p.Rounds[n] {
		why, failed, kill := "", false, p.Victim != nil && n == len(p.Rounds)-1
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
			if o.Error != "" && !o.Planned && len(r.Unexpected) < firstMax {
				r.Unexpected = append(r.Unexpected, o.Error)
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

// add adds what one rank says at its end.
func (r *Report) add(g *groupRankResult) {
	r.Checked += g.Checked
	r.Mismatches += g.Wrong
	r.UsedAgain += g.Reused
	r.Faults += g.Faults
	r.Leaked += g.Leaked
	if r.Route == "" {
		r.Route = g.Route
	}
	room := firstMax - len(r.FirstMismatches)
	r.FirstMismatches = append(r.FirstMismatches, g.First[:min(room, len(g.First))]...)
}

// err is what is wrong with a replay between groups.
func (r *GroupReport) err() error {
	switch {
	case len(r.Unexpected) > 0:
		return fmt.Errorf("a request failed, the first: %s", r.Unexpected[0])
	case r.SlowestEndMs > figures.Micros(r.limit)/1e3:
		return fmt.Errorf("a rank took %.0f ms to end its requests with %s, which was killed; the "+
			"limit is %v", r.SlowestEndMs, r.Killed, r.limit)
	}
	return nil
}

// groupText is Text of groups.
func (r *Report) groupText(w io.Writer) error {
	digests, rate := "no digests of layers", ""
	if r.GBps > 0 {
		rate = fmt.Sprintf(", %.2f GB/s", r.GBps)
	}
	if r.Digests {
		digests = "and digests of layers"
		rate += " with digests on both sides"
	}
	_, err := fmt.Fprintf(w, `model       %s, %d of %d layers, in pools of %s
prefill     %s: %s
decode      %s: %s
requests    %d of at most %d tokens (%d shortened): %d finished, %d aborted, %d failed
mismatches  %d of %s compared, %s
blocks      %d of ended requests used again; %d blocks and leases leaked
route       %s
transfer    %s in %.2f s%s
time        setup %.2f s, replay %.2f s
%s`,
		r.Model, r.Layers, r.ModelLayers, figures.RoundSize(r.PoolBytes), r.Prefill,
		Ranks(r.PrefillRanks/r.groups[0], r.groups[0]), r.Decode,
		Ranks(r.DecodeRanks/r.groups[1], r.groups[1]), r.Requests, r.Tokens, r.Shortened,
		r.Finished, r.Aborted, r.Failed, r.Mismatches, figures.RoundSize(r.Checked), digests,
		r.UsedAgain, r.Leaked, r.Route, figures.RoundSize(r.Bytes), r.Seconds.Transfer, rate,
		r.Seconds.Setup, r.Seconds.Replay, r.asked())
	return err
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
		text += fmt.Sprintf("faults      %d\n", r.Faults)
	case r.faulty:
		text += "faults      0: no rule met an event\n"
	}
	return text
}
