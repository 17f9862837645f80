// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/bench"
)

// posixFlags are the words of the command line.
type posixFlags struct {
	dir, bytes, op, size string
	format               string
	batch, rounds        int
	seconds              float64
	pages, asJSON        bool
}

func newBenchPosix() *cobra.Command {
	var f posixFlags
	c := &cobra.Command{
		Use:   "posix",
		Short: "Measure reads and writes of a file beside fio",
		Long: `Measure reads and writes of host memory from and to a file, at random places of
it, beside fio with io_uring (package fio) over the same file, with requests of the
same size and as many at once, and beside the same backend without io_uring; in
alternation in one run. All figures are medians of rounds.

--pages is one transfer of scattered entries, beside 32 threads that call pread;
nothing of them is in the page cache at first.

Without --op, --size and --pages a table of shapes. The file is made anew in --dir,
and removed.`,
		Example: `  sluice bench posix --dir /mnt/nvme
  sluice bench posix --dir /mnt/nvme --op write --size 64KiB --batch 32 --json
  sluice bench posix --dir /mnt/nvme --size 656 --batch 2048 --pages`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchPosix(c, &f) },
	}
	s := c.Flags()
	s.StringVar(&f.dir, "dir", os.TempDir(), "directory on the disk to measure")
	s.StringVar(&f.bytes, "bytes", "4GiB", "size of the file")
	s.StringVar(&f.op, "op", "read", "write or read")
	s.StringVar(&f.size, "size", "1MiB", "bytes of a request, or of an entry of --pages")
	s.IntVar(&f.batch, "batch", 32, "requests at once, or entries of --pages")
	s.BoolVar(&f.pages, "pages", false, "scattered entries, as one transfer")
	s.Float64Var(&f.seconds, "seconds", 1, "time of each way in each round")
	s.IntVar(&f.rounds, "rounds", 3, "rounds")
	s.StringVar(&f.format, "format", "text", "text, json or gobench (for benchstat)")
	s.BoolVar(&f.asJSON, "json", false, "print JSON: the same as --format json")
	return c
}

// posixTable is what a disk is judged by: large and small requests, one small one at a
// time, and the entries of a token.
func posixTable(spread uint64) (list []bench.Shape) {
	for _, s := range []struct {
		size  uint64
		batch int
	}{{1 << 20, 8}, {64 << 10, 32}, {4 << 10, 32}, {4 << 10, 1}} {
		for _, op := range []backends.Op{backends.Read, backends.Write} {
			list = append(list, bench.Shape{Op: op, Size: s.size, Batch: s.batch, Spread: spread, Threads: 1})
		}
	}
	return append(list, bench.Shape{Op: backends.Read, Size: tableEntry, Batch: tableEntries, Pages: true, Spread: spread, Threads: 1})
}

// shapes reads the flags; what is wrong with them is a usage error.
func (f *posixFlags) shapes(table bool) ([]bench.Shape, error) {
	ops := map[string]backends.Op{"read": backends.Read, "write": backends.Write}
	spread, err := bench.ParseSize(f.bytes)
	if err != nil {
		return nil, &usageError{err}
	}
	list := posixTable(spread)
	if !table {
		size, err := bench.ParseSize(f.size)
		if err != nil {
			return nil, &usageError{err}
		}
		if ops[f.op] == 0 || f.pages && f.op != "read" {
			return nil, usagef("--op %q: there are read and write, and read alone with --pages", f.op)
		}
		list = []bench.Shape{{Op: ops[f.op], Size: size, Batch: f.batch, Pages: f.pages, Spread: spread, Threads: 1}}
	}
	for i := range list {
		if err := list[i].Check(); err != nil {
			return nil, &usageError{err}
		}
		if spread < list[i].Size {
			return nil, usagef("--bytes %s is less than a request", f.bytes)
		}
	}
	return list, nil
}

func runBenchPosix(c *cobra.Command, f *posixFlags) (err error) {
	if f.asJSON {
		f.format = "json"
	}
	printer, ok := printers[f.format]
	switch {
	case !ok:
		return usagef("unknown format %q: there are text, json, gobench", f.format)
	case !(f.seconds > 0 && f.seconds <= secondsMax):
		return usagef("--seconds %v: want more than 0, at most %d", f.seconds, secondsMax)
	case f.rounds < 1 || f.rounds > 1000:
		return usagef("--rounds %d: want 1 to 1000", f.rounds)
	}
	flags := c.Flags()
	shapes, err := f.shapes(!flags.Changed("op") && !flags.Changed("size") && !flags.Changed("batch") && !f.pages)
	if err != nil {
		return err
	}
	path, remove, err := f.makeFile(shapes[0].Spread)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	bar := newProgress(c.ErrOrStderr(), int64(len(shapes)), "bench posix")
	defer bar.clear()
	var results []bench.Result
	for i, s := range shapes {
		o := bench.Options{Rounds: f.rounds, Slice: time.Duration(f.seconds * float64(time.Second))}
		r, err := bench.Disk(c.Context(), path, s, o)
		if err != nil {
			return err
		}
		results = append(results, r)
		bar.set(int64(i + 1))
	}
	return printer(c.OutOrStdout(), results)
}

// makeFile makes the file, if there is room for it.
func (f *posixFlags) makeFile(bytes uint64) (path string, remove func() error, err error) {
	var room unix.Statfs_t
	if err := unix.Statfs(f.dir, &room); err != nil {
		return "", nil, fmt.Errorf("look at --dir %s: %w", f.dir, err)
	}
	if free := room.Bavail * uint64(room.Bsize); free < bytes+bytes/16 {
		return "", nil, fmt.Errorf("%s has room for %s: choose another --dir, or fewer --bytes than %s",
			f.dir, bench.RoundSize(free), bench.RoundSize(bytes))
	}
	dir, err := os.MkdirTemp(f.dir, "sluice-bench")
	if err != nil {
		return "", nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	path = filepath.Join(dir, "file")
	if err := bench.MakeDiskFile(path, bytes); err != nil {
		return "", nil, errors.Join(fmt.Errorf("make the file: %w", err), remove())
	}
	return path, remove, nil
}
