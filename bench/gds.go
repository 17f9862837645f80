// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/cuda"
	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/backends/posix"
	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// GDSLibraries says what is measured.
type GDSLibraries struct {
	CUDA, CuFile string // paths; "" is the system's
	Device       int
	Way          gds.Way
}

// GDS measures transfers between a card's memory and a file that MakeDiskFile has made, of Spread
// bytes: Batch pieces of Size bytes, a multiple of 4 KiB, at random places of the file, as one
// transfer. cuFile (backend gds) stands beside the engine's own chain, io_uring and the copy engine
// (engine.Staged), in alternation: which of the two is faster on this machine is the Ratio. Slice
// is of one way in one round, a second by default, and Rounds are 3 by default.
func GDS(ctx context.Context, path string, s Shape, l GDSLibraries, o Options) (_ Result,
	err error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	if s.Pages || s.Size%4096 != 0 || s.Spread < s.Size {
		return Result{}, fmt.Errorf("pieces of %d bytes in %d, want a multiple of 4 KiB that "+
			"fits, and no pages: %w", s.Size, s.Spread, ErrShape)
	}
	if o.Slice <= 0 {
		o.Slice = time.Second
	}
	if o.Rounds <= 0 {
		o.Rounds = 3
	}
	e := &gdsEnd{shape: s}
	defer func() { err = errors.Join(err, e.close()) }()
	if err := e.open(path, l); err != nil {
		return Result{}, err
	}
	var figures [2]gdsFigures
	for round := range o.Rounds {
		for i := range figures {
			way := (i + round) % len(figures)
			if err := e.run(ctx, way, o.Slice, &figures[way]); err != nil {
				return Result{}, err
			}
		}
	}
	return e.sum(&figures, o.Rounds), nil
}

// gdsWays are the routes that are compared.
var gdsWays = [2]string{"gds", engine.Staged}

type gdsFigures struct {
	rates []float64
	lats  *Samples
	ops   int
}

// gdsEnd is an engine with a card's memory and a file, and a transfer for each way.
type gdsEnd struct {
	closers
	shape     Shape
	b         *gds.Backend
	local     *engine.Region
	file      *engine.Remote
	transfers [2]*engine.Transfer
	why       string
	card      string // what the driver calls it
}

func (e *gdsEnd) open(path string, l GDSLibraries) error {
	b, err := gds.New(gds.Config{CUDA: l.CUDA, Library: l.CuFile, Way: l.Way})
	if err != nil {
		return err
	}
	card, err := cuda.New(cuda.Config{Library: l.CUDA, Devices: []int{l.Device}})
	if err != nil {
		return errors.Join(err, b.Close())
	}
	disk, err := posix.New(posix.Config{})
	if err != nil {
		return errors.Join(err, b.Close(), card.Close())
	}
	eng, err := engine.Open(engine.Config{Name: "bench", Backends: []driver.Backend{b, card, disk}})
	if err != nil {
		return err // it has closed them
	}
	e.b = b
	if e.card, err = cardName(l.Device); err != nil {
		return errors.Join(err, eng.Close())
	}
	seg, memory, err := card.AllocDevice(l.Device, e.shape.Size*uint64(e.shape.Batch))
	if err != nil {
		return errors.Join(err, eng.Close())
	}
	e.closers = append(e.closers, memory, eng) // closed from the last on
	if e.local, err = eng.Register("hbm", seg); err != nil {
		return err
	}
	file, err := posix.Open(path, posix.OpenOptions{ReadOnly: e.shape.Op == driver.Read})
	if err != nil {
		return err
	}
	defer file.Close()
	if file.Segment().Len < e.shape.Spread {
		return fmt.Errorf("a file of %d bytes for a spread of %d: %w", file.Segment().Len,
			e.shape.Spread, ErrShape)
	}
	if _, err := eng.Register("file", file.Segment()); err != nil {
		return err
	}
	return e.connect(eng)
}

// cardName is what the driver calls a device.
func cardName(ordinal int) (string, error) {
	d, err := gpu.Open(ordinal)
	if err != nil {
		return "", err
	}
	return d.Facts().Name, d.Close()
}

// connect makes the transfers.
func (e *gdsEnd) connect(eng *engine.Engine) error {
	self, err := eng.Self()
	if err != nil {
		return err
	}
	if e.file, err = self.Remote("file"); err != nil {
		return err
	}
	x, err := eng.Explain(self, e.local, e.file)
	if err != nil {
		return err
	}
	for _, c := range x.Candidates {
		if c.Backend == gdsWays[0] {
			e.why = c.Reason
		}
	}
	for i, name := range gdsWays {
		if e.transfers[i], err = eng.NewTransfer(self,
			map[driver.Op]engine.Op{driver.Read: engine.Read,
				driver.Write: engine.Write}[e.shape.Op],
			engine.Route{Only: name}); err != nil {
			return err
		}
		e.closers = append(e.closers, e.transfers[i])
	}
	return nil
}

func (e *gdsEnd) close() error { return e.closers.close() }

// run moves batches by one way for as long as a slice, at least two.
func (e *gdsEnd) run(ctx context.Context, way int, slice time.Duration, f *gdsFigures) error {
	if f.lats == nil {
		f.lats = NewSamples(samplesMax)
	}
	begin, n := time.Now(), 0
	for ; n < 2 || time.Since(begin) < slice; n++ {
		if ctx.Err() != nil { // a transfer that ends before Wait sleeps does not look
			return context.Cause(ctx)
		}
		at := time.Now()
		if err := e.batch(ctx, e.transfers[way]); err != nil {
			return fmt.Errorf("by %s: %w", gdsWays[way], err)
		}
		f.lats.Add(time.Since(at))
	}
	f.ops += n
	f.rates = append(f.rates, float64(n)/time.Since(begin).Seconds())
	return nil
}

func (e *gdsEnd) batch(ctx context.Context, t *engine.Transfer) error {
	s := &e.shape
	if err := t.Reset(); err != nil {
		return err
	}
	for i := range uint64(s.Batch) {
		if err := t.Add(e.local, i*s.Size, e.file, rand.Uint64N(s.Spread/s.Size)*s.Size,
			s.Size); err != nil {
			return err
		}
	}
	if err := t.Post(); err != nil {
		return err
	}
	return t.Wait(ctx)
}

func (e *gdsEnd) sum(f *[2]gdsFigures, rounds int) Result {
	s := &e.shape
	bytes := float64(s.BatchBytes())
	r := Result{Backend: "gds", Op: s.Op.String(), Size: s.Size, Batch: s.Batch, Spread: s.Spread,
		Threads: 1, Rounds: rounds, Ops: f[0].ops,
		GBps: Median(f[0].rates) * bytes / 1e9, OpsPerS: Median(f[0].rates),
		P50us: Micros(f[0].lats.Percentile(50)), P99us: Micros(f[0].lats.Percentile(99)),
		Route: e.why, Memory: "cuda"}
	r.SetBaselines([]Baseline{{Name: engine.Staged, GBps: Median(f[1].rates) * bytes / 1e9,
		P50us: Micros(f[1].lats.Percentile(50))}})
	r.Notes = append(r.Notes, GDSAdvice(&r))
	if strings.Contains(e.card, StandInName) {
		r.Backend = StandInName
		r.Notes = append(r.Notes, "these are figures of software stand-ins of libcuda and "+
			"libcufile, not of a card")
	}
	return r
}

// GDSAdvice says what a result of GDS means for a program on this machine.
func GDSAdvice(r *Result) string {
	if r.Ratio < 1 {
		return fmt.Sprintf("%s of %d bytes: cuFile has %.2f of the staged route: name that by "+
			"Route.Only, or leave gds out", r.Op, r.Size, r.Ratio)
	}
	return fmt.Sprintf("%s of %d bytes: cuFile has %.2f of the staged route: leave the choice to "+
		"the engine, which takes gds", r.Op, r.Size, r.Ratio)
}
