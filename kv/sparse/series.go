// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Series makes up the top-k of one sequence, a layer and a step after the other, where none was
// recorded. A query keeps most of what the query before had. How much it does not is drawn once for
// each layer: two queries, which are a step of MTP 2, change between 0.8 % and 29.5 % of k with a
// median of 8 %. These are the 17 to 605 of 2,048 that the ESS report misses. The first entries and
// the last ones are always there. Of the new ones some lie beside one that was kept, and the others
// are chosen by age: half as often at twice the age. It is a model, and no recording: nobody has
// published a series.
type Series struct {
	k       int
	random  *rand.Rand
	renewed []float64 // by layer: the share of k that a query changes
	layers  []topK
}

// topK is what a layer has asked for.
type topK struct {
	list []uint32 // behind the first ones and the last ones, in no order
	has  map[uint32]bool
}

const (
	seriesFirst = 4
	seriesLast  = 64
	seriesNear  = 0.3 // of the new ones: beside one that was kept
)

// NewSeries makes a series of layers whose queries ask for k entries each, the same for a seed.
func NewSeries(seed uint64, layers, k int) *Series {
	s := &Series{k: k, random: rand.New(rand.NewPCG(seed, 0x737061727365))}
	for range layers {
		u := s.random.Float64() * 2
		low, high := 0.008, 0.08
		if u >= 1 {
			u, low, high = u-1, 0.08, 0.295
		}
		s.renewed = append(s.renewed, 1-math.Sqrt(1-low*math.Pow(high/low, u)))
		s.layers = append(s.layers, topK{has: map[uint32]bool{}})
	}
	return s
}

// Step writes the entries that the queries of a layer's next step ask for, k for each query: as
// many queries as entries has room for. The first one has a context of so many entries, and each of
// the others one more. A context may be shorter than the last one, as behind drafts that were not
// accepted; it has more than k entries.
func (s *Series) Step(layer, context int, entries []uint32) {
	for query := range slices.Chunk(entries, s.k) {
		s.query(&s.layers[layer], s.renewed[layer], context, query)
		context++
	}
}

func (s *Series) query(l *topK, renewed float64, context int, entries []uint32) {
	free := s.k - seriesFirst - seriesLast
	from, end := uint32(seriesFirst), uint32(context-seriesLast) // of those that are chosen
	l.list = slices.DeleteFunc(l.list, func(entry uint32) bool {
		gone := entry >= end || s.random.Float64() < renewed
		if gone {
			delete(l.has, entry)
		}
		return gone
	})
	kept := len(l.list)
	for len(l.list) < free {
		var entry uint32
		if kept > 0 && s.random.Float64() < seriesNear {
			entry = l.list[s.random.IntN(kept)] + uint32(s.random.IntN(5)) - 2
		} else { // the logarithm of the age is even
			age := math.Exp(s.random.Float64() * math.Log(float64(context-seriesLast)))
			entry = end - uint32(age)
		}
		if entry >= from && entry < end && !l.has[entry] {
			l.has[entry] = true
			l.list = append(l.list, entry)
		}
	}
	n := copy(entries, l.list)
	for i := range uint32(seriesFirst) {
		entries[n] = i
		n++
	}
	for i := range uint32(seriesLast) {
		entries[n] = end + i
		n++
	}
}
