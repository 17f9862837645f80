// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"runtime"
	"sync"
	"time"
)

// framed is a copier that must be told of the rounds: what it does then is not measured.
type framed interface {
	begin() error
	end() error
}

// way is one of the ways to move a shape that a run compares.
type way struct {
	name    string
	threads []copier
	results []threadResult // of this round, by thread
	lats    *Samples       // of all rounds and threads
	rates   []float64      // GB/s of each round
	ops     int
	allocs  float64 // of all rounds
}

func newWay(name string, shape *Shape, thread func(t int) (copier, error)) (*way, error) {
	w := &way{name: name, lats: NewSamples(samplesMax), results: make([]threadResult,
		shape.Threads)}
	for t := range shape.Threads {
		c, err := thread(t)
		if err != nil {
			return nil, err
		}
		w.threads = append(w.threads, c)
		w.results[t].lats = NewSamples(1 << 12)
	}
	return w, nil
}

const samplesMax = 1 << 16

// round runs all threads of a way for the time of a slice, each at least that many
// batches, and keeps the rate.
func (w *way) round(slice time.Duration, least int, bytes uint64) error {
	if f, ok := w.threads[0].(framed); ok {
		if err := f.begin(); err != nil {
			return err
		}
		defer f.end()
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var all sync.WaitGroup
	for t, c := range w.threads[1:] {
		all.Go(func() { w.results[t+1].loop(c, slice, least, w.ops) })
	}
	w.results[0].loop(w.threads[0], slice, least, w.ops)
	all.Wait()
	runtime.ReadMemStats(&after)

	rate, ops := 0.0, 0
	for i := range w.results {
		r := &w.results[i]
		if r.err != nil {
			return r.err
		}
		rate += GBps(uint64(r.ops)*bytes, r.took)
		ops += r.ops
		w.lats.Merge(r.lats)
	}
	w.rates = append(w.rates, rate)
	w.ops += ops
	own := uint64(goMallocs * (len(w.threads) - 1))
	w.allocs += float64(after.Mallocs - before.Mallocs - min(own, after.Mallocs-before.Mallocs))
	return nil
}

// goMallocs is what starting a thread of a round allocates: two closures and
// what they share.
const goMallocs = 3

// threadResult is what one thread did in one round.
type threadResult struct {
	lats *Samples
	took time.Duration
	ops  int
	err  error
}

// loop repeats an operation until the slice is over, at least that often.
func (r *threadResult) loop(c copier, slice time.Duration, least, first int) {
	r.lats.Reset()
	r.ops = 0
	begin := time.Now()
	for {
		start := time.Since(begin)
		if r.err = c.do(first + r.ops); r.err != nil {
			return
		}
		end := time.Since(begin)
		r.lats.Add(end - start)
		r.ops++
		if end >= slice && r.ops >= least {
			r.took = end
			return
		}
	}
}

// alternate runs the ways in turn until the time or the rounds are over; each
// way leads a round as often as any other. The first round warms up, with every list of
// places, so that the pages of all are mapped, and is thrown away.
func alternate(ctx context.Context, ways []*way, o Options, bytes uint64) error {
	begin := time.Now()
	first := 0
	if o.warm {
		first = 1
	}
	for n := first; ; n++ {
		least := 1
		if n == 0 {
			least = o.lists
		}
		for i := range ways {
			w := ways[(i+n)%len(ways)]
			if err := ctx.Err(); err != nil {
				return context.Cause(ctx)
			}
			if err := w.round(o.Slice, least, bytes); err != nil {
				return err
			}
		}
		if n == 0 {
			for _, w := range ways {
				w.lats, w.rates, w.ops, w.allocs = NewSamples(samplesMax), nil, 0, 0
			}
			begin = time.Now()
			continue
		}
		if o.Progress != nil {
			o.Progress(time.Since(begin))
		}
		if o.Rounds > 0 && n >= o.Rounds || o.Rounds == 0 && time.Since(begin) >= o.Time {
			return nil
		}
	}
}

// Options say how long to measure. The zero value of a field means its default.
type Options struct {
	Time   time.Duration // of all rounds together; default 3 s
	Rounds int           // instead of Time: that many rounds
	Slice  time.Duration // of one way in one round; default 50 ms, at most Time
	// Progress is called after each round with the time since the first.
	Progress func(time.Duration)
	// Rivals are measured three times each, between rounds.
	Rivals []Rival
	// Bare leaves out memcpy and process_vm_writev.
	Bare bool

	warm  bool // a block before this one has warmed up
	lists int  // that the first round goes through
}

func (o Options) withDefaults() Options {
	if o.Time <= 0 {
		o.Time = 3 * time.Second
	}
	if o.Slice <= 0 {
		o.Slice = min(50*time.Millisecond, o.Time)
	}
	return o
}

// baseline sums a way up.
func (w *way) baseline() Baseline {
	return Baseline{Name: w.name, GBps: Median(w.rates), P50us: Micros(w.lats.Percentile(50))}
}
