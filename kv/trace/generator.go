// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"math"
	"math/rand/v2"
	"slices"
)

// The statistics of the conversation trace that the generator imitates.
const (
	conversationRate  = 12031 / 3537e3 // requests a millisecond
	conversationReuse = 0.366          // of all blocks were in an earlier request
)

// historyMax is how many conversations may still be continued.
const historyMax = 1024

// Generator makes up requests without end, with the statistics of the
// conversation trace: lengths, shared prefixes, arrivals. The same seed gives
// the same requests. It is not for several goroutines at once.
//
// All prompts begin with the same block (the system prompt); some continue an
// earlier one, as the next turn of a conversation does, and share all of its
// full blocks.
type Generator struct {
	random       *rand.Rand
	at           float64    // ms of the last arrival
	phase        [2]float64 // of the input and output lengths
	nextID       uint64
	refs, reused int
	history      [][]uint64 // full blocks of conversations, a ring
	oldest       int
}

// NewGenerator makes a generator.
func NewGenerator(seed uint64) *Generator {
	random := rand.New(rand.NewPCG(seed, 0x736c75696365)) // the second word is fixed: "sluice"
	return &Generator{random: random, phase: [2]float64{random.Float64(), random.Float64()},
		nextID: 1}
}

// Next returns the next request. Arrivals never go back.
func (g *Generator) Next() Request {
	if g.refs > 0 {
		g.at += g.random.ExpFloat64() / conversationRate
	}
	q := Request{
		Timestamp:    int64(g.at),
		InputLength:  inputLengths.at(g.step(0, math.Phi-1)),
		OutputLength: outputLengths.at(g.step(1, math.Sqrt2-1)),
	}
	blocks := blocksFor(q.InputLength)
	full := q.InputLength / BlockTokens
	q.HashIDs = append(make([]uint64, 0, blocks), g.prefix(full)...)
	if g.refs > 0 {
		g.reused += len(q.HashIDs)
	}
	for len(q.HashIDs) < blocks {
		q.HashIDs = append(q.HashIDs, g.nextID)
		g.nextID++
	}
	g.refs += blocks
	g.remember(slices.Clone(q.HashIDs[:full]))
	return q
}

// step walks a low-discrepancy sequence rather than drawing: the lengths have a
// long tail, and so even a short run of requests has their mean.
func (g *Generator) step(i int, by float64) float64 {
	_, g.phase[i] = math.Modf(g.phase[i] + by)
	return g.phase[i]
}

// prefix returns the blocks that a prompt of that many full blocks shares with
// earlier ones: the system prompt, or a conversation.
func (g *Generator) prefix(full int) []uint64 {
	chance := 0.2
	if float64(g.reused) < conversationReuse*float64(g.refs) {
		chance = 0.8 // steers towards the share of reuse
	}
	if g.random.Float64() < chance {
		if i := g.longest(full); i >= 0 {
			found := g.history[i]
			g.history[i] = nil // its next turn continues the new one
			return found
		}
	}
	return []uint64{0}
}

// longest returns the conversation that leaves least new in a prompt, or -1.
// About a quarter of all turns add less than a block, half of them at most one.
func (g *Generator) longest(full int) int {
	best, most := -1, 0
	limit := full - int(g.random.ExpFloat64()*2)
	for i, c := range g.history {
		if n := len(c); n > most && n <= limit {
			best, most = i, n
		}
	}
	return best
}

func (g *Generator) remember(blocks []uint64) {
	if len(blocks) < 2 {
		return // nothing beyond the system prompt
	}
	if len(g.history) < historyMax {
		g.history = append(g.history, blocks)
		return
	}
	g.history[g.oldest] = blocks
	g.oldest = (g.oldest + 1) % historyMax
}
