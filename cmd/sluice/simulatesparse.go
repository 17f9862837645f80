// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/sparse"
	"github.com/sluicehq/sluice/kv/sparse/simulate"
)

// sparseFlags are the words of the command line.
type sparseFlags struct {
	file           string
	generated      simulate.Generated
	ratio          float64
	slots          int
	card           simulate.Card
	memory, gather string
	by, svg        string
	report, asJSON bool
}

// seriesLine is a line of a recorded series.
const seriesLine = `{"step":0,"layer":0,"context":32768,"entries":[[0,5,32767]]}`

func newSimulateSparse() *cobra.Command {
	f := &sparseFlags{card: simulate.DefaultCard()}
	c := &cobra.Command{
		Use:   "sparse [SERIES]",
		Short: "Say what a pool of a sparse KV cache misses, and how many tokens a card decodes",
		Long: `Run a series of top-k through the lookup of a pool, and say what it misses. From the
misses a model of a card that decodes DeepSeek-V3.2 says how many sequences fit, how long a
step waits for entries from the host, and how many tokens come out, beside a card that has
all entries: without overlap, with DA (the attention to what is there runs meanwhile), DBA
(half of the batch goes first), and with the best of the three for each layer.

SERIES is a recorded one: a line for each step and layer, such as
` + seriesLine + `
with a list of entries for each query. Steps below 0 warm the pool up. Without it a generator
makes one; nobody has published a recording, so its misses are no measurement.

Times are µs of one layer. --gather is measured on an H100; --query, --attention and --index
are computed from published rates; --memory and --split are assumed; --fixed is fitted to one
gain of the ESS report (arXiv 2512.10576). Give those of your own card and engine.
--report compares with that report, and says what of it is fitted.`,
		Example: `  sluice simulate sparse --context 131072 --ratio 0.1
  sluice simulate sparse --slots 6400 --by step
  sluice simulate sparse recorded.jsonl --memory 40GiB --fixed 300 --json
  sluice simulate sparse --report --svg figures.svg`,
		Args: wordsFrom(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				f.file = args[0]
			}
			if err := f.check(c); err != nil {
				return err
			}
			if f.report {
				return f.compare(c.Context(), c.OutOrStdout())
			}
			return f.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	s, g := c.Flags(), &f.generated
	s.IntVar(&g.Context, "context", 32<<10, "`ENTRIES` of a sequence before the first step")
	s.IntVar(&g.Queries, "mtp", 2, "`QUERIES` of a step")
	s.Float64Var(&g.Accepted, "accepted", 0, "`TOKENS` that a step gives; 0: 0.85 for each query")
	s.IntVar(&g.Layers, "layers", simulate.Layers, "layers")
	s.IntVar(&g.Warm, "warm", simulate.WarmUp, "`QUERIES` of the prefill that warm up")
	s.IntVar(&g.Steps, "steps", 20, "steps")
	s.Uint64Var(&g.Seed, "seed", 1, "of the generator")
	s.Float64Var(&f.ratio, "ratio", 0.2, "slots of a layer, by the entries of a sequence")
	s.IntVar(&f.slots, "slots", 0, "slots of a layer, in place of --ratio")
	s.StringVar(&f.memory, "memory", "80GiB", "`SIZE` of a card's memory for entries and keys")
	for _, p := range []struct {
		value     *float64
		name, use string
	}{
		{&f.card.Fixed, "fixed", "of a layer, whatever the batch"},
		{&f.card.Query, "query", "of a query, beside its attention"},
		{&f.card.Attention, "attention", "of a query's attention"},
		{&f.card.Index, "index", "of the indexer, for a sequence and 1,024 of its entries"},
		{&f.card.Split, "split", "of each kernel that an overlap has more"},
	} {
		s.Float64Var(p.value, p.name, *p.value, "`MICROSECONDS` "+p.use)
	}
	s.StringVar(&f.gather, "gather", "4GiB", "`CURVE` of an H100: 4GiB or 1GiB, by the memory "+
		"that a layer's entries lie in; or points ENTRIES:MICROSECONDS with commas between")
	s.StringVar(&f.by, "by", "overlap", "`ROWS`: overlap, or the misses by step or layer")
	s.BoolVar(&f.report, "report", false, "compare with the ESS report")
	s.StringVar(&f.svg, "svg", "", "draw the comparison into a `FILE`")
	s.BoolVar(&f.asJSON, "json", false, "print JSON, a value a line")
	return c
}

// check finds what is wrong with the flags.
func (f *sparseFlags) check(c *cobra.Command) (err error) {
	if f.file != "" {
		if err := refuse(c, "--%s beside SERIES: it goes with the generator alone", "context",
			"mtp", "layers", "warm", "steps", "seed", "report"); err != nil {
			return err
		}
	}
	if f.report {
		if err := refuse(c, "--%s beside --report, which has its own settings", "context", "mtp",
			"accepted", "warm", "ratio", "slots", "by"); err != nil {
			return err
		}
	}
	g := &f.generated
	for _, n := range []struct {
		name             string
		value, low, high float64
	}{
		{"context", float64(g.Context), 2 * simulate.TopK, sparse.SeriesContextMax / 2},
		{"mtp", float64(g.Queries), 1, sparse.SeriesQueriesMax},
		{"layers", float64(g.Layers), 1, sparse.SeriesLayersMax},
		{"warm", float64(g.Warm), 0, 1024},
		{"steps", float64(g.Steps), 2, simulate.StepsMax},
		{"ratio", f.ratio, 0.001, 1},
		{"slots", float64(f.slots), 0, sparse.SeriesContextMax},
		{"accepted", g.Accepted, 0, float64(g.Queries)},
		{"fixed", f.card.Fixed, 0, 1e9}, {"query", f.card.Query, 0, 1e9},
		{"attention", f.card.Attention, 0, 1e9}, {"index", f.card.Index, 0, 1e9},
		{"split", f.card.Split, 0, 1e9},
	} {
		if !(n.value >= n.low && n.value <= n.high) {
			return usagef("--%s %v: want %v to %v", n.name, n.value, n.low, n.high)
		}
	}
	card := &f.card
	switch {
	case card.Fixed+card.Query+card.Attention+card.Index < 0.001:
		return usagef("--fixed, --query, --attention and --index: want at least 0.001 in all, as " +
			"a layer takes time")
	case f.slots > 0 && given(c, "ratio"):
		return usagef("--slots and --ratio say the same: give one of them")
	case f.svg != "" && !f.report:
		return usagef("--svg draws the figures of --report: give that, too")
	case f.by != "overlap" && f.by != "step" && f.by != "layer":
		return usagef("--by %s: want overlap, step or layer", f.by)
	}
	if f.card.Memory, err = figures.ParseSize(f.memory); err != nil {
		return usagef("--memory: %w", err)
	}
	if f.card.Gather, err = simulate.CurveOf(f.gather); err != nil {
		return usagef("--gather: %w", err)
	}
	return nil
}

// run counts the misses of a series, and prints what came of them.
func (f *sparseFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	c, err := f.count(ctx)
	if err != nil {
		return err
	}
	var rows [][]any
	switch f.by {
	case "step":
		for step := range c.Misses {
			mean, low, high := c.Step(step)
			rows = append(rows, []any{step, tenth(mean), low, high})
		}
		return printRows(stdout, f.asJSON, []string{"step", "misses", "fewest", "most"}, rows)
	case "layer":
		for layer, misses := range c.ByLayer() {
			rows = append(rows, []any{layer, tenth(misses)})
		}
		return printRows(stdout, f.asJSON, []string{"layer", "misses"}, rows)
	}
	accepted := f.generated.Accepted
	if accepted == 0 {
		accepted = 0.85 * float64(c.Queries)
	}
	if accepted > float64(c.Queries) {
		return usagef("--accepted %v: the steps of the series have %d queries", accepted, c.Queries)
	}
	bare := f.card.Run(c.Bare(accepted), simulate.None)
	if bare.Batch == 0 {
		return usagef("--memory %s: not one sequence of %d entries fits in %d layers", f.memory,
			c.Context, c.Layers())
	}
	row := func(name string, r simulate.Result, misses float64) {
		rows = append(rows, []any{name, r.Batch, tenth(misses), size(r.Bytes), math.Round(r.Stall),
			math.Round(r.Step), math.Round(r.Tokens), tenth(100 * (r.Tokens/bare.Tokens - 1))})
	}
	row("no pool", bare, 0)
	mean, low, high := c.All()
	var chosen simulate.Result
	for _, way := range []simulate.Overlap{simulate.None, simulate.DA, simulate.DBA,
		simulate.Chosen} {
		chosen = f.card.Run(c.Load(accepted), way)
		row(way.String(), chosen, mean)
	}
	fmt.Fprintf(stderr, "%d steps of %d queries, %d layers of %d slots, %d entries: a layer asks "+
		"for %.0f a step and misses %.1f, from %.1f to %.1f by layer; chosen: none in %d layers, "+
		"DA in %d, DBA in %d\n", len(c.Misses), c.Queries, c.Layers(), c.Slots, c.Context,
		c.Asked, mean, low, high, chosen.Overlap[0], chosen.Overlap[1], chosen.Overlap[2])
	return printRows(stdout, f.asJSON, []string{"overlap", "batch", "misses", "bytes", "stall_us",
		"step_us", "tokens_s", "gain_percent"}, rows)
}

func tenth(x float64) float64 { return math.Round(10*x) / 10 }

// count runs the series through the pool.
func (f *sparseFlags) count(ctx context.Context) (*simulate.Counts, error) {
	if f.file == "" {
		g := f.generated
		if g.Accepted == 0 {
			g.Accepted = 0.85 * float64(g.Queries)
		}
		return simulate.Count(ctx, &g, f.slots, f.ratio)
	}
	file, err := openInput(ctx, f.file)
	if err != nil {
		return nil, fmt.Errorf("series: %w", err)
	}
	defer file.Close()
	c, err := simulate.Count(ctx, sparse.NewSeriesReader(file), f.slots, f.ratio)
	if errors.Is(err, sparse.ErrSeries) {
		return nil, fmt.Errorf("%s: %w; a line is such as %s", f.file, err, seriesLine)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.file, err)
	}
	return c, nil
}

// compare prints the figures of the ESS report beside those of the model.
func (f *sparseFlags) compare(ctx context.Context, stdout io.Writer) error {
	claims, spike, err := simulate.Compare(ctx, f.card, f.generated.Seed, f.generated.Layers,
		f.generated.Steps)
	if err != nil {
		return err
	}
	var rows [][]any
	for _, q := range claims {
		row := []any{q.What, q.Report, tenth(q.Here), nil, q.Basis}
		if q.Off != nil {
			row[3] = tenth(*q.Off)
		}
		rows = append(rows, row)
	}
	if f.svg != "" {
		if err := os.WriteFile(f.svg, simulate.Draw(spike), 0o644); err != nil {
			return err
		}
	}
	return printRows(stdout, f.asJSON, []string{"figure", "report", "here", "off", "basis"}, rows)
}
