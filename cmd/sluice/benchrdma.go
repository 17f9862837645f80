// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/engine"
)

// What stands beside the rdma backend: perftest between the same two ports, and for pages
// that are gathered the same transfers with one work request for each.

// verbs is perftest between the first of our rails and one of theirs in the same subnet. It
// is kept, with what it knows of how many messages take a second.
func (f *benchFlags) verbs(l *benchLink) *bench.VerbsTest {
	if f.verbstest != nil {
		return f.verbstest
	}
	f.verbstest = &bench.VerbsTest{Time: min(f.time()/bench.Blocks, time.Second)}
	for _, ours := range l.Ours {
		for _, theirs := range l.Theirs {
			if ours.Subnet.Masked() == theirs.Subnet.Masked() {
				f.verbstest.Client, f.verbstest.Server = ours.VerbsPort, theirs.VerbsPort
				return f.verbstest
			}
		}
	}
	return f.verbstest // which says that it has no device
}

// verbsWindow is how many work requests of a size the backend has under way at most.
func (f *benchFlags) verbsWindow(size uint64) int {
	cfg := f.network.rdma.config()
	cfg.EnsureDefaults()
	return max(min(cfg.QueueDepth, int(uint64(cfg.Flight)/size)), 1)
}

func (f *benchFlags) verbsRivals(s bench.Shape, l *benchLink) []bench.Rival {
	if s.Gather {
		return []bench.Rival{&singleRival{f, l, s}}
	}
	return []bench.Rival{bench.VerbsRival(f.verbs(l), s, min(f.verbsWindow(s.Size), s.Batch))}
}

// singleRival is the same transfer with one piece in each work request, between two more
// processes.
type singleRival struct {
	f *benchFlags
	l *benchLink
	s bench.Shape
}

// Name implements bench.Rival.
func (r *singleRival) Name() string { return "one-entry-requests" }

// Measure implements bench.Rival.
func (r *singleRival) Measure(ctx context.Context) (float64, time.Duration, error) {
	if r.l.single == nil {
		f := *r.f
		f.network.rdma.entries = 1
		single, _, err := f.dial(ctx, []bench.Shape{r.s})
		if err != nil {
			return 0, 0, err
		}
		r.l.single = single
	}
	res, err := bench.Run(ctx, r.l.single.Link, r.s, bench.Options{Time: r.f.time() / bench.Blocks,
		Bare: true})
	if err != nil {
		return 0, 0, r.l.single.Explain(ctx, err)
	}
	return res.GBps, time.Duration(res.P50us * 1e3), nil
}

// addCounts adds what was posted since then: work requests for a batch, and beside several
// rails the share of each.
func (l *benchLink) addCounts(r *bench.Result, before []rdma.Rail) {
	addCounts(r, before, l.Rails())
	if l.single != nil && r.Gather {
		one := bench.Result{Size: r.Size, Batch: r.Batch}
		addCounts(&one, nil, l.single.Rails())
		r.Extra["one-entry-requests/batch"] = one.Extra["requests/batch"]
	}
}

func addCounts(r *bench.Result, before, after []rdma.Rail) {
	if len(after) == 0 {
		return
	}
	var requests, bytes uint64
	moved := make([]uint64, len(after))
	for i := range after {
		now := &after[i].Counted
		moved[i] = now.BytesOut + now.BytesIn
		requests += now.Requests
		if i < len(before) {
			moved[i] -= before[i].Counted.BytesOut + before[i].Counted.BytesIn
			requests -= before[i].Counted.Requests
		}
		bytes += moved[i]
	}
	if bytes == 0 {
		return
	}
	r.Extra = map[string]float64{"requests/batch": float64(requests) * float64(r.Size) * float64(
		r.Batch) / float64(bytes)}
	for i := range after {
		if len(after) > 1 {
			r.Extra["percent-"+after[i].Name] = 100 * float64(moved[i]) / float64(bytes)
		}
	}
}

// The shapes of the table: batches that fill the queue several times.
const (
	verbsQueues   = 4
	verbsBytesMin = 64 << 10
	verbsBytesMax = 1 << 20
)

// verbsShapes are what perftest has, and pages that are gathered into one run.
func (f *benchFlags) verbsShapes() []bench.Shape {
	var list []bench.Shape
	for _, size := range []uint64{verbsBytesMin, verbsBytesMax} {
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			list = append(list, bench.Shape{Op: op, Size: size,
				Batch: verbsQueues * f.verbsWindow(size), Threads: 1, Hot: true})
		}
	}
	for _, op := range []engine.Op{engine.Write, engine.Read} {
		list = append(list, bench.Shape{Op: op, Size: tableEntry, Batch: tableEntries, Pages: true,
			Gather: true,
			Spread: 2 * tableEntry * tableEntries, Threads: 1})
	}
	return list
}

// measureVerbsTable is the comparison with perftest: over all rails, and where there are
// several over the first alone before that.
func (f *benchFlags) measureVerbsTable(ctx context.Context, newBar func() *progress) (
	[]bench.Result, error) {
	var all []bench.Result
	for _, lane := range f.verbsLanes() {
		g := *f
		g.verbstest = nil
		g.network.rdma.devices, g.network.rdma.peers = lane.ours, lane.theirs
		bar := newBar()
		results, err := g.measure(ctx, g.verbsShapes(), bar)
		bar.clear()
		if err == nil {
			var ping bench.Result
			if ping, err = g.measureLanding(ctx); err == nil {
				results = append(results, ping)
			}
		}
		for i := range results {
			results[i].Lane = lane.name
		}
		all = append(all, results...)
		if err != nil {
			return all, fmt.Errorf("lane %s: %w", lane.name, err)
		}
	}
	return all, nil
}

// verbsLane is a set of rails that the table measures.
type verbsLane struct{ name, ours, theirs string }

func (f *benchFlags) verbsLanes() []verbsLane {
	r := &f.network.rdma
	ours, _, several := strings.Cut(r.devices, ",")
	theirs, _, _ := strings.Cut(r.other(), ",")
	if !several {
		return []verbsLane{{"", r.devices, r.other()}}
	}
	return []verbsLane{{"one rail", ours, theirs}, {"all rails", r.devices, r.other()}}
}

// landingsMax is how many samples are kept.
const landingsMax = 1 << 16

// measureLanding measures a write that both ends see land in their memory, beside
// ib_write_lat.
func (f *benchFlags) measureLanding(ctx context.Context) (bench.Result, error) {
	shape := bench.Shape{Op: engine.Write, Size: bench.LandingBytes(tablePing), Batch: 1,
		Threads: 1}
	l, closeLink, err := f.dial(ctx, []bench.Shape{shape})
	if err != nil {
		return bench.Result{}, err
	}
	defer closeLink()
	ctx, unwatch := l.Watch(ctx)
	defer unwatch()
	samples := bench.NewSamples(landingsMax)
	rivals := bench.NewContest([]bench.Rival{bench.VerbsLatency(f.verbs(l), tablePing)})
	each := f.time() / bench.Blocks
	for range bench.Blocks {
		some, err := l.Landings(ctx, tablePing, each)
		if err != nil {
			return bench.Result{}, l.Explain(ctx, err)
		}
		samples.Merge(some)
		if err := rivals.Measure(ctx); err != nil {
			return bench.Result{}, err
		}
	}
	r := bench.LatencyResult(f.backend, "landing", tablePing, samples)
	r.Memory = l.Memory
	list, notes := rivals.Baselines()
	r.SetBaselines(list)
	r.Notes = notes
	return r, nil
}
