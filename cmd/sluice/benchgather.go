// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
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
	size       string
	spread     string
	format     string
	batch      int
	threads    int
	rounds     int
	seconds    float64
	asJSON     bool
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
--device cuda is the gather kernel between pinned memory of the host and a card's,
beside the copy engine with one large copy of as many bytes. It needs NVIDIA's
driver and has not run on a card yet; without one it says what is missing.`,
		Example: `  sluice bench gather
  sluice bench gather --op scatter --spread 4GiB --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBenchGather(c, &f) },
	}
	s := c.Flags()
	s.StringVar(&f.device, "device", cpuDevice, "what gathers: cpu or cuda")
	s.StringVar(&f.library, "library", "", "of --device cuda alone: a path of libcuda; without it the system's")
	s.IntVar(&f.sms, "sms", 4, "of --device cuda alone: multiprocessors that the kernel may take")
	s.StringVar(&f.op, "op", bench.GatherOp, bench.GatherOp+" or "+bench.ScatterOp)
	s.StringVar(&f.size, "size", "656", "bytes of an entry, a multiple of 4")
	s.IntVar(&f.batch, "batch", 2048, "entries of an operation")
	s.StringVar(&f.spread, "spread", "1GiB", "size of the pool; at least twice what is moved")
	s.IntVar(&f.threads, "threads", 1, "goroutines that gather, each a batch of its own")
	s.Float64Var(&f.seconds, "seconds", 3, "time to measure, baselines included")
	s.IntVar(&f.rounds, "rounds", 0, "measure that many rounds instead of --seconds")
	s.StringVar(&f.format, "format", "text", "text, json or gobench (for benchstat)")
	s.BoolVar(&f.asJSON, "json", false, "print JSON: the same as --format json")
	return c
}

func runBenchGather(c *cobra.Command, f *gatherFlags) error {
	if f.asJSON {
		f.format = "json"
	}
	printer, ok := printers[f.format]
	if !ok {
		return usagef("unknown format %q: there are text, json, gobench", f.format)
	}
	shape, err := f.shape()
	if err != nil {
		return err
	}
	if err := fits([]bench.Shape{shape}, hostmem.Limits().Available, false); err != nil {
		return err
	}
	r, err := f.measure(c, shape)
	var layout *cuda.LayoutError
	if errors.As(err, &layout) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	return printer(c.OutOrStdout(), []bench.Result{r})
}

func (f *gatherFlags) measure(c *cobra.Command, shape bench.Shape) (bench.Result, error) {
	total := time.Duration(f.seconds * float64(time.Second))
	bar := newProgress(c.ErrOrStderr(), 1000, "bench gather")
	defer bar.clear()
	o := bench.Options{Time: total, Rounds: f.rounds,
		Progress: func(d time.Duration) { bar.set(min(int64(1000*d/total), 999)) }}
	if f.device == cpuDevice {
		return bench.Gather(c.Context(), shape, o)
	}
	d, err := cuda.OpenDevice(cuda.DeviceOptions{Library: f.library})
	if err != nil {
		return bench.Result{}, err
	}
	defer d.Close()
	return bench.GatherOnDevice(c.Context(), d, cuda.Budget{SMs: f.sms}, shape, o)
}

// shape reads the flags; what is wrong with them is a usage error.
func (f *gatherFlags) shape() (bench.Shape, error) {
	ops := map[string]engine.Op{bench.GatherOp: engine.Read, bench.ScatterOp: engine.Write}
	op, ok := ops[f.op]
	switch {
	case f.device != cpuDevice && f.device != cudaDevice:
		return bench.Shape{}, usagef("unknown device %q: there are %s, %s", f.device, cpuDevice, cudaDevice)
	case f.device == cudaDevice && f.threads != 1:
		return bench.Shape{}, usagef("--threads %d: a card gathers for one at a time", f.threads)
	case f.device == cudaDevice && f.sms < 1:
		return bench.Shape{}, usagef("--sms %d: want 1 or more; --device cpu needs none", f.sms)
	case f.device == cpuDevice && f.library != "":
		return bench.Shape{}, usagef("--library is of --device cuda alone")
	case !ok:
		return bench.Shape{}, usagef("unknown operation %q: there are %s, %s", f.op, bench.GatherOp, bench.ScatterOp)
	case !(f.seconds > 0 && f.seconds <= secondsMax):
		return bench.Shape{}, usagef("--seconds %v: want more than 0, at most %d", f.seconds, secondsMax)
	case f.rounds < 0:
		return bench.Shape{}, usagef("--rounds %d: want 1 or more, or 0 for --seconds", f.rounds)
	}
	size, err := bench.ParseSize(f.size)
	if err != nil {
		return bench.Shape{}, &usageError{err}
	}
	spread, err := bench.ParseSize(f.spread)
	if err != nil {
		return bench.Shape{}, &usageError{err}
	}
	s := bench.Shape{Op: op, Size: size, Batch: f.batch, Pages: true, Spread: spread, Threads: f.threads}
	if err := s.Check(); err != nil {
		return bench.Shape{}, &usageError{err}
	}
	return s, nil
}
