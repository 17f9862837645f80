// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
)

// machineFigures are the output of bench all: a description of the machine, and how each backend
// stands beside the limit of that machine.
type machineFigures struct {
	Version versionOutput   `json:"version"`
	Machine machine.Machine `json:"machine"`
	Copy    string          `json:"host_copy"` // how it was chosen
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
	var files posixFlags
	c := &cobra.Command{
		Use:   "all",
		Short: "Measure every backend that works here, as one table",
		Long: `Measure each backend that moves bytes between host memories and works here, by three
shapes: 16 x 1 MiB, 2,048 pages of 656 B, and one piece of 64 B. Each stands beside memcpy of
the same shape, tcp beside bare sockets, ucx beside ucx_perftest and a bare loop over UCX.
Then reads of a file in --dir, beside fio (package fio) and threads that call pread. The table
says what the machine is and which backends are left out, so it tells a stranger what a report
of a slow transfer is about. An interrupt prints what was measured.`,
		Example: `  sluice bench all
  sluice bench all --dir /mnt/nvme --seconds 1 --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchAll(c, &f, &files) },
	}
	c.Flags().StringVar(&files.dir, "dir", os.TempDir(), "directory on the disk to measure, for a "+
		"file of 256 MiB")
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

// everyFile is the size of the file of bench all.
const everyFile = 256 << 20

// everyFileShape is everyShape of a file.
func everyFileShape() []bench.Shape {
	return []bench.Shape{
		{Op: driver.Read, Size: 1 << 20, Batch: 8, Spread: everyFile, Threads: 1},
		{Op: driver.Read, Size: tableEntry, Batch: tableEntries, Pages: true, Spread: everyFile,
			Threads: 1},
		{Op: driver.Read, Size: 4 << 10, Batch: 1, Spread: everyFile, Threads: 1},
	}
}

func runBenchAll(c *cobra.Command, f *benchFlags, files *posixFlags) error {
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
	if c.Flags().Changed("dir") { // without it the rest is measured all the same
		if err := files.checkDir(everyFile, ""); err != nil {
			return err
		}
	}
	f.threads, f.memory = 1, string(bench.BackendMemory)
	all := machineFigures{Version: readVersion(), Missing: []leftOut{},
		Machine: machine.Examine(machine.Source{}).Machine, Copy: copy.Chosen().Why}
	f.left = func(backend string, why error) {
		all.Missing = append(all.Missing, leftOut{backend, why.Error()})
	}
	m := startMeasuring(c, f.aboutAll(shapes))
	all.Results, err = f.overEach(driver.InProcess, func(g *benchFlags) ([]bench.Result, error) {
		return g.overShapes(c, shapes, "a smaller --spread")
	})
	if err == nil {
		var overFile []bench.Result
		overFile, err = f.overFile(c, files)
		all.Results = append(all.Results, overFile...)
	}
	for _, m := range makers {
		if m.bench != "" && m.name != posixName {
			f.left(m.name, errors.New("its own command measures it: "+m.bench))
		}
	}
	return m.print(func(w io.Writer, list []bench.Result) error {
		if all.Results = list; f.result.format == "json" {
			return printJSON(w, all)
		}
		if err := all.print(w, f.result.format == "gobench"); err != nil {
			return err
		}
		return write(w, list)
	}, all.Results, err)
}

// aboutAll is how long bench all takes where all backends work.
func (f *benchFlags) aboutAll(shapes []bench.Shape) (about time.Duration) {
	for _, m := range makers {
		if m.bench == "" && m.built() {
			g := *f
			g.backend = m.name
			about += g.about(len(shapes))
		}
	}
	if f.rounds == 0 {
		about += time.Duration(len(everyFileShape())) * f.time()
	}
	return about
}

// overFile measures posix, or says why it is left out.
func (f *benchFlags) overFile(c *cobra.Command, files *posixFlags) (list []bench.Result,
	err error) {
	path, remove, err := files.makeFile(c.Context(), everyFile, "")
	if err != nil && c.Context().Err() == nil {
		f.left(posixName, err)
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	o := bench.Options{Rounds: cmp.Or(f.rounds, 3)}
	o.Slice = f.time() / time.Duration(3*o.Rounds) // of three ways
	shapes := everyFileShape()
	bar := newProgress(c.ErrOrStderr(), int64(len(shapes)), "bench "+posixName)
	defer bar.clear()
	for i, s := range shapes {
		r, err := bench.Disk(c.Context(), path, s, o)
		if err != nil {
			return list, err
		}
		list = append(list, r)
		bar.set(int64(i + 1))
	}
	return list, nil
}

// print writes the lines above the table: version, machine, host copy, missing backends.
func (a *machineFigures) print(w io.Writer, comments bool) error {
	mark := ""
	if comments {
		mark = "# "
	}
	_, err := fmt.Fprintf(w, "%ssluice %s, %s\n%s%s\n%shost copy: %s\n", mark, a.Version.Version,
		a.Version.Go, mark, machineLine(&a.Machine), mark, a.Copy)
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
		all = append(all, results...)
		var unavailable *driver.UnavailableError
		switch {
		case errors.As(err, &unavailable):
			missing = append(missing, err)
			f.left(m.name, err)
		case err != nil:
			return all, err
		}
	}
	if len(all) == 0 {
		return nil, errors.Join(missing...)
	}
	return all, nil
}
