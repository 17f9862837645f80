// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// Planning is what the plan between two groups of ranks says, for a prompt of
// layout.ExplainTokens tokens, and how long it takes to make. The JSON keys are an interface:
// keys may be added, never renamed.
type Planning struct {
	Model        string `json:"model"`
	Prefill      string `json:"prefill"` // layout.GroupSpec.String
	Decode       string `json:"decode"`
	PrefillRanks int    `json:"prefill_ranks"`
	DecodeRanks  int    `json:"decode_ranks"`
	Tokens       int    `json:"tokens"`

	Edges       []PlanEdge `json:"edges"`
	Idle        []int      `json:"idle_ranks"` // prefill ranks that send nothing
	Bytes       uint64     `json:"bytes"`
	Patterns    int        `json:"patterns"`
	Descriptors uint64     `json:"descriptors_equivalent"`

	PlanUs  float64 `json:"plan_us"`  // layout.NewPlan
	BuildUs float64 `json:"build_us"` // median of layout.Edge.Layer over all edges and layers

	groups [2]int // data-parallel groups of prefill and of decode, each of so many ranks
}

// PlanEdge is what one rank sends to one other.
type PlanEdge struct {
	From        int    `json:"from"`
	To          int    `json:"to"`
	Op          string `json:"op"` // push or pull
	Layers      int    `json:"layers"`
	LayerMax    int    `json:"patterns_per_layer"` // of the layer that has most
	Patterns    int    `json:"patterns"`
	Bytes       uint64 `json:"bytes"`
	Descriptors uint64 `json:"descriptors_equivalent"` // runs that are contiguous on both sides
	Sender      uint64 `json:"sender_runs"`            // contiguous there
	Receiver    uint64 `json:"receiver_runs"`

	words string
}

// PlanGroups plans the hand-over of a model between two groups, and times it. Errors are those of
// layout.GroupSpec.Sides and layout.NewPlan.
func PlanGroups(spec kvlayout.Spec, from, to kvlayout.GroupSpec) (*Planning, error) {
	senders, err := from.Sides(spec, 0)
	if err != nil {
		return nil, fmt.Errorf("prefill: %w", err)
	}
	receivers, err := to.Sides(spec, 0)
	if err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	begin := time.Now()
	plan, err := kvlayout.NewPlan(senders, receivers)
	took := time.Since(begin)
	if err != nil {
		return nil, err
	}
	p := &Planning{Model: spec.Name, Prefill: from.String(), Decode: to.String(),
		PrefillRanks: len(senders), DecodeRanks: len(receivers), Tokens: kvlayout.ExplainTokens,
		PlanUs: figures.Micros(took), Idle: append([]int{}, plan.Idle()...),
		groups: [2]int{from.DP, to.DP}}
	for _, i := range plan.Explain() {
		e := PlanEdge{From: i.FromRank, To: i.ToRank, Op: "push", Layers: i.Layers,
			LayerMax: i.Patterns, Bytes: i.Bytes, Descriptors: i.Runs, Sender: i.SenderRuns,
			Receiver: i.ReceiverRuns, words: i.String()}
		if i.Op == engine.Read {
			e.Op = "pull"
		}
		p.Edges = append(p.Edges, e)
		p.Bytes += e.Bytes
		p.Descriptors += e.Descriptors
	}
	return p, p.build(plan, len(receivers))
}

// build counts the patterns of all edges, and takes the time.
func (p *Planning) build(plan *kvlayout.Plan, receivers int) error {
	table := make([]uint32, kvlayout.ExplainTokens) // as many slots as a block of one token needs
	tables := make(kvlayout.Tables, kvlayout.GroupsMax)
	for i := range tables {
		tables[i] = table
	}
	span := kvlayout.Span{To: kvlayout.ExplainTokens}
	times := figures.NewSamples(1 << 16)
	var patterns []driver.Pattern
	number := 0
	for to := range receivers {
		for _, edge := range plan.Edges(to) {
			for _, l := range edge.Layers {
				var err error
				begin := time.Now()
				patterns, err = edge.Layer(patterns[:0], l, tables, tables, span)
				times.Add(time.Since(begin))
				if err != nil {
					return err
				}
				p.Edges[number].Patterns += len(patterns)
			}
			p.Patterns += p.Edges[number].Patterns
			number++
		}
	}
	p.BuildUs = figures.Micros(times.Percentile(50))
	return nil
}

// Ranks says how many ranks each of the data-parallel groups has.
func Ranks(n, groups int) string {
	text := fmt.Sprintf("%d ranks", n)
	if n == 1 {
		text = "1 rank"
	}
	if groups > 1 {
		text += fmt.Sprintf(" in each of %d data-parallel groups", groups)
	}
	return text
}

// String says it in words, a line for each edge.
func (p *Planning) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d tokens\nprefill: %s: %s\ndecode:  %s: %s\n", p.Model, p.Tokens,
		p.Prefill, Ranks(p.PrefillRanks, p.groups[0]), p.Decode, Ranks(p.DecodeRanks, p.groups[1]))
	for i := range p.Edges {
		fmt.Fprintln(&b, p.Edges[i].words)
	}
	fmt.Fprintf(&b, "in all %s by %d patterns, in lists %d descriptors\n",
		figures.RoundSize(p.Bytes), p.Patterns, p.Descriptors)
	if len(p.Idle) > 0 {
		fmt.Fprintf(&b, "prefill ranks %v send nothing: other ranks send what they hold, too\n",
			p.Idle)
	}
	fmt.Fprintf(&b, "the plan took %.1f µs, once for all requests; the patterns of one layer of "+
		"an edge take %.2f µs (median)\n", p.PlanUs, p.BuildUs)
	return b.String()
}
