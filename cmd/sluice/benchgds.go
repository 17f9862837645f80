// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
)

// gdsFlags are the words of the command line.
type gdsFlags struct {
	dir, bytes, op, size string
	library, cufile, way string
	save                 string
	batch                int
	result               resultFlags
	timeFlags
}

func newBenchGDS() *cobra.Command {
	var f gdsFlags
	c := &cobra.Command{
		Use:   "gds",
		Short: "Measure a card's memory and a file by cuFile, beside the engine's own chain",
		Long: `Measure transfers between a card's memory and random places of a file by cuFile
(backend gds), beside the engine's own chain: io_uring, pinned memory of the host and
the copy engine (route staged); in alternation in one run. All figures are medians of
rounds. Below 1 the ratio says that routes should name staged on this machine.

Without --op and --size a table of shapes. The file is made anew in --dir, and removed.
It needs NVIDIA's driver and libcufile.`,
		Example: `  sluice bench gds --dir /mnt/nvme
  sluice bench gds --dir /mnt/nvme --op read --size 1MiB --way threads --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchGDS(c, &f) },
	}
	s := c.Flags()
	s.StringVar(&f.dir, "dir", os.TempDir(), "directory on the disk to measure")
	s.StringVar(&f.bytes, "bytes", "4GiB", "size of the file")
	s.StringVar(&f.op, "op", "read", "write or read")
	s.StringVar(&f.size, "size", "1MiB", "bytes of a piece, a multiple of 4 KiB")
	s.IntVar(&f.batch, "batch", 32, "pieces of a transfer")
	s.StringVar(&f.library, "library", "", "a path of libcuda; without it the system's")
	s.StringVar(&f.cufile, "cufile", "", "a path of libcufile; without it the system's")
	s.StringVar(&f.way, "way", "auto", "how cuFile is called: auto, batches, threads, or streams, "+
		"which need nvidia-fs")
	f.registerSlices(c)
	s.StringVar(&f.save, "save", "", "also write JSON to that file")
	f.result.register(c)
	return c
}

// gdsShapes are what a way to the disk is judged by.
func gdsShapes(spread uint64) (list []bench.Shape) {
	for _, s := range []struct {
		size  uint64
		batch int
	}{{4 << 20, 8}, {1 << 20, 32}, {64 << 10, 128}, {4 << 10, 128}} {
		for _, op := range []driver.Op{driver.Read, driver.Write} {
			list = append(list, bench.Shape{Op: op, Size: s.size, Batch: s.batch, Spread: spread,
				Threads: 1})
		}
	}
	return list
}

// shapes reads the flags; what is wrong with them is a usage error.
func (f *gdsFlags) shapes(table bool) ([]bench.Shape, error) {
	spread, err := bench.ParseSize(f.bytes)
	if err != nil {
		return nil, &usageError{err}
	}
	list := gdsShapes(spread)
	if !table {
		size, err := bench.ParseSize(f.size)
		if err != nil {
			return nil, &usageError{err}
		}
		op := map[string]driver.Op{"read": driver.Read, "write": driver.Write}[f.op]
		if op == 0 {
			return nil, usagef("--op %q: there are read and write", f.op)
		}
		list = []bench.Shape{{Op: op, Size: size, Batch: f.batch, Spread: spread, Threads: 1}}
	}
	for i := range list {
		s := &list[i]
		if err := s.Check(); err != nil {
			return nil, &usageError{err}
		}
		if s.Size%4096 != 0 || spread < s.Size {
			return nil, usagef("--size %d: want a multiple of 4 KiB, at most --bytes", s.Size)
		}
	}
	return list, nil
}

func (f *gdsFlags) libraries() (l bench.GDSLibraries, err error) {
	l = bench.GDSLibraries{CUDA: f.library, CuFile: f.cufile}
	for way := gds.WayAuto; way <= gds.WayThreads; way++ {
		if way.String() == f.way {
			l.Way = way
			return l, nil
		}
	}
	return l, usagef("--way %q: there are auto, batches, streams, threads", f.way)
}

func runBenchGDS(c *cobra.Command, f *gdsFlags) (err error) {
	write, err := f.result.printer()
	if err != nil {
		return err
	}
	if err := f.checkSlices(); err != nil {
		return err
	}
	l, err := f.libraries()
	if err != nil {
		return err
	}
	if err := checkSave(f.save); err != nil {
		return err
	}
	flags := c.Flags()
	shapes, err := f.shapes(!flags.Changed("op") && !flags.Changed("size") &&
		!flags.Changed("batch"))
	if err != nil {
		return err
	}
	// before the file is made; the libraries may take seconds
	facts, err := interruptible(c.Context(), func() (gds.Facts, error) {
		return gds.Examine(gds.Config{CUDA: l.CUDA, Library: l.CuFile, Way: l.Way})
	})
	if err != nil {
		return err
	}
	m := startMeasuring(c, time.Duration(len(shapes)*f.rounds*gdsWays)*f.time())
	results, failed := f.measure(c, shapes, l)
	for i := range results {
		results[i].Notes = append(results[i].Notes, facts.String())
	}
	if failed != nil {
		return m.print(write, results, failed)
	}
	if f.save != "" {
		if err := saveJSON(f.save, results); err != nil {
			return fmt.Errorf("save results: %w", err)
		}
	}
	return m.print(write, results, nil)
}

// gdsWays are cuFile, and the chain.
const gdsWays = 2

// measure makes a file, measures the shapes, and removes it.
func (f *gdsFlags) measure(c *cobra.Command, shapes []bench.Shape, l bench.GDSLibraries) (
	results []bench.Result, err error) {
	files := &posixFlags{dir: f.dir}
	path, remove, err := files.makeFile(c.Context(), shapes[0].Spread, "--bytes")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	bar := newProgress(c.ErrOrStderr(), int64(len(shapes)), "bench gds")
	defer bar.clear()
	for i, s := range shapes {
		r, err := f.shape(c.Context(), path, s, l)
		if errors.Is(err, errInHand) {
			bar.clear()
			fmt.Fprintf(c.ErrOrStderr(), "bench gds: %v\n", err)
		}
		if err != nil {
			return results, err
		}
		results = append(results, r)
		bar.set(int64(i + 1))
	}
	return results, nil
}

// gdsGrace is how long after an interrupt the libraries may take to end what they have in hand.
const gdsGrace = 500 * time.Millisecond

var errInHand = fmt.Errorf("a library has not ended its requests %v after the interrupt: they end "+
	"with this process", gdsGrace)

// shape measures one shape. To close the backend waits for cuFile, which cannot recall a request:
// after an interrupt and the grace the requests are left to end with the process. The file is the
// command's own, so nothing else is there for them to reach.
func (f *gdsFlags) shape(ctx context.Context, path string, s bench.Shape, l bench.GDSLibraries) (
	bench.Result, error) {
	late, stop := delayed(ctx, gdsGrace)
	defer stop()
	r, err := interruptible(late, func() (bench.Result, error) {
		return bench.GDS(ctx, path, s, l, bench.Options{Rounds: f.rounds, Slice: f.time()})
	})
	if late.Err() != nil {
		err = errInHand
	}
	return r, err
}
