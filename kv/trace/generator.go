// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Statistics of the conversation trace, which the generator reproduces.
const (
	conversationRate  = 12031 / 3537e3 // requests per millisecond
	conversationReuse = 0.366          // share of blocks that an earlier request had
)

// historyMax bounds the conversations that the generator may continue.
const historyMax = 1024

// Generator generates an endless stream of requests with the statistics of the conversation trace:
// its lengths, shared prefixes and arrival times. The same seed gives the same requests. A
// Generator is not safe for concurrent use.
//
// All prompts begin with the same block, the system prompt. Some prompts are the next turn of an
// earlier conversation: they begin with all of its full blocks.
type Generator struct {
	random         *rand.Rand
	at             float64    // arrival time of the last request, in ms
	phase          [2]float64 // positions in the sequences of input and output lengths; see step
	nextID         uint64
	blocks, reused int        // blocks of all requests, and those of them that were reused
	history        [][]uint64 // full blocks of each conversation; a ring, nil: continued already
	oldest         int        // index in history of the next to be replaced
}

// NewGenerator returns a generator at its first request.
func NewGenerator(seed uint64) *Generator {
	random := rand.New(rand.NewPCG(seed, 0x736c75696365)) // the second word is fixed: "sluice"
	return &Generator{random: random, phase: [2]float64{random.Float64(), random.Float64()},
		nextID: 1}
}

// Next returns the next request. Timestamps never decrease.
func (g *Generator) Next() Request {
	if g.blocks > 0 {
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
	if g.blocks > 0 {
		g.reused += len(q.HashIDs)
	}
	for len(q.HashIDs) < blocks {
		q.HashIDs = append(q.HashIDs, g.nextID)
		g.nextID++
	}
	g.blocks += blocks
	g.remember(slices.Clone(q.HashIDs[:full]))
	return q
}

// step returns the next element, between 0 and 1, of a low-discrepancy sequence; i selects the
// sequence of the input or the output lengths. The lengths have a long tail. With random numbers
// the mean of a short run would vary widely; with this sequence it is close to the trace's.
func (g *Generator) step(i int, by float64) float64 {
	_, g.phase[i] = math.Modf(g.phase[i] + by)
	return g.phase[i]
}

// prefix returns the blocks that a prompt of so many full blocks begins with and that earlier
// requests had: those of a conversation, or the system prompt alone.
func (g *Generator) prefix(full int) []uint64 {
	chance := 0.2
	if float64(g.reused) < conversationReuse*float64(g.blocks) {
		chance = 0.8 // reuse is below conversationReuse: continue conversations more often
	}
	if g.random.Float64() < chance {
		if i := g.longest(full); i >= 0 {
			found := g.history[i]
			g.history[i] = nil // a later turn continues from the prompt that Next builds now
			return found
		}
	}
	return []uint64{0}
}

// longest returns the index of the longest conversation that fits into a prompt of so many full
// blocks, with a random number of new blocks left at the end, or -1. Two in five turns then add no
// full block, and two in three add at most one.
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
