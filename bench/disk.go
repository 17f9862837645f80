// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
)

// diskFigure is what one way has done in one slice.
type diskFigure struct {
	rate float64       // requests a second
	cpu  time.Duration // processor time of a request, user and system
	p50  time.Duration // of a request; 0: not measured
	p99  time.Duration // the same

	allocs float64 // of a request, of our own alone
}

// preadThreads is how many threads stand beside entries at random places.
const preadThreads = 32

// diskSyncBytes bounds what a sync that has begun writes after the end of the context.
const diskSyncBytes = 32 << 20

// MakeDiskFile writes a file of n bytes, all of it, and leaves nothing of it in the page
// cache. It ends early, by the context's cause, once ctx is over.
func MakeDiskFile(ctx context.Context, path string, n uint64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	block := make([]byte, 8<<20)
	random := rand.NewPCG(1, 2)
	for i := range block {
		block[i] = byte(random.Uint64())
	}
	for off := uint64(0); off < n && err == nil; off += uint64(len(block)) {
		_, err = f.WriteAt(block[:min(uint64(len(block)), n-off)], int64(off))
		if err == nil && off%diskSyncBytes == 0 {
			err = f.Sync() // so that the end of ctx never waits for the whole file
		}
		if err == nil {
			err = context.Cause(ctx)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	return errors.Join(err, f.Close())
}

// Disk measures backend posix over a file that MakeDiskFile has made, of Spread bytes:
// Batch requests under way at once, each of Size bytes at a random place, beside fio and
// beside posix without io_uring. With Pages it measures Batch entries at random places as one
// transfer, beside threads that call pread; nothing of them is in the page cache. With Durable
// each batch is one write that is over once the disk has it, and fio calls fdatasync as often.
// Slice is of one way in one round, a second by default, and Rounds are 3 by default.
func Disk(ctx context.Context, path string, s Shape, o Options) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	if o.Slice <= 0 {
		o.Slice = time.Second
	}
	if o.Rounds <= 0 {
		o.Rounds = 3
	}
	d := &disk{path: path, shape: s, slice: o.Slice}
	if err := d.open(); err != nil {
		return Result{}, errors.Join(err, d.close())
	}
	ways := d.ways()
	figures := make([][]diskFigure, len(ways))
	var notes []string
	for round := range o.Rounds {
		for i := range ways {
			way := (i + round) % len(ways)
			f, err := ways[way].run(ctx)
			switch {
			case ctx.Err() != nil:
				return Result{}, errors.Join(context.Cause(ctx), d.close())
			case err != nil && way == 0:
				return Result{}, errors.Join(err, d.close())
			case err != nil && round == 0:
				notes = append(notes, err.Error())
			case err == nil:
				figures[way] = append(figures[way], f)
			}
		}
	}
	return d.sum(ways, figures, notes, o.Rounds), d.close()
}

// disk is one measurement.
type disk struct {
	path    string
	shape   Shape
	slice   time.Duration
	file    *posix.File
	own     *diskEnd
	threads *diskEnd
}

type diskWay struct {
	name string
	run  func(ctx context.Context) (diskFigure, error)
}

func (d *disk) open() (err error) {
	options := posix.OpenOptions{ReadOnly: d.shape.Op == driver.Read}
	if d.file, err = posix.Open(d.path, options); err != nil {
		return err
	}
	least := d.shape.Size * uint64(max(d.shape.Dense*d.shape.Batch, 1))
	if n := d.file.Segment().Len; n < d.shape.Spread || d.shape.Spread < least {
		return fmt.Errorf("a file of %d bytes for a spread of %d: %w", n, d.shape.Spread, ErrShape)
	}
	if d.own, err = openDiskEnd(posix.Config{Depth: max(d.shape.Batch, 128)}, d.file,
		&d.shape); err != nil {
		return err
	}
	d.threads, err = openDiskEnd(posix.Config{Path: posix.PathThreads}, d.file, &d.shape)
	return err
}

func (d *disk) close() error {
	errs := []error{d.own.close(), d.threads.close()}
	if d.file != nil {
		errs = append(errs, d.file.Close())
	}
	return errors.Join(errs...)
}

// ways are our own, and what stands beside it.
func (d *disk) ways() []diskWay {
	if d.shape.Pages {
		return []diskWay{
			{"posix", func(context.Context) (diskFigure, error) {
				return counted(func() (diskFigure, error) { return d.own.gather(&d.shape) }, 0)
			}},
			{fmt.Sprintf("%d-preads", preadThreads), func(context.Context) (diskFigure, error) {
				return preads(d.file.Segment().FD, d.own, &d.shape)
			}},
			{"posix-threads", func(context.Context) (diskFigure, error) {
				return d.threads.gather(&d.shape)
			}},
		}
	}
	if d.shape.Durable {
		return []diskWay{
			{"posix", func(context.Context) (diskFigure, error) {
				return counted(func() (diskFigure, error) {
					return d.own.persist(&d.shape, d.slice)
				}, d.slice)
			}},
			{FioName, func(ctx context.Context) (diskFigure, error) {
				return runFio(ctx, d.path, &d.shape, d.slice, false)
			}},
			{"posix-threads", func(context.Context) (diskFigure, error) {
				return d.threads.persist(&d.shape, d.slice)
			}},
		}
	}
	return []diskWay{
		{"posix", func(context.Context) (diskFigure, error) {
			return counted(func() (diskFigure, error) {
				return d.own.requests(&d.shape, d.slice)
			}, d.slice)
		}},
		{FioName, func(ctx context.Context) (diskFigure, error) {
			return runFio(ctx, d.path, &d.shape, d.slice, false)
		}},
		{"posix-threads", func(context.Context) (diskFigure, error) {
			return d.threads.requests(&d.shape, d.slice)
		}},
	}
}

// sum takes medians.
func (d *disk) sum(ways []diskWay, figures [][]diskFigure, notes []string, rounds int) Result {
	s := &d.shape
	bytes := float64(s.Size)
	if s.Pages {
		bytes *= float64(s.Batch)
	}
	own := medianOf(figures[0])
	r := Result{Backend: "posix", Op: s.Op.String(), Size: s.Size, Batch: s.Batch, Pages: s.Pages,
		Spread:  s.Spread,
		Threads: 1, GBps: own.rate * bytes / 1e9, OpsPerS: own.rate, P50us: Micros(own.p50),
		P99us:       Micros(own.p99),
		AllocsPerOp: own.allocs, Rounds: rounds,
		Route: d.own.explain(), Memory: "host", Notes: notes,
		Extra: map[string]float64{"cpu-us": Micros(own.cpu)}}
	switch {
	case s.Dense > 0:
		r.Lane = fmt.Sprintf("1-in-%d", s.Dense)
	case s.Durable:
		r.Lane = "durable"
	}
	var beside []Baseline
	for i := 1; i < len(ways); i++ {
		if len(figures[i]) == 0 {
			continue
		}
		f := medianOf(figures[i])
		beside = append(beside, Baseline{Name: ways[i].name, GBps: f.rate * bytes / 1e9,
			P50us: Micros(f.p50)})
		r.Extra[ways[i].name+"-cpu-us"] = Micros(f.cpu)
	}
	r.SetBaselines(beside)
	return r
}

func medianOf(list []diskFigure) diskFigure {
	duration := func(of func(f *diskFigure) time.Duration) time.Duration {
		var all []time.Duration
		for i := range list {
			all = append(all, of(&list[i]))
		}
		return Percentile(slices.Sorted(slices.Values(all)), 50)
	}
	var rates, allocs []float64
	for i := range list {
		rates, allocs = append(rates, list[i].rate), append(allocs, list[i].allocs)
	}
	return diskFigure{
		rate: Median(rates), allocs: Median(allocs),
		cpu: duration(func(f *diskFigure) time.Duration { return f.cpu }),
		p50: duration(func(f *diskFigure) time.Duration { return f.p50 }),
		p99: duration(func(f *diskFigure) time.Duration { return f.p99 }),
	}
}

// closers is what an end has opened, to be closed in reverse.
type closers []io.Closer

func (c closers) close() error {
	var errs []error
	for _, x := range slices.Backward(c) {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}
