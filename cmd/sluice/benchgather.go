// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// The devices that may gather.
const (
	cpuDevice  = "cpu"
	cudaDevice = "cuda"
)

// gatherFlags are the words of the command line.
type gatherFlags struct {
	device, op string
	library    string
	sms        int
	inFlight   string
	neighbour  int // MiB
	save       string
	size       string
	spread     string
	batch      int
	threads    int
	result     resultFlags
	timeFlags
}

func newBenchGather() *cobra.Command {
	var f gatherFlags
	c := &cobra.Command{
		Use:   "gather",
		Short: "Measure the gather of scattered entries beside a loop of memcpy",
		Long: `Measure the gather of small entries at random places of a large pool, or their
scatter back, beside a loop of memcpy of the same shape by the same number of
threads, in alternation in one run. The figures are those of 'sluice bench'.

--device cpu is the twin of the gather kernel on the CPU, on huge pages where the
kernel has them; memcpy works on ordinary pages, memcpy-huge on huge ones.

--device cuda moves between pinned memory of the host and a card's, 64 MiB at a
time over a pool of 4 GiB unless told otherwise, by the variant that is fastest
there. Beside it stand the copy engine with one large copy of as many bytes, to the
card and back, and every variant: async and rows are kernels, loop has the copy
engine move each entry, staged has the CPU gather. --sms 0 leaves all
multiprocessors to others. Further rows are 2,048 and 200 entries alone, also
as a replayed graph. t0-us and slope are of a line through several sizes;
step-p99-us is how long a decode-like kernel takes, alone and beside. It needs NVIDIA's
driver; without one it says what is missing.`,
		Example: `  sluice bench gather
  sluice bench gather --op scatter --spread 4GiB --json
  sluice bench gather --device cuda --sms 2 --save gather.json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchGather(c, &f) },
	}
	s := c.Flags()
	s.StringVar(&f.device, "device", cpuDevice, "what gathers: cpu or cuda")
	s.StringVar(&f.library, "library", "", "of --device cuda alone: a path of libcuda; without "+
		"it the system's")
	s.IntVar(&f.sms, "sms", 4, "of --device cuda alone: multiprocessors that a kernel may "+
		"take; 0: none")
	s.StringVar(&f.inFlight, "in-flight", "", "of --device cuda alone, instead of --sms: bytes "+
		"that a kernel may have under way, such as 64KiB")
	s.IntVar(&f.neighbour, "neighbour", 64, "of --device cuda alone: MiB that each step of the "+
		"decode-like kernel reads; 0: no such kernel")
	s.StringVar(&f.op, "op", bench.GatherOp, bench.GatherOp+" or "+bench.ScatterOp)
	s.StringVar(&f.size, "size", "656", "bytes of an entry, a multiple of 4")
	s.IntVar(&f.batch, "batch", 0, "entries of an operation; 0: 2048, or 64 MiB of them on a card")
	s.StringVar(&f.spread, "spread", "", "size of the pool, at least twice what is moved; "+
		"without it 1GiB, or 4GiB on a card")
	s.IntVar(&f.threads, "threads", 1, "goroutines that gather, each a batch of its own")
	s.StringVar(&f.save, "save", "", "also write JSON to that file")
	f.registerTotal(c, "time to measure")
	f.result.register(c)
	return c
}

func runBenchGather(c *cobra.Command, f *gatherFlags) error {
	write, err := f.result.printer()
	if err != nil {
		return err
	}
	if f.device == cpuDevice {
		if err := refuse(c, "--%s is of --device cuda alone", "library", "sms", "in-flight",
			"neighbour"); err != nil {
			return err
		}
	}
	if err := checkSave(f.save); err != nil {
		return err
	}
	shape, err := f.shape()
	if err != nil {
		return err
	}
	if err := f.fits(&shape, hostmem.Limits().Available); err != nil {
		return err
	}
	m := startMeasuring(c, f.time())
	list, err := f.measure(c, shape)
	var layout *cuda.LayoutError
	if errors.As(err, &layout) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	if f.save != "" {
		if err := saveJSON(f.save, list); err != nil {
			return err
		}
	}
	return m.print(write, list, nil)
}

// fits reports whether there is memory: a card's run needs one pool, without those of baselines.
func (f *gatherFlags) fits(s *bench.Shape, available uint64) error {
	if f.device == cpuDevice {
		return fits([]bench.Shape{*s}, available, false, "a smaller --size, --batch or --spread, "+
			"or fewer --threads")
	}
	if need := s.ScatteredBytes(); available > 0 && need > available {
		return fmt.Errorf("the pool needs %s, %s are available: use a smaller --spread",
			bench.RoundSize(need), bench.RoundSize(available))
	}
	return nil
}

func (f *gatherFlags) measure(c *cobra.Command, shape bench.Shape) ([]bench.Result, error) {
	total := f.time()
	bar := newProgress(c.ErrOrStderr(), 1000, "bench gather")
	defer bar.clear()
	o := bench.Options{Time: total, Rounds: f.rounds,
		Progress: func(d time.Duration) { bar.set(min(int64(1000*d/total), 999)) }}
	if f.device == cpuDevice {
		r, err := interruptible(c.Context(), func() (bench.Result, error) {
			return bench.Gather(c.Context(), shape, o)
		})
		return []bench.Result{r}, err
	}
	budget, err := f.budget()
	if err != nil {
		return nil, err
	}
	which := cuda.DeviceOptions{Library: f.library}
	d, err := cuda.OpenDevice(which)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	card := bench.Card{Device: d, Budget: budget}
	if f.neighbour > 0 {
		if card.Neighbour, err = cuda.OpenNeighbour(which, uint64(f.neighbour)<<20); err != nil {
			return nil, err
		}
		defer card.Neighbour.Close()
	}
	return bench.GatherOnDevice(c.Context(), card, shape, o)
}

// budget is --sms, or --in-flight.
func (f *gatherFlags) budget() (cuda.Budget, error) {
	if f.inFlight == "" {
		return cuda.Budget{SMs: f.sms}, nil
	}
	n, err := bench.ParseSize(f.inFlight)
	if err != nil {
		return cuda.Budget{}, &usageError{err}
	}
	return cuda.Budget{InFlight: n}, nil
}

// neighbourMax is more than any cache of a card holds.
const neighbourMax = 1024 // MiB

// trialBytes is what a card moves at a time, where --batch does not say.
const trialBytes = 64 << 20

// defaults fills in what depends on the device.
func (f *gatherFlags) defaults(size uint64) {
	onCard := f.device == cudaDevice
	if f.spread == "" {
		f.spread = "1GiB"
		if onCard {
			f.spread = "4GiB"
		}
	}
	if f.batch == 0 {
		f.batch = 2048
		if onCard {
			f.batch = int(min(max(trialBytes/max(size, 1), 1), bench.BatchMax))
		}
	}
}

// shape reads the flags; what is wrong with them is a usage error.
func (f *gatherFlags) shape() (bench.Shape, error) {
	ops := map[string]engine.Op{bench.GatherOp: engine.Read, bench.ScatterOp: engine.Write}
	op, ok := ops[f.op]
	switch {
	case f.device != cpuDevice && f.device != cudaDevice:
		return bench.Shape{}, usagef("unknown device %q: there are %s, %s", f.device, cpuDevice,
			cudaDevice)
	case f.device == cudaDevice && f.threads != 1:
		return bench.Shape{}, usagef("--threads %d: a card gathers for one at a time", f.threads)
	case f.device == cudaDevice && f.sms < 0:
		return bench.Shape{}, usagef("--sms %d: want 0 or more", f.sms)
	case f.neighbour < 0 || f.neighbour > neighbourMax:
		return bench.Shape{}, usagef("--neighbour %d: want 0 to %d", f.neighbour, neighbourMax)
	case f.batch < 0:
		return bench.Shape{}, usagef("--batch %d: want 1 or more, or 0 for the default", f.batch)
	case !ok:
		return bench.Shape{}, usagef("unknown operation %q: there are %s, %s", f.op, bench.GatherOp,
			bench.ScatterOp)
	}
	if err := f.checkTotal(); err != nil {
		return bench.Shape{}, err
	}
	size, err := bench.ParseSize(f.size)
	if err != nil {
		return bench.Shape{}, &usageError{err}
	}
	f.defaults(size)
	spread, err := bench.ParseSize(f.spread)
	if err != nil {
		return bench.Shape{}, &usageError{err}
	}
	s := bench.Shape{Op: op, Size: size, Batch: f.batch, Pages: true, Spread: spread,
		Threads: f.threads}
	if err := s.Check(); err != nil {
		return bench.Shape{}, &usageError{err}
	}
	return s, nil
}
