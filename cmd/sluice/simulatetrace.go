// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/schedule/simulate"
	"github.com/sluicehq/sluice/kv/trace"
)

// traceSimulation is a trace that runs over the model of a cluster.
type traceSimulation struct {
	replayFlags   // trace, requests and seed of it
	config        simulate.Config
	policy        string
	cases         []string
	gbps          float64
	prefill, step []float64 // microseconds
	curves        string

	list []trace.Request
}

// simulatedCases are those that run without --case.
var simulatedCases = []string{string(simulate.None), string(simulate.Local), string(simulate.Pool)}

func newSimulateTrace() *cobra.Command {
	d := simulate.DefaultCurves()
	f := &traceSimulation{}
	c := &cobra.Command{
		Use:   "trace [TRACE]",
		Short: "Say what a cluster's caches are worth for a trace: hits, and times to tokens",
		Long: `Run the requests of a trace over a model of prefill and decode instances, once for each
case, and say what came of them. A conductor places each request by the algorithm of the Mooncake
paper (FAST 2025): on the prefill instance that has its first token soonest, by transfer, queue and
computing, and the decode instance with the shortest step. It refuses what would come later than
--ttft or --tbt.

Cases: none has no cache; local, a cache in each prefill instance; pool, the same caches, with what
another one has copied first. random and queue are local, but take any instance, or the one with
the shortest queue.

hits is the share of blocks that were cached, prefill_s the computing of a request, within the share
of all requests that were served within both limits; tbt is of whole requests.

The defaults are LLaMA3-70B on nodes of eight A800, as in that paper, and in part made up: see
docs/simulate.md. --curves has times that were measured, a line each:
` + simulate.PointLines + `.
Without TRACE a generator makes requests of the statistics of a conversation trace.`,
		Example: `  sluice simulate trace conversation_trace.jsonl
  sluice simulate trace --requests 500 --prefill 4 --decode 2 --speed 2 --json
  sluice simulate trace trace.jsonl --curves measured.jsonl --rate 20 --case local,pool`,
		Args: wordsFrom(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			f.chooseTrace(c.Flags(), args)
			if err := f.check(c.Context()); err != nil {
				return err
			}
			return f.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	s, g := c.Flags(), &f.config
	s.IntVar(&f.requests, "requests", 0, "how many; without it all of TRACE, or 1,000 that are "+
		"made up")
	s.Uint64Var(&f.seed, "seed", 1, "of those that are made up, and of the case random")
	s.Float64Var(&g.Speed, "speed", 1, "times the pace of the trace")
	s.StringSliceVar(&f.cases, "case", simulatedCases, "`CASES` to run, with commas between")
	s.IntVar(&g.Prefill, "prefill", 8, "prefill instances")
	s.IntVar(&g.Decode, "decode", 8, "decode instances")
	s.Int64Var(&g.CacheTokens, "cache", 3e6, "`TOKENS` that the cache of a prefill instance has "+
		"room for")
	s.StringVar(&f.policy, "policy", string(cache.S3FIFO), "what goes first: s3fifo, lru, arc")
	s.Int64Var(&g.DecodeTokens, "room", 1.3e6, "`TOKENS` that a decode instance has room for")
	s.Float64Var(&g.TokenBytes, "token-bytes", 327680, "`BYTES` of the KV cache of a token")
	s.Float64Var(&f.gbps, "rate", 87, "`GB` a second that a prefill instance sends")
	s.DurationVar(&g.Latency, "latency", time.Millisecond, "until the first byte of a copy comes")
	s.Float64SliceVar(&f.prefill, "prefill-time", microseconds(d.Prefill), "`PARTS` of a prefill "+
		"in µs: fixed, for each new token, and for each square of tokens")
	s.Float64SliceVar(&f.step, "step-time", microseconds(d.Decode), "`PARTS` of a decode step in "+
		"µs: fixed, for each sequence, and for each token of context")
	s.StringVar(&f.curves, "curves", "", "`FILE` of measured times, in place of these parts")
	s.Float64Var(&g.Threshold, "threshold", 1, "`FACTOR` by which another prefix must be longer "+
		"to be copied")
	s.DurationVar(&g.TTFT, "ttft", 30*time.Second, "limit for the first token; 0: none")
	s.DurationVar(&g.TBT, "tbt", 200*time.Millisecond, "limit between two tokens; 0: none")
	s.BoolVar(&g.AdmitAll, "admit-all", false, "refuse nothing for these limits, and count by them")
	s.BoolVar(&f.asJSON, "json", false, "print JSON, a value a line")
	return c
}

func microseconds(parts [3]float64) (us []float64) {
	for _, ns := range parts {
		us = append(us, ns/1e3)
	}
	return us
}

// check finds what is wrong with the flags, and reads the trace and the curves.
func (f *traceSimulation) check(ctx context.Context) error {
	switch {
	case f.exactly && f.requests < 1 || f.requests > requestsMax:
		return usagef("--requests %d: want from 1 to %d", f.requests, requestsMax)
	case len(f.cases) == 0:
		return usagef("--case: want some of %v", simulate.Cases())
	}
	for _, c := range f.cases {
		if !slices.Contains(simulate.Cases(), simulate.Case(c)) {
			return usagef("--case %s: there are %v", c, simulate.Cases())
		}
	}
	if err := checkPolicy(f.policy); err != nil {
		return usagef("--policy: %w", err)
	}
	g := &f.config
	for _, p := range []struct {
		name string
		us   []float64
		to   *[3]float64
	}{{"prefill-time", f.prefill, &g.Curves.Prefill}, {"step-time", f.step, &g.Curves.Decode}} {
		if len(p.us) != len(p.to) {
			return usagef("--%s: want three parts with commas between, not %d", p.name, len(p.us))
		}
		for k, us := range p.us {
			p.to[k] = us * 1e3
		}
	}
	g.Policy, g.Rate, g.Seed = cache.Policy(f.policy), f.gbps*1e9, f.seed
	if err := g.Check(); err != nil {
		field, _ := errors.AsType[*simulate.ConfigError](err)
		if field == nil {
			return usagef("--prefill-time, --step-time: %w", err)
		}
		if field.Field == "Rate" { // of which the flag has GB
			field = &simulate.ConfigError{Field: field.Field, Value: field.Value / 1e9,
				Low: field.Low / 1e9, High: field.High / 1e9}
		}
		return usagef("--%s: %w", simulatedFlags[field.Field], field)
	}
	var err error
	f.list, err = f.load(ctx)
	return err
}

// simulatedFlags are the flags of the fields of a simulate.Config.
var simulatedFlags = map[string]string{"Prefill": "prefill", "Decode": "decode",
	"CacheTokens": "cache", "DecodeTokens": "room", "TokenBytes": "token-bytes", "Rate": "rate",
	"Latency": "latency", "Threshold": "threshold", "TTFT": "ttft", "TBT": "tbt",
	"Speed": "speed"}

// simulatedColumns are the columns of the result of a case.
var simulatedColumns = []string{"case", "served", "refused_ttft", "refused_tbt", "within", "hits",
	"prefill_s", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tbt_p50_ms",
	"tbt_p99_ms", "copied"}

// run runs the cases, and prints what came of them.
func (f *traceSimulation) run(ctx context.Context, stdout, stderr io.Writer) error {
	g := f.config
	if f.curves != "" {
		off, err := f.fit(ctx, &g.Curves)
		if err != nil {
			return err
		}
		p, s := microseconds(g.Curves.Prefill), microseconds(g.Curves.Decode)
		fmt.Fprintf(stderr, "%s: prefill-time %.4g,%.4g,%.4g, step-time %.4g,%.4g,%.4g, at most "+
			"%.0f %% off\n", f.curves, p[0], p[1], p[2], s[0], s[1], s[2], 100*off)
	}
	var rows [][]any
	for _, c := range f.cases {
		r, err := simulate.Run(ctx, g, f.list, simulate.Case(c))
		if err != nil {
			return err
		}
		served := len(r.TTFT)
		row := []any{c, served, r.RefusedTTFT, r.RefusedTBT, share(r.Within, r.Requests), nil, nil,
			nil, nil, nil, nil, nil, nil, size(float64(r.Copied) * g.TokenBytes)}
		if r.Blocks > 0 {
			row[5] = share(r.Hits, r.Blocks)
		}
		if served > 0 {
			all := time.Duration(0)
			for _, t := range r.TTFT {
				all += t / time.Duration(served)
			}
			row[6], row[7] = millis(r.Computing/time.Duration(served)), millis(all)
			for k, p := range []float64{50, 90, 99} {
				row[8+k] = millis(figures.Percentile(r.TTFT, p))
			}
		}
		if len(r.TBT) > 0 {
			for k, p := range []float64{50, 99} {
				row[11+k] = math.Round(1e6*figures.Percentile(r.TBT, p).Seconds()) / 1e3
			}
		}
		rows = append(rows, row)
	}
	fmt.Fprintf(stderr, "%d requests over %d prefill instances, each with a cache of %d tokens in "+
		"blocks of %d, and %d decode instances\n", len(f.list), g.Prefill, g.CacheTokens,
		trace.BlockTokens, g.Decode)
	return printRows(stdout, f.asJSON, simulatedColumns, rows)
}

// millis are seconds with three digits behind the point.
func millis(d time.Duration) float64 { return math.Round(d.Seconds()*1e3) / 1e3 }

// fit reads curves from a file of measured times.
func (f *traceSimulation) fit(ctx context.Context, c *simulate.Curves) (off float64, err error) {
	file, err := openInput(ctx, f.curves)
	if err != nil {
		return 0, fmt.Errorf("curves: %w", err)
	}
	defer file.Close()
	*c, off, err = simulate.FitCurves(file, *c)
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case errors.Is(err, simulate.ErrCurves):
		return 0, fmt.Errorf("%s: %w; lines are such as %s", f.curves, err, simulate.PointLines)
	case err != nil:
		return 0, fmt.Errorf("%s: %w", f.curves, err)
	}
	return off, nil
}
