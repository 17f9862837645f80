// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Rival is a program of its own that moves the same pieces. It takes too long to start
// for the slices of a round: it is measured between blocks of rounds.
type Rival interface {
	Name() string
	// Measure measures once: GB/s, and the median time of one batch.
	Measure(ctx context.Context) (gbps float64, batch time.Duration, err error)
}

// Blocks is how many parts a run is cut into where there are rivals, each of which
// is measured after each part.
const Blocks = 3

// Contest is what rivals have shown so far. Not for several goroutines at once.
type Contest struct{ list []*contestant }

// contestant is one rival.
type contestant struct {
	rival Rival
	rates []float64
	lats  *Samples
	err   error // it takes no further part
}

// NewContest begins with no figures.
func NewContest(rivals []Rival) *Contest {
	c := &Contest{}
	for _, r := range rivals {
		c.list = append(c.list, &contestant{rival: r, lats: NewSamples(Blocks)})
	}
	return c
}

// Measure takes one figure of each. A rival that fails is no reason to end the
// benchmark: the only errors are those of ctx.
func (c *Contest) Measure(ctx context.Context) error {
	for _, r := range c.list {
		if r.err != nil {
			continue
		}
		gbps, batch, err := r.rival.Measure(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if r.err = err; err == nil {
			r.rates = append(r.rates, gbps)
			r.lats.Add(batch)
		}
	}
	return nil
}

// Baselines are the medians of the rivals, and a line about each that failed.
func (c *Contest) Baselines() (list []Baseline, notes []string) {
	for _, r := range c.list {
		if r.err != nil {
			notes = append(notes, fmt.Sprintf("%s was not measured: %v", r.rival.Name(), r.err))
			continue
		}
		list = append(list, Baseline{Name: r.rival.Name(), GBps: Median(r.rates),
			P50us: Micros(r.lats.Percentile(50))})
	}
	return list, notes
}

// race runs the ways in rounds, and the rivals between blocks of rounds.
func race(ctx context.Context, ways []*way, rivals *Contest, o Options, bytes uint64) error {
	n := Blocks
	if len(rivals.list) == 0 {
		n = 1
	}
	part := o
	part.Time, part.Rounds = o.Time/time.Duration(n), (o.Rounds+n-1)/n
	for i := range n {
		part.warm = i > 0
		if o.Progress != nil {
			part.Progress = func(d time.Duration) { o.Progress(part.Time*time.Duration(i) + d) }
		}
		if err := alternate(ctx, ways, part, bytes); err != nil {
			return err
		}
		if err := rivals.Measure(ctx); err != nil {
			return err
		}
	}
	return nil
}

// PerfRival is ucx_perftest as a rival of a shape: messages of the same size, as many
// of them under way as a batch has pieces, but always the same buffer, which stays in
// the caches (Shape.Hot).
func PerfRival(p *PerfTest, s Shape) Rival {
	test := "ucp_put_bw"
	if s.Op == driver.Read {
		test = "ucp_get"
	}
	return &perfRival{p, PerfName, PerfRun{Test: test, Size: s.Size, Window: s.Batch},
		s.BatchBytes()}
}

// VerbsRival is ib_write_bw or ib_read_bw as a rival of a shape, with that many messages of
// the same size under way. It moves one buffer again and again (Shape.Hot).
func VerbsRival(v *VerbsTest, s Shape, window int) Rival {
	test := "ib_write_bw"
	if s.Op == driver.Read {
		test = "ib_read_bw"
	}
	return &perfRival{v, VerbsName, PerfRun{Test: test, Size: s.Size, Window: window},
		s.BatchBytes()}
}

// PerfName is how results call ucx_perftest.
const PerfName = "ucx_perftest"

// perf is a benchmark of others.
type perf interface {
	Measure(ctx context.Context, r PerfRun) (PerfFigure, error)
}

type perfRival struct {
	p     perf
	name  string
	r     PerfRun
	bytes uint64 // of a batch
}

func (r *perfRival) Name() string { return r.name }

// Measure implements Rival. It knows no batches: the time of one is that of so many
// bytes.
func (r *perfRival) Measure(ctx context.Context) (float64, time.Duration, error) {
	f, err := r.p.Measure(ctx, r.r)
	if err != nil {
		return 0, 0, err
	}
	return f.GBps, time.Duration(float64(r.bytes) / f.GBps), nil
}

// PerfLatency is ucx_perftest's ping-pong ("ucp_am_lat", "ucp_put_lat") as a rival of
// PingPong: what it calls latency is one way, half of the round trip that is compared.
func PerfLatency(p *PerfTest, test string, size uint64) Rival {
	return &perfLatency{p, PerfName + "-" + strings.TrimPrefix(test, "ucp_"),
		PerfRun{Test: test, Size: size, Window: 1}}
}

// VerbsLatency is ib_write_lat as a rival of WritePing, by the same rule.
func VerbsLatency(v *VerbsTest, size uint64) Rival {
	return &perfLatency{v, VerbsName, PerfRun{Test: "ib_write_lat", Size: size, Window: 1}}
}

type perfLatency struct {
	p    perf
	name string
	r    PerfRun
}

func (r *perfLatency) Name() string { return r.name }

// Measure implements Rival: a batch is one round trip.
func (r *perfLatency) Measure(ctx context.Context) (float64, time.Duration, error) {
	f, err := r.p.Measure(ctx, r.r)
	if err != nil {
		return 0, 0, err
	}
	return GBps(r.r.Size, 2*f.P50), 2 * f.P50, nil
}
