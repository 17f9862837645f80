// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
)

// machineFigures are the output of bench all: a description of the machine, and how each backend
// stands beside the limit of that machine.
type machineFigures struct {
	Version versionOutput   `json:"version"`
	Machine machine.Machine `json:"machine"`
	Results []bench.Result  `json:"results"`
	Missing []leftOut       `json:"missing"`
}

// leftOut is a backend that does not work here.
type leftOut struct {
	Backend string `json:"backend"`
	Why     string `json:"why"`
}

func newBenchAll() *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use:   "all",
		Short: "Measure every backend that works here, as one table",
		Long: `Measure each backend that moves bytes between host memories and works here, by three
shapes: 16 x 1 MiB, 2,048 pages of 656 B, and one piece of 64 B. Each stands beside memcpy of
the same shape, tcp beside bare sockets, ucx beside ucx_perftest and a bare loop over UCX. The
table says what the machine is and which backends are left out, so it tells a stranger what a
report of a slow transfer is about. Files have sluice bench posix.`,
		Example: `  sluice bench all
  sluice bench all --seconds 1 --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchAll(c, &f) },
	}
	c.Flags().StringVar(&f.spread, "spread", "1GiB", "size of the memory that the pages lie in")
	f.registerTotal(c, "time to measure each shape")
	f.result.register(c)
	return c
}

// everyShape is what bench all measures: large pieces, scattered entries, and what an operation
// costs beside its bytes.
func everyShape(spread uint64) []bench.Shape {
	return []bench.Shape{
		{Op: driver.Write, Size: 1 << 20, Batch: 16, Threads: 1},
		{Op: driver.Write, Size: tableEntry, Batch: tableEntries, Pages: true, Spread: spread,
			Threads: 1},
		{Op: driver.Write, Size: 64, Batch: 1, Threads: 1},
	}
}

func runBenchAll(c *cobra.Command, f *benchFlags) error {
	write, err := f.result.printer()
	if err != nil {
		return err
	}
	if err := f.checkTotal(); err != nil {
		return err
	}
	spread, err := bench.ParseSize(f.spread)
	if err != nil {
		return &usageError{fmt.Errorf("--spread: %w", err)}
	}
	shapes := everyShape(spread)
	for i := range shapes {
		if err := shapes[i].Check(); err != nil {
			return &usageError{fmt.Errorf("--spread %s: %w", f.spread, err)}
		}
	}
	f.threads, f.memory = 1, string(bench.BackendMemory)
	all := machineFigures{Version: readVersion(), Missing: []leftOut{},
		Machine: machine.Examine(machine.Source{}).Machine}
	f.left = func(backend string, why error) {
		all.Missing = append(all.Missing, leftOut{backend, why.Error()})
	}
	all.Results, err = f.overEach(driver.InProcess, func(g *benchFlags) ([]bench.Result, error) {
		return g.overShapes(c, shapes)
	})
	if err != nil {
		return err
	}
	if f.result.format == "json" {
		return printJSON(c.OutOrStdout(), all)
	}
	if err := all.print(c.OutOrStdout(), f.result.format == "gobench"); err != nil {
		return err
	}
	return write(c.OutOrStdout(), all.Results)
}

// print writes the lines above the table: version, machine, missing backends.
func (a *machineFigures) print(w io.Writer, comments bool) error {
	mark := ""
	if comments {
		mark = "# "
	}
	_, err := fmt.Fprintf(w, "%ssluice %s, %s\n%s%s\n", mark, a.Version.Version, a.Version.Go, mark,
		machineLine(&a.Machine))
	for _, m := range a.Missing {
		if err == nil {
			_, err = fmt.Fprintf(w, "%s%s is left out: %s\n", mark, m.Backend, m.Why)
		}
	}
	if err == nil && !comments {
		_, err = fmt.Fprintln(w)
	}
	return err
}

// overEach measures over each backend that moves bytes between host memories, at least as far as
// reach says, and works here.
func (f *benchFlags) overEach(reach driver.Reach, measure func(*benchFlags) ([]bench.Result,
	error)) ([]bench.Result, error) {
	var all []bench.Result
	var missing []error
	for _, m := range makers {
		if m.reach < reach || m.bench != "" {
			continue
		}
		g := *f
		g.backend, g.perftest, g.verbstest = m.name, nil, nil
		results, err := measure(&g)
		var unavailable *driver.UnavailableError
		switch {
		case errors.As(err, &unavailable):
			missing = append(missing, err)
			f.left(m.name, err)
		case err != nil:
			return nil, err
		}
		all = append(all, results...)
	}
	if len(all) == 0 {
		return nil, errors.Join(missing...)
	}
	return all, nil
}
