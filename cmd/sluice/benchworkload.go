// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// listWorkloads is the name that lists the others.
const listWorkloads = "list"

// workloadFlags say what of a workload the command line decides.
type workloadFlags struct {
	name        string
	tokens      int
	blockTokens int
	bytesMax    string
}

func (w *workloadFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&w.name, "workload", "", "measure the shapes of that name, such as nixlbench or "+
		"llama3.1-70b/layer/tp8/pp2; list: say what there is")
	s.IntVar(&w.tokens, "tokens", 2048, "of --workload alone: tokens of the prompt; of reshape "+
		"8192")
	s.IntVar(&w.blockTokens, "block-tokens", 16, "of --workload alone: tokens of a block")
	s.StringVar(&w.bytesMax, "operation-bytes", "128MiB", "of --workload alone: bytes of an "+
		"operation at most; pieces beyond are cut")
}

// check refuses what a workload decides itself, and what is a workload's alone.
func (f *benchFlags) checkWorkload(c *cobra.Command) error {
	if err := f.checkReshape(c); err != nil {
		return err
	}
	switch f.workload.name {
	case "":
		return refuse(c, "--%s is of workloads alone: say --workload NAME", "tokens",
			"block-tokens", "operation-bytes")
	case listWorkloads:
		if f.result.format == "gobench" {
			return usagef("--workload %s: want --format text or json", listWorkloads)
		}
		return refuse(c, "--workload "+listWorkloads+" measures nothing: it takes no --%s",
			beside(c, "workload", "json", "format")...)
	case bench.SizeSweep:
		if err := refuse(c, "--workload "+bench.SizeSweep+" has one block at a time: it takes no "+
			"--%s", "spread", "operation-bytes"); err != nil {
			return err
		}
	}
	if f.workload.name == bench.SizeSweep || f.workload.name == bench.BatchSweep {
		if err := refuse(c, "--%s is of workloads of a model", "tokens",
			"block-tokens"); err != nil {
			return err
		}
	}
	return refuse(c, "--workload has shapes of its own: it takes no --%s", "size", "batch",
		"sweep", "pages", "gather", "notify", "table", "hot", "plot")
}

// runWorkload lists the workloads, or measures one over each backend that serves.
func runWorkload(c *cobra.Command, f *benchFlags, write printer) error {
	if f.workload.name == listWorkloads {
		return printWorkloads(c.OutOrStdout(), f.result.format == "json")
	}
	if f.workload.name == reshapeWorkload {
		return runReshape(c, f, write)
	}
	w, err := f.newWorkload()
	if err != nil {
		return err
	}
	m := startMeasuring(c, f.about(len(w.Steps)))
	results, err := f.overBackends(c, w)
	return m.print(write, results, err)
}

func (f *benchFlags) newWorkload() (*bench.Workload, error) {
	known := []string{reshapeWorkload}
	for _, w := range bench.Workloads() {
		known = append(known, w.Name)
	}
	first, _, _ := strings.Cut(f.workload.name, "/")
	if !slices.Contains(known, first) {
		return nil, usagef("unknown workload %q: there are %s; --workload %s says what each is",
			f.workload.name, strings.Join(known, ", "), listWorkloads)
	}
	if _, err := f.shapes(); err != nil { // what concerns any shape
		return nil, err
	}
	bytes, err := bench.ParseSize(f.workload.bytesMax)
	if err != nil {
		return nil, &usageError{err}
	}
	spread, err := bench.ParseSize(f.spread)
	if err != nil {
		return nil, &usageError{err}
	}
	op := engine.Write
	if f.op == "read" {
		op = engine.Read
	}
	switch {
	case f.workload.tokens < 1:
		return nil, usagef("--tokens %d: want 1 or more", f.workload.tokens)
	case f.workload.blockTokens < 1:
		return nil, usagef("--block-tokens %d: want 1 or more", f.workload.blockTokens)
	case bytes < 1:
		return nil, usagef("--operation-bytes %s: want 1 or more", f.workload.bytesMax)
	}
	w, err := bench.NewWorkload(f.workload.name, bench.WorkloadOptions{Op: op,
		Tokens:      f.workload.tokens,
		BlockTokens: f.workload.blockTokens, Threads: f.threads, BytesMax: bytes, Spread: spread})
	if err != nil {
		return nil, &usageError{err}
	}
	return w, nil
}

// workloadEntry is a line of --workload list --json.
type workloadEntry struct {
	Name  string `json:"name"`
	About string `json:"about"`
}

func printWorkloads(out io.Writer, asJSON bool) error {
	var list []workloadEntry
	for _, w := range bench.Workloads() {
		list = append(list, workloadEntry{w.Name, w.About})
	}
	list = append(list, workloadEntry{reshapeWorkload, "one request from a group of ranks to one " +
		"of another layout: --prefill, --decode, --model (one of the above, " +
		strings.Join(groupModels, ", ") + ")"})
	if asJSON {
		return printJSON(out, list)
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, w := range list {
		fmt.Fprintf(t, "%s\t%s\n", w.Name, w.About)
	}
	return t.Flush()
}

// overBackends measures over the backend of the command line, or over each that moves bytes between
// processes and works here.
func (f *benchFlags) overBackends(c *cobra.Command, w *bench.Workload) ([]bench.Result, error) {
	if c.Flags().Changed("backend") {
		return f.overBackend(c, w)
	}
	f.left = func(backend string, why error) {
		fmt.Fprintf(c.ErrOrStderr(), "%s is left out: %v\n", backend, why)
	}
	return f.overEach(driver.SameHost, func(g *benchFlags) ([]bench.Result, error) {
		return g.overBackend(c, w)
	})
}

// overBackend measures the steps, and says which is which.
func (f *benchFlags) overBackend(c *cobra.Command, w *bench.Workload) ([]bench.Result, error) {
	var shapes []bench.Shape
	for _, s := range w.Steps {
		shapes = append(shapes, s.Shape)
	}
	smaller := "a smaller --operation-bytes or --spread, or fewer --threads"
	if w.Name == bench.SizeSweep {
		smaller = fewerThreads
	}
	results, err := f.overShapes(c, shapes, smaller)
	for i := range results {
		results[i].Step(&w.Steps[i])
	}
	return results, err
}

// overShapes measures shapes over the backend of the flags. smaller is as of fits.
func (f *benchFlags) overShapes(c *cobra.Command, shapes []bench.Shape, smaller string) (
	[]bench.Result, error) {
	if err := f.settle(); err != nil {
		return nil, err
	}
	if err := f.opens(); err != nil {
		return nil, err
	}
	if err := fits(shapes, hostmem.Limits().Available, f.beside(), smaller); err != nil {
		return nil, err
	}
	if err := f.network.examine(f.backend); err != nil {
		return nil, err
	}
	bar := newProgress(c.ErrOrStderr(), int64(len(shapes))*1000, "bench "+f.backend)
	defer bar.clear()
	return f.measure(c.Context(), shapes, bar)
}

// opens finds out whether the backend is there, before anything is started for it.
func (f *benchFlags) opens() error {
	list, err := openBackends(f.backend, driver.InProcess, f.openOptions())
	if err != nil {
		return err
	}
	return closeAll(list)
}
