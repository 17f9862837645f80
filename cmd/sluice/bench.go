// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/bench/pair"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// benchFlags are the words of the command line.
type benchFlags struct {
	backend, op, size string
	spread, memory    string
	batch, threads    int
	pages, gather     bool
	sweep, notify     bool
	table, hot        bool
	plot              string // file of a picture
	result            resultFlags
	timeFlags
	workload  workloadFlags
	reshape   reshapeFlags
	network   networkFlags
	perftest  *bench.PerfTest  // made when first needed
	verbstest *bench.VerbsTest // the same

	left func(backend string, why error) // told of backends that do not work here
}

func (f *benchFlags) openOptions() openOptions {
	return openOptions{threads: f.threads, ucx: f.network.ucx, rdma: f.network.rdma,
		tcp: f.network.tcp}
}

// benchLong stands before groupsHelp.
const benchLong = `Measure transfers between two processes, beside memcpy of the same shape by the
same number of threads, in alternation in one run. The transfers use what the
backend reaches best, its own memory if it has such; --memory host has them use
host memory all the same. memcpy works on ordinary pages, memcpy-huge on host
memory with huge pages. All figures are medians of rounds; p50 and p99 are of one
batch, from post to completion. Each shape takes --seconds, and as long again where a
program is measured beside it. An interrupt prints the rows that were measured.

With --notify: the way of a small write with a message behind it, to a goroutine
parked on a channel (one way), and between two that spin (round trip).

Beside backend tcp also stand bare sockets, over as many connections of the loopback
between two buffers of one process; scattered pieces stand beside the same bytes in one run.

Beside backend ucx also stand ucx_perftest (package ucx-utils), over the same
transports, with messages of the same size and as many under way as a batch has
pieces, and a bare loop in C over ucp_put_nbx or ucp_get_nbx between the same two
processes. --table measures all of that over memory and over TCP.

Beside backend rdma stand ib_write_bw, ib_read_bw and ib_write_lat (package
perftest) between the same two ports, with as many requests under way. With
--gather also the same transfers with one request for each piece. --table measures
all of that, and the share of each rail.

--workload takes the shapes that others measure: the sweeps of nixlbench, or what a
prompt of --tokens is in the KV cache of a model, as kvbench has it. By block, a piece
is all layers of a block; by layer, each part of one layer of a block; by token, of a
token. /tpN is one of N tensor-parallel ranks, /ppN the fullest of N pipeline stages. Without
--backend it measures over each that moves bytes between processes and works here.
handover-ms is the whole prompt: one operation, or one for each layer.

--workload reshape hands the KV cache of one request of --model over from one group of ranks
to another, by the patterns that sluice explain --prefill --decode describes, in this process
with memory of both groups. Digests of all cells are compared, and beside it stands a loop that
copies the same cells between the same memories by as many threads. It takes one backend.

`

func newBench() *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure transfers between two processes beside memcpy of the same shape",
		Long:  benchLong + groupsHelp,
		Example: `  sluice bench --backend shm --op write --size 1MiB --batch 16 --threads 2
  sluice bench --backend shm --op write --size 656 --batch 2048 --pages --json
  sluice bench --backend shm --sweep --format gobench | tee new.txt
  sluice bench --backend tcp --sweep --plot tcp.svg
  sluice bench --backend ucx --transports tcp --devices lo --size 64KiB --batch 32 --hot
  sluice bench --backend ucx --table
  sluice bench --workload list
  sluice bench --workload llama3.1-70b/layer/tp8/pp2 --tokens 8192 --json
  sluice bench --workload reshape --model gpt-oss-120b --prefill tp=8 --decode tp=4,layout=hnd
  sluice bench --backend rdma --devices mlx5_0 --peer-devices mlx5_1 --table`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBench(c, &f) },
	}
	f.register(c)
	c.AddCommand(newBenchAll(), newBenchCopy(), newBenchGather(), newBenchPosix(), newBenchGDS())
	return c
}

func (f *benchFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&f.backend, "backend", "shm", "what moves the bytes: "+benchNames())
	s.StringVar(&f.op, "op", "write", "write or read")
	s.StringVar(&f.size, "size", "1MiB", "bytes of a piece, such as 656 or 64KiB")
	s.IntVar(&f.batch, "batch", 16, "pieces of an operation")
	s.BoolVar(&f.pages, "pages", false, "pieces at random places of a large memory, as one pattern")
	s.BoolVar(&f.gather, "gather", false, "with --pages: the random places are this side's, and "+
		"the peer's are one run")
	s.StringVar(&f.spread, "spread", "1GiB", "size of the memory that --pages, --table and "+
		"--workload draw places from; at least twice what is moved")
	s.StringVar(&f.memory, "memory", string(bench.BackendMemory), "what is moved: backend (its "+
		"own memory, if it has such) or host")
	s.IntVar(&f.threads, "threads", 1, "goroutines that post, and workers that copy")
	s.BoolVar(&f.sweep, "sweep", false, "measure sizes from 64 B to 16 MiB instead of --size "+
		"and --batch")
	s.StringVar(&f.plot, "plot", "", "with --sweep: draw a picture, FILE.svg or FILE.png, by "+
		plotPython+" with matplotlib")
	s.BoolVar(&f.notify, "notify", false, "measure notifications instead of bandwidth")
	s.BoolVar(&f.hot, "hot", false, "all pieces at one place on each side, which stays "+
		"in the caches")
	s.BoolVar(&f.table, "table", false, "measure what UCX is compared by, beside ucx_perftest "+
		"and a bare loop over UCX; of backend rdma: what verbs are, beside perftest")
	f.workload.register(c)
	f.reshape.register(c)
	f.network.register(c)
	f.network.rdma.registerPeers(c)
	f.registerTotal(c, "time to measure each shape")
	f.result.register(c)
}

func runBench(c *cobra.Command, f *benchFlags) error {
	write, err := f.result.printer()
	if err != nil {
		return err
	}
	if f.backend != auto {
		if _, err := benchMaker(f.backend); err != nil {
			return err
		}
	}
	if err := f.checkWorkload(c); err != nil {
		return err
	}
	if f.workload.name != "" {
		return runWorkload(c, f, write)
	}
	if err := f.checkShapes(c); err != nil {
		return err
	}
	shapes, err := f.shapes()
	if err != nil {
		return err
	}
	if err := f.settle(); err != nil {
		return err
	}
	if err := fits(shapes, hostmem.Limits().Available, f.beside(), f.smaller()); err != nil {
		return err
	}
	if err := f.network.examine(f.backend); err != nil {
		return err
	}
	if err := f.checkPlot(c); err != nil {
		return err
	}
	m := startMeasuring(c, f.about(len(shapes)))
	results, err := f.results(c, shapes)
	if err = m.print(write, results, err); err != nil {
		return err
	}
	return f.draw(c.Context(), results)
}

// checkShapes refuses flags that the way of measuring decides itself.
func (f *benchFlags) checkShapes(c *cobra.Command) error {
	var err error
	shape := []string{"op", "size", "batch", "threads"}
	switch {
	case f.table:
		err = refuse(c, "--table has shapes of its own: it takes no --%s",
			append(shape, "sweep", "pages", "gather", "hot", "notify", "plot")...)
	case f.notify:
		err = refuse(c, "--notify measures small messages, one at a time: it takes no --%s",
			append(shape, "sweep", "pages", "gather", "hot", "plot")...)
	case f.sweep:
		err = refuse(c, "--sweep has sizes of its own: it takes no --%s", "size", "batch")
	}
	if err != nil {
		return err
	}
	if c.Flags().Changed("spread") && !f.pages && !f.table {
		return usagef("--spread is the memory that --pages and --table draw from: say one of them")
	}
	if (f.table || f.notify) && f.inProcess() {
		return usagef("--table and --notify measure between two processes: backend %q stays in one",
			f.backend)
	}
	return nil
}

// fewerThreads is the cure where no other flag decides how much memory is needed.
const fewerThreads = "fewer --threads"

// smaller tells a user by which flags a measurement takes less memory.
func (f *benchFlags) smaller() string {
	switch {
	case f.table:
		return "a smaller --spread"
	case f.sweep && f.pages:
		return "a smaller --spread, or " + fewerThreads
	case f.sweep:
		return fewerThreads
	case f.pages:
		return "a smaller --size, --batch or --spread, or " + fewerThreads
	}
	return "a smaller --size or --batch, or " + fewerThreads
}

// results measures what was asked for.
func (f *benchFlags) results(c *cobra.Command, shapes []bench.Shape) ([]bench.Result, error) {
	bar := func(n int) *progress {
		return newProgress(c.ErrOrStderr(), int64(n)*1000, "bench "+f.backend)
	}
	switch {
	case f.notify:
		return f.measureMessages(c.Context(), notifyBytes, true)
	case f.table:
		return f.measureTable(c.Context(), func() *progress { return bar(len(shapes)) })
	}
	b := bar(len(shapes))
	defer b.clear()
	return f.measure(c.Context(), shapes, b)
}

// settle refuses what concerns another backend. The table has UCX beside any but rdma.
func (f *benchFlags) settle() error {
	if f.table && f.network.ucx.workers == 0 && f.backend != rdmaName {
		return f.network.settleBeside(f.backend)
	}
	return f.network.settle(f.backend)
}

// sweepBatchBytes is what a batch of the sweep moves, where that is more than
// one piece and not more than sweepBatchMax.
const (
	sweepBatchBytes = 1 << 20 // 1 MiB
	sweepBatchMax   = 256
)

// shapes reads the flags; what is wrong with them is a usage error.
func (f *benchFlags) shapes() ([]bench.Shape, error) {
	ops := map[string]engine.Op{"write": engine.Write, "read": engine.Read}
	op, ok := ops[f.op]
	if !ok {
		return nil, usagef("unknown operation %q: there are write, read", f.op)
	}
	size, err := bench.ParseSize(f.size)
	if err != nil {
		return nil, &usageError{err}
	}
	spread, err := bench.ParseSize(f.spread)
	if err != nil {
		return nil, &usageError{err}
	}
	switch {
	case f.memory != string(bench.BackendMemory) && f.memory != string(bench.HostMemory):
		return nil, usagef("unknown memory %q: there are %s, %s", f.memory, bench.BackendMemory,
			bench.HostMemory)
	case f.gather && !f.pages:
		return nil, usagef("--gather says where pages lie: it takes --pages")
	case f.pages && f.hot:
		return nil, usagef("--hot puts large pieces at one place: it takes no --pages")
	}
	if err := f.checkTotal(); err != nil {
		return nil, err
	}
	if f.table && f.backend == rdmaName {
		return f.verbsShapes(), nil
	}
	if f.table {
		return tableShapes(spread), nil
	}
	list := []bench.Shape{{Op: op, Size: size, Batch: f.batch, Pages: f.pages, Gather: f.gather,
		Spread: spread, Threads: f.threads, Hot: f.hot}}
	if f.sweep {
		list = nil
		for size := uint64(64); size <= 16<<20; size *= 4 {
			batch := int(min(max(sweepBatchBytes/size, 1), sweepBatchMax))
			list = append(list, bench.Shape{Op: op, Size: size, Batch: batch, Pages: f.pages,
				Gather: f.gather, Spread: spread, Threads: f.threads, Hot: f.hot})
		}
	}
	for i := range list {
		if err := list[i].Check(); err != nil {
			return nil, &usageError{err}
		}
	}
	return list, nil
}

// largest is the memory that the two ends need for all shapes.
func largest(shapes []bench.Shape) (local, remote uint64) {
	for i := range shapes {
		local = max(local, shapes[i].LocalBytes())
		remote = max(remote, shapes[i].RemoteBytes())
	}
	return local, remote
}

// fits tells what the machine cannot hold before the kernel ends a process for it.
// With loop there are two more ends, of the bare loop. smaller tells what to do about it.
func fits(shapes []bench.Shape, available uint64, loop bool, smaller string) error {
	for i := range shapes {
		need := shapes[i].MemoryBytes()
		if loop {
			need += shapes[i].LocalBytes() + shapes[i].RemoteBytes()
		}
		if available > 0 && need > available {
			return fmt.Errorf("the two ends and the baselines need %s, %s are available: use "+
				"%s", bench.RoundSize(need), bench.RoundSize(available), smaller)
		}
	}
	return nil
}

// measure runs the shapes one after the other over one link. With an error it returns those that
// were measured before.
func (f *benchFlags) measure(ctx context.Context, shapes []bench.Shape, bar *progress) (
	[]bench.Result, error) {
	link, closeLink, err := f.open(ctx, shapes)
	if err != nil {
		return nil, err
	}
	defer closeLink()
	ctx, unwatch := link.Watch(ctx)
	defer unwatch()
	total := f.time()
	var results []bench.Result
	for i, s := range shapes {
		o := bench.Options{Time: total, Rounds: f.rounds, Rivals: f.rivals(s, link), Bare: f.table}
		o.Progress = func(d time.Duration) {
			bar.set(int64(i)*1000 + min(int64(1000*d/total), 999))
		}
		before := link.Rails()
		r, err := bench.Run(ctx, link.Link, s, o)
		if err != nil {
			return results, link.Explain(ctx, err)
		}
		link.addCounts(&r, before)
		if i == 0 {
			r.Notes = append(r.Notes, link.Notes...)
		}
		if len(o.Rivals) > 0 && !s.Hot && f.beside() {
			r.Notes = append(r.Notes, hotNote(&s))
		}
		results = append(results, r)
	}
	return results, nil
}

// inProcess says whether the backend cannot reach another process.
func (f *benchFlags) inProcess() bool {
	m, err := findMaker(f.backend, driver.InProcess)
	return err == nil && m.reach == driver.InProcess
}

// open connects the two ends: two processes, or one for backends that stay
// within it.
func (f *benchFlags) open(ctx context.Context, shapes []bench.Shape) (*benchLink, func(), error) {
	if !f.inProcess() {
		return f.dial(ctx, shapes)
	}
	list, err := openBackends(f.backend, driver.InProcess, f.openOptions())
	if err != nil {
		return nil, nil, err
	}
	local, remote := largest(shapes)
	side, link, err := bench.Loop(list, only(f.backend), local, remote, bench.Memory(f.memory))
	if err != nil {
		return nil, nil, fmt.Errorf("open one process: %w", err)
	}
	return &benchLink{Pair: &pair.Pair{Link: link}}, func() { side.Close() }, nil
}
