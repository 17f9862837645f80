// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
)

// posixFlags are the words of the command line.
type posixFlags struct {
	dir, bytes, op, size string
	batch, dense         int
	pages, durable, load bool
	loadBytes            string
	result               resultFlags
	timeFlags
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
nothing of them is in the page cache at first. With --dense N they lie in one range of
the file, one in N entries of it.

--durable writes batch after batch, each of which is over once the disk has it, beside
fio that calls fdatasync after as many writes. --load is package weights that reads
safetensors files, beside fio that reads them in order and beside a program that maps
them and copies, with nothing in the page cache.

Without --op, --size, --batch, --pages and --load a table of all of that, with the
processor time of a request by each way. The file is made anew in --dir, and removed.`,
		Example: `  sluice bench posix --dir /mnt/nvme
  sluice bench posix --dir /mnt/nvme --op write --size 64KiB --batch 32 --json
  sluice bench posix --dir /mnt/nvme --size 656 --batch 2048 --pages --dense 8
  sluice bench posix --dir /mnt/nvme --op write --size 4KiB --batch 32 --durable
  sluice bench posix --dir /mnt/nvme --load`,
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
	s.IntVar(&f.dense, "dense", 0, "with --pages: one entry in this many of a range; 0: anywhere "+
		"in the file")
	s.BoolVar(&f.durable, "durable", false, "with --op write: a batch is over once the disk has it")
	s.BoolVar(&f.load, "load", false, "load safetensors files")
	s.StringVar(&f.loadBytes, "load-bytes", "1GiB", "size of those files in all")
	f.registerSlices(c)
	f.result.register(c)
	return c
}

// posixTable is what a disk is judged by: large and small requests, one small one at a
// time, and the entries of a token.
func posixTable(spread uint64) (list []bench.Shape) {
	for _, s := range []struct {
		size  uint64
		batch int
	}{{1 << 20, 8}, {64 << 10, 32}, {4 << 10, 32}, {4 << 10, 1}} {
		for _, op := range []driver.Op{driver.Read, driver.Write} {
			list = append(list, bench.Shape{Op: op, Size: s.size, Batch: s.batch, Spread: spread,
				Threads: 1})
		}
	}
	for _, size := range []uint64{4 << 10, 64 << 10} {
		list = append(list, bench.Shape{Op: driver.Write, Size: size, Batch: 32, Durable: true,
			Spread: spread, Threads: 1})
	}
	for _, dense := range []int{0, 8} {
		if uint64(dense*tableEntries*tableEntry) <= spread {
			list = append(list, bench.Shape{Op: driver.Read, Size: tableEntry, Batch: tableEntries,
				Pages: true, Dense: dense, Spread: spread, Threads: 1})
		}
	}
	return list
}

// table reports whether the command line names no shape of its own.
func (f *posixFlags) table(c *cobra.Command) (bool, error) {
	shape := []string{"op", "size", "batch", "pages", "dense", "durable"}
	if f.load {
		return true, refuse(c, "--load loads whole files: it takes no --%s",
			append(shape, "bytes", "seconds")...)
	}
	if !slices.ContainsFunc(shape, func(name string) bool { return given(c, name) }) {
		return true, nil
	}
	return false, refuse(c, "--%s is of --load, and of the table", "load-bytes")
}

// shapes reads the flags; what is wrong with them is a usage error.
func (f *posixFlags) shapes(table bool) ([]bench.Shape, error) {
	ops := map[string]driver.Op{"read": driver.Read, "write": driver.Write}
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
			return nil, usagef("--op %q: there are read and write, and read alone with --pages",
				f.op)
		}
		switch {
		case f.dense != 0 && !f.pages:
			return nil, usagef("--dense %d is for --pages", f.dense)
		case f.durable && (f.op != "write" || f.pages):
			return nil, usagef("--durable is for --op write, without --pages")
		}
		list = []bench.Shape{{Op: ops[f.op], Size: size, Batch: f.batch, Pages: f.pages,
			Dense: f.dense, Durable: f.durable, Spread: spread, Threads: 1}}
	}
	for i := range list {
		if err := list[i].Check(); err != nil {
			return nil, &usageError{err}
		}
		if spread < list[i].Size {
			return nil, usagef("--bytes %s is less than a request", f.bytes)
		}
		if n := uint64(list[i].Dense*list[i].Batch) * list[i].Size; n > spread {
			return nil, usagef("--bytes %s is less than the range of %d entries, %s", f.bytes,
				list[i].Dense*list[i].Batch, bench.FormatSize(n))
		}
	}
	return list, nil
}

func runBenchPosix(c *cobra.Command, f *posixFlags) (err error) {
	write, err := f.result.printer()
	if err != nil {
		return err
	}
	if err := f.checkSlices(); err != nil {
		return err
	}
	table, err := f.table(c)
	if err != nil {
		return err
	}
	shapes, err := f.shapes(table)
	if err != nil {
		return err
	}
	load, err := bench.ParseSize(f.loadBytes)
	if err != nil {
		return &usageError{fmt.Errorf("--load-bytes: %w", err)}
	}
	room, most, smaller := shapes[0].Spread, shapes[0].Spread, "--bytes"
	if f.load { // it makes files of its own
		room, most, smaller, shapes = 0, load, "--load-bytes", nil
	} else if table { // the files of the load come when the other is gone
		most, smaller = max(room, load), "--bytes and --load-bytes"
	}
	if err := f.checkDir(most, smaller); err != nil {
		return err
	}
	m := startMeasuring(c, time.Duration(len(shapes)*f.rounds*diskWays)*f.time())
	fmt.Fprintf(c.ErrOrStderr(), "bench posix: making files in %s\n", f.dir)
	path, remove, err := f.makeFile(c.Context(), room, smaller)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	results, err := f.measure(c, path, shapes, table, load)
	return m.print(write, results, err)
}

// diskWays are io_uring, threads, and fio.
const diskWays = 3

// measure measures the shapes, and with load a load of so many bytes. With an error it returns
// those that were measured before.
func (f *posixFlags) measure(c *cobra.Command, path string, shapes []bench.Shape, load bool,
	bytes uint64) (list []bench.Result, err error) {
	bar := newProgress(c.ErrOrStderr(), int64(len(shapes)+1), "bench posix")
	defer bar.clear()
	for i, s := range shapes {
		o := bench.Options{Rounds: f.rounds, Slice: f.time()}
		r, err := bench.Disk(c.Context(), path, s, o)
		if err != nil {
			return list, err
		}
		list = append(list, r)
		bar.set(int64(i + 1))
	}
	if !load {
		return list, nil
	}
	if err := os.Truncate(path, 0); err != nil { // its room is for the files of the load
		return list, err
	}
	r, err := bench.Load(c.Context(), filepath.Dir(path), bytes, bench.Options{Rounds: f.rounds})
	if err != nil {
		return list, err
	}
	return append(list, r), nil
}

// checkDir refuses a --dir that has no room for so many bytes, which the flag smaller decides, or
// takes no file.
func (f *posixFlags) checkDir(bytes uint64, smaller string) error {
	var room unix.Statfs_t
	if err := unix.Statfs(f.dir, &room); err != nil {
		return fmt.Errorf("look at --dir %s: %w", f.dir, err)
	}
	if free := room.Bavail * uint64(room.Bsize); free < bytes+bytes/16 {
		cure := "choose another --dir"
		if smaller != "" {
			cure += ", or a smaller " + smaller
		}
		return fmt.Errorf("%s has room for %s, and %s are to be written: %s", f.dir,
			bench.RoundSize(free), bench.RoundSize(bytes), cure)
	}
	dir, err := os.MkdirTemp(f.dir, "sluice-bench")
	if err != nil {
		return fmt.Errorf("write to --dir %s: %w", f.dir, err)
	}
	return os.Remove(dir)
}

// makeFile makes the file, if there is room for it. smaller is as of checkDir.
func (f *posixFlags) makeFile(ctx context.Context, bytes uint64, smaller string) (path string,
	remove func() error, err error) {
	if err := f.checkDir(bytes, smaller); err != nil {
		return "", nil, err
	}
	dir, err := os.MkdirTemp(f.dir, "sluice-bench")
	if err != nil {
		return "", nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	path = filepath.Join(dir, "file")
	if err := bench.MakeDiskFile(ctx, path, bytes); err != nil {
		return "", nil, errors.Join(fmt.Errorf("make the file: %w", err), remove())
	}
	return path, remove, nil
}
