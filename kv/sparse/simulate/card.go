// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Card is a card that decodes, as a model of time. Times are µs of one layer and step, and a batch
// of B sequences of Q queries and a context of C takes
//
//	Index*B*C/1024 + Attention*B*Q + Query*B*Q + Fixed
//
// without a pool, in this order. A pool adds what it has to wait for, see Overlap. The layers are
// alike but for their misses, all sequences miss as the one of the series, new entries are written
// to the host at no cost, and sampling and the drafts of MTP take no time beside the layers.
type Card struct {
	Memory    uint64  // bytes for entries and keys of the indexer
	Fixed     float64 // whatever the batch: weights, the exchange between cards, launches
	Query     float64 // a query beside its attention: projections and experts
	Attention float64 // a query's attention to its top-k
	Index     float64 // of the indexer, a sequence and 1,024 entries of its context
	Split     float64 // for each kernel more that an Overlap has
	Gather    Curve
}

// DefaultCard returns the parameters that the command has by itself.
//
//   - Memory is assumed. It sets the batches, and these the share of a step that grows with them.
//   - Fixed is fitted: with it the gain at 32 K, MTP 2 and a ratio of 0.2 is the report's 69.4 %.
//     How many cards share the experts there, and how long a layer takes, is not known here.
//   - Query is computed: 37 G parameters of DeepSeek-V3 for a token, two operations each, over 61
//     layers, at the 1,550 TFLOPS that DeepGEMM reports on an H800. It is a bound from below.
//   - Attention is computed: 128 heads, 2,048 entries of 576 and 512 values, two operations each,
//     at the 410 TFLOPS that FlashMLA reports of its sparse decode on an H800.
//   - Index is computed: the keys of 132 bytes once a sequence from memory of 3.35 TB/s.
//   - Split is assumed.
//   - Gather is measured: CurveOf("4GiB"). A layer's entries of the batch that fits 80 GiB by a
//     ratio of 0.2 at 32 K take 3.3 GiB.
func DefaultCard() Card {
	curve, _ := CurveOf("4GiB") // which exists
	return Card{
		Memory:    80 << 30,
		Fixed:     595,
		Query:     round(37e9 * 2 / Layers / 1550e12 * 1e6),
		Attention: round(128 * TopK * (576 + 512) * 2 / 410e12 * 1e6),
		Index:     round(1024 * KeyBytes / 3.35e12 * 1e6),
		Split:     10,
		Gather:    curve,
	}
}

func round(x float64) float64 { return math.Round(x*1e4) / 1e4 }

// Curve is how long a gather of entries of 656 bytes takes: points of ascending numbers of entries,
// with straight lines between them and beyond.
type Curve []Point

// Point is a gather of so many entries.
type Point struct {
	Entries float64
	Micros  float64
}

// curves were measured on an H100 (PCIe 5), with 4 of its multiprocessors, of entries scattered
// over so much pinned memory of the host: the p50 of a replayed CUDA graph for 200 and 2,048
// entries, and of a launch for 102,300, which are 27.1 and 45.2 GB/s (bench/results/gpu-check.txt,
// --op gather).
var curves = map[string]Curve{
	"4GiB": {{200, 14.22}, {2048, 55.47}, {102300, 2465.03}},
	"1GiB": {{200, 13.37}, {2048, 40.82}, {102300, 1479.10}},
}

// CurveOf returns a measured curve, 4GiB or 1GiB by the memory that the entries lie in, or one of
// points such as 200:14.2,2048:55.5, entries and µs.
func CurveOf(text string) (Curve, error) {
	if c, ok := curves[text]; ok {
		return c, nil
	}
	var c Curve
	for word := range strings.SplitSeq(text, ",") {
		entries, micros, _ := strings.Cut(word, ":")
		n, err := strconv.ParseUint(entries, 10, 32)
		t, err2 := strconv.ParseFloat(micros, 64)
		switch last := len(c) - 1; {
		case err != nil || err2 != nil || !(t > 0 && t < 1e9):
			return nil, fmt.Errorf("%q: want 4GiB, 1GiB, or points ENTRIES:MICROSECONDS with "+
				"commas between", word)
		case last >= 0 && (float64(n) <= c[last].Entries || t <= c[last].Micros):
			return nil, fmt.Errorf("%q: more entries than in the point before must take longer",
				word)
		}
		c = append(c, Point{float64(n), t})
	}
	if len(c) < 2 {
		return nil, errors.New("a curve has at least two points")
	}
	return c, nil
}

// Micros returns how long a gather takes; nothing where there is nothing to bring.
func (c Curve) Micros(entries float64) float64 {
	if entries <= 0 {
		return 0
	}
	i := 1
	for i < len(c)-1 && entries > c[i].Entries {
		i++
	}
	a, b := c[i-1], c[i]
	return max(0, a.Micros+(entries-a.Entries)*(b.Micros-a.Micros)/(b.Entries-a.Entries))
}

// Overlap is what a layer computes while its misses come.
type Overlap int

// The ways, as the ESS report names them.
const (
	// None: the attention waits for all misses.
	None Overlap = iota
	// DA (dual attention): the attention to the entries that were there runs meanwhile, and that
	// to the others behind.
	DA
	// DBA (dual batch attention): half of the batch goes first, so that its misses come while the
	// indexer runs for the other half; each half has DA.
	DBA
	// Chosen takes, for each layer, the one of the three that is the fastest for its misses.
	Chosen
)

// String returns its name.
func (o Overlap) String() string { return [...]string{"none", "DA", "DBA", "chosen"}[o] }

// Load is what a card decodes.
type Load struct {
	Context  int
	Slots    int // a layer; 0: all entries are on the card
	Queries  int
	Accepted float64   // tokens a step
	Asked    float64   // entries a layer and step, of one sequence
	Misses   []float64 // of these, by layer
}

// Result is what a card reaches.
type Result struct {
	Batch   int     // sequences that fit
	Bytes   float64 // from the host, a step
	Step    float64 // µs
	Stall   float64 // µs of it that no pool would not have, of all layers
	Tokens  float64 // a second
	Overlap [3]int  // layers with None, DA and DBA
}

// Run decodes a load with as many sequences as fit.
func (c *Card) Run(l Load, o Overlap) (r Result) {
	slots := float64(l.Slots)
	if l.Slots == 0 {
		slots = float64(l.Context)
	}
	layers := float64(len(l.Misses))
	r.Batch = int(float64(c.Memory) / layers / (slots*EntryBytes + float64(l.Context)*KeyBytes))
	if r.Batch == 0 {
		return r
	}
	for _, misses := range l.Misses {
		bare := c.layer(l, r.Batch, 0, None)
		best, took := o, math.Inf(1)
		for _, way := range []Overlap{None, DA, DBA} {
			if t := c.layer(l, r.Batch, misses, way); (o == Chosen || o == way) && t < took {
				best, took = way, t
			}
		}
		r.Step += took
		r.Stall += took - bare
		r.Bytes += misses * float64(r.Batch) * EntryBytes
		r.Overlap[best]++
	}
	r.Tokens = float64(r.Batch) * l.Accepted / r.Step * 1e6
	return r
}

// layer returns how long a layer takes.
func (c *Card) layer(l Load, batch int, misses float64, o Overlap) float64 {
	queries := float64(batch * l.Queries)
	index := c.Index * float64(batch) * float64(l.Context) / 1024
	attention := c.Attention * queries
	rest := c.Query*queries + c.Fixed
	missing := misses * float64(batch)
	if o == None || missing == 0 {
		return index + c.Gather.Micros(missing) + attention + rest
	}
	late := attention * misses / l.Asked // the attention that has to wait
	early := attention - late
	if o == DA {
		return index + max(c.Gather.Micros(missing), early) + late + c.Split + rest
	}
	half := c.Gather.Micros(missing / 2)
	first := index/2 + half // when the misses of each half are there
	second := max(index, first) + half
	t := max(index+early/2, first) + late/2 // the attention of the first half has ended
	t = max(t+early/2, second) + late/2
	return t + 4*c.Split + rest // of one indexer and one attention there are two and four
}
