// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// ExplainTokens is the length of the prompt that an EdgeInfo counts for.
const ExplainTokens = 8192

// EdgeInfo says what one edge of a plan does for a prompt of ExplainTokens tokens. A window
// that does not end with a block is counted as the whole blocks that it takes at least.
type EdgeInfo struct {
	FromRank, ToRank int
	Op               driver.Op
	Layers           int
	Patterns         int    // of the layer that has most
	Bytes            uint64 // of all layers
	Runs             uint64 // contiguous on both sides: the descriptors of a list
	SenderRuns       uint64 // contiguous on the sender: the requests of a NIC that pulls
	ReceiverRuns     uint64 // contiguous on the receiver: the requests of a NIC that pushes
}

// Explain returns one EdgeInfo for each edge, by receiver and sender.
func (p *Plan) Explain() []EdgeInfo {
	var list []EdgeInfo
	for _, edges := range p.edges {
		for i := range edges {
			list = append(list, edges[i].info())
		}
	}
	return list
}

// Idle returns the ranks of the senders that no edge begins at: replicas, of whose cells other
// ranks send a copy. They, too, must be told when they may use their blocks again.
func (p *Plan) Idle() []int {
	sends := make([]bool, len(p.from))
	for _, edges := range p.edges {
		for i := range edges {
			sends[edges[i].From] = true
		}
	}
	var ranks []int
	for i, s := range p.from {
		if !sends[i] {
			ranks = append(ranks, s.Rank)
		}
	}
	return ranks
}

func (e *Edge) info() EdgeInfo {
	info := EdgeInfo{FromRank: e.plan.from[e.From].Rank, ToRank: e.plan.to[e.To].Rank, Op: e.Op,
		Layers: len(e.Layers)}
	for i := range e.Layers {
		info.Patterns = max(info.Patterns, e.first[i+1]-e.first[i])
	}
	for i := range e.moves {
		m := &e.moves[i]
		entries := m.entries(ExplainTokens)
		axes := [3]axis{m.parts, m.units, {m.unit, m.from.token, m.to.token}}
		run, _ := coalesce(m.cell, &axes)
		from, to := m.runs()
		info.Bytes += entries * m.entry()
		info.Runs += entries * (m.entry() / run)
		info.SenderRuns += entries * from
		info.ReceiverRuns += entries * to
	}
	return info
}

// entries returns how many entries, rounded up, a prompt of that many tokens has.
func (m *move) entries(tokens uint64) uint64 {
	if m.state {
		return 1
	}
	if m.window > 0 {
		tokens = min(tokens, m.window)
	}
	return (tokens + m.unit*m.period - 1) / (m.unit * m.period)
}

// String returns a line of words: the ranks, what moves, and why in that direction.
func (i EdgeInfo) String() string {
	who := fmt.Sprintf("rank %d pushes to rank %d", i.FromRank, i.ToRank)
	why := fmt.Sprintf("a NIC sends %d requests, and %d if rank %d pulled", i.ReceiverRuns,
		i.SenderRuns, i.ToRank)
	if i.Op == driver.Read {
		who = fmt.Sprintf("rank %d pulls from rank %d", i.ToRank, i.FromRank)
		why = fmt.Sprintf("a NIC sends %d requests, and %d if rank %d pushed", i.SenderRuns,
			i.ReceiverRuns, i.FromRank)
	}
	return fmt.Sprintf("%s: %d layers, patterns of a layer: %d; for %d tokens %d bytes, in a list "+
		"%d descriptors; %s", who, i.Layers, i.Patterns, ExplainTokens, i.Bytes, i.Runs, why)
}
