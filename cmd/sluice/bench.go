// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// benchFlags are the words of the command line.
type benchFlags struct {
	lanes, backends, beside []string
	op, size, spread        string
	batch, threads          int
	pages, gather, hot      bool
	seconds                 float64
	workload, dir           string
	json, peers             string
}

const benchLong = `Measure transfers beside a baseline of the same shape, in alternation in one run. A
participant is a program: ours is one or two processes with an engine, memcpy one that
copies the same pieces between two memories of its own, by as many threads. All figures
are medians of rounds; p50 and p99 are of one operation, from post to completion. The
ratio is our rate over the baseline's: above 1 sluice is faster. Bytes are stamped and
compared before they are measured. A participant that fails, hangs or has no library here
is a row with the reason. An interrupt prints the rows that were measured.

A lane is what lies between the two memories:

  process   two memories of one process (mem), beside memcpy; sluice-sparse is a pool of hot
            entries, in which a match is a lookup
  host      two processes of this host (shm), beside memcpy
  tcp       the loopback (tcp without TLS unless it has options, ucx), beside bare sockets
  rdma      a NIC to itself (rdma), beside perftest
  file      a file of --dir (posix), beside fio
  weights   safetensors files of --dir into memory, beside a program that maps and copies
  gpu       gather of scattered entries by a card, beside its copy engine
  gpufile   a card's memory and a file of --dir by cuFile, beside the engine's own chain
  cache     the next three, in which a read is a Load, a write a Store, and a match looks for
            keys; by a cache that verifies each load, or the first of a block
  cache-shm   a cache of another process of this host (shm), beside memcpy and Redis
  cache-tcp   the same over the loopback (tcp without TLS), beside bare sockets and Redis
  cache-disk  blocks that are on a disk alone, in a file of --dir, beside fio

Without --op, --size and the like a lane has a few shapes of its own. --workload all has
all by which engines are compared, and what idle ends take (up to 20 minutes; quick: 8).`

func newBench() *cobra.Command {
	var f benchFlags
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure transfers beside a baseline of the same shape",
		Long:  benchLong,
		Example: `  sluice bench
  sluice bench --size 656 --batch 2048 --pages --op read --json
  sluice bench --backend shm --size 1MiB --batch 16 --threads 2 --beside memcpy,memcpy-huge
  sluice bench --backend tcp --backend ucx --beside sockets,ucx_perftest
  sluice bench --lane file --dir /mnt/nvme`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runBench(c, &f) },
	}
	s := c.Flags()
	s.StringSliceVar(&f.lanes, "lane", nil, "what lies between the memories, `LANE,...`; without "+
		"it the lane of --backend, or host")
	s.StringArrayVar(&f.backends, "backend", nil, "what moves the bytes, "+
		"`NAME[:OPTION=VALUE,...]`; may be given several times; without it the lane's first")
	s.StringVar(&f.op, "op", bench.OpWrite, "`OP` that is posted: write, read, or durable, a "+
		"write of lane file that is done once the disk has it")
	s.StringVar(&f.size, "size", "1MiB", "`SIZE` of a piece, such as 656 or 64KiB")
	s.IntVar(&f.batch, "batch", 16, "pieces of an operation")
	s.BoolVar(&f.pages, "pages", false, "the peer's pieces lie at random places of --spread")
	s.BoolVar(&f.gather, "gather", false, "this side's pieces lie at random places of "+
		"--spread, and the peer's are one run")
	s.BoolVar(&f.hot, "hot", false, "all pieces lie at one place, which stays in the caches")
	s.StringVar(&f.spread, "spread", "1GiB", "`SIZE` of the memory or file that --pages and "+
		"--gather draw places from")
	s.IntVar(&f.threads, "threads", 1, "goroutines that post, and workers that copy")
	s.Float64Var(&f.seconds, "seconds", 0, "`SECONDS` for which each participant measures each "+
		"shape; 0 means 1, of --workload all 0.5, of quick 0.3")
	s.StringSliceVar(&f.beside, "beside", nil, "participants to measure beside ours, `NAME,...`; "+
		"none: ours alone; without it the lane's baseline")
	s.StringVar(&f.workload, "workload", "", "shapes by `NAME`: all or quick")
	s.StringVar(&f.dir, "dir", os.TempDir(), "`DIR` on the disk that lanes file, weights, "+
		"gpufile and cache-disk measure: files there have no names, or end with the run")
	s.StringVar(&f.json, "json", "", "print JSON; --json=`FILE`: write it there, and print text")
	s.Lookup("json").NoOptDefVal = "-"
	s.StringVar(&f.peers, "peers", "", "`DIR` with NIXL, Mooncake and ours from Python, as "+
		"bench/setup.sh DIR makes it: they are measured, too, and every baseline of the lane")
	c.AddCommand(newBenchDriver())
	return c
}

// newCacheBench is newBench of the lanes of a cache.
func newCacheBench() *cobra.Command {
	c := newBench()
	c.Short = "Measure Match, Load and Store of a cache beside a baseline of the same shape"
	_, about, _ := strings.Cut(benchLong, "  cache     ")
	c.Long = c.Short + ".\nIt is sluice bench, whose help says what the figures are, of the " +
		"lanes of a cache:\n\n  cache     " + about
	c.Example = "  sluice cache bench\n  sluice cache bench --lane cache-disk --dir /mnt/nvme"
	lane := c.Flags().Lookup("lane")
	lane.Usage = "cache, cache-shm, cache-tcp or cache-disk, `LANE,...`; without it cache"
	c.PreRunE = func(c *cobra.Command, _ []string) error {
		if !given(c, "lane") {
			return c.Flags().Set("lane", allCaches)
		}
		for _, name := range lane.Value.(pflag.SliceValue).GetSlice() {
			if !strings.HasPrefix(name, allCaches) {
				return usagef("--lane %s: it is of sluice bench", name)
			}
		}
		return nil
	}
	return c
}

// runBench finds what is wrong with the command line before anything is started.
func runBench(c *cobra.Command, f *benchFlags) error {
	lanes, err := f.laneList()
	if err != nil {
		return err
	}
	o := bench.Options{Idle: 200 * time.Millisecond,
		Shapes: map[bench.Lane][]bench.Shape{}, Revision: readVersion()}
	var list []bench.Participant
	var about time.Duration
	if err := f.times(&o); err != nil {
		return err
	}
	if err := f.refused(c, lanes, o.Idles); err != nil {
		return err
	}
	for _, lane := range lanes {
		entrants, err := f.participants(lane)
		if err != nil {
			return err
		}
		if o.Idles {
			list = append(list, entrants...)
			continue
		}
		shapes, err := f.shapes(c, lane)
		if err != nil {
			return err
		}
		if err := f.fits(entrants, shapes); err != nil {
			return err
		}
		o.Shapes[lane] = shapes
		list = append(list, entrants...)
		each := time.Duration(o.Rounds)*o.Slice + o.Slice/2
		about += time.Duration(len(shapes)*len(entrants))*each + time.Second
	}
	takes := "about"
	if !o.Idles {
		o.Limit = 10*about + 5*time.Minute // operations may be slow
	} else {
		takes, o.Limit = "up to", 20*time.Minute
		if o.Quick {
			o.Limit = 8 * time.Minute
		}
		about = o.Limit
	}
	if about >= saidFrom {
		fmt.Fprintf(c.ErrOrStderr(), "bench takes %s %v; Ctrl-C prints what was measured until "+
			"then\n", takes, about.Round(time.Second))
	}
	begun := time.Now()
	bar := newProgress(c.ErrOrStderr(), about.Milliseconds(), "bench")
	o.Progress = func(string) { bar.set(min(time.Since(begun), about).Milliseconds()) }
	report, err := bench.Run(c.Context(), list, o)
	bar.clear()
	if len(report.Rows) > 0 {
		err = errors.Join(err, f.print(c.OutOrStdout(), report))
	} else if err != nil {
		fmt.Fprintln(c.ErrOrStderr(), "no shape had been measured")
	}
	if about >= saidFrom && report.Machine.Note != "" {
		fmt.Fprintln(c.ErrOrStderr(), report.Machine.Note)
	}
	if err != nil {
		return err
	}
	return failed(report)
}

// saidFrom is how long a measurement takes at least that says so before it begins.
const saidFrom = 5 * time.Second

// failed is the error of a run in which ours measured nothing, or delivered wrong bytes once.
func failed(r *bench.Report) error {
	var reason error
	measured := false
	for i := range r.Rows {
		row := &r.Rows[i]
		switch {
		case row.Ours && row.Wrong:
			return fmt.Errorf("%s: %s", row.Peer, row.Reason)
		case !row.Ours || row.Kind != bench.KindTransfer:
		case row.Reason == "":
			measured = true
		case reason == nil:
			reason = fmt.Errorf("%s measured nothing: %s", row.Peer, row.Reason)
		}
	}
	if measured {
		return nil
	}
	return reason
}

// print writes the report as asked for.
func (f *benchFlags) print(stdout io.Writer, r *bench.Report) error {
	switch f.json {
	case "":
		return r.Text(stdout)
	case "-":
		return r.Write(stdout)
	}
	file, err := os.Create(f.json)
	if err != nil { // what took minutes to measure is shown all the same
		return errors.Join(r.Text(stdout), err)
	}
	return errors.Join(r.Write(file), file.Close(), r.Text(stdout))
}

// refused finds flags that the lanes or the workload have no use for, and values that are none.
func (f *benchFlags) refused(c *cobra.Command, lanes []bench.Lane, specials bool) error {
	if specials {
		if err := refuse(c, "--workload "+f.workload+" has shapes of its own: it takes no --%s",
			"size", "batch", "op", "pages", "gather", "hot", "spread", "threads"); err != nil {
			return err
		}
	}
	on := func(with ...bench.Lane) bool {
		return slices.ContainsFunc(lanes, func(l bench.Lane) bool {
			return slices.Contains(with, l)
		})
	}
	if !on(bench.File, bench.Weights, bench.GPUFile, bench.CacheDisk) {
		if err := refuse(c, "--%s is of lanes file, weights, gpufile and cache-disk",
			"dir"); err != nil {
			return err
		}
	}
	switch {
	case f.backends != nil && on(bench.Weights):
		return usagef("--backend: lane weights reads by what suits a file")
	case f.threads < 1:
		return usagef("--threads %d: want 1 to 64", f.threads)
	case f.op == bench.OpDurable && !on(bench.File, bench.GPUFile):
		return usagef("--op durable is of lane file: no disk has to have what goes to memory")
	case f.peers == "":
		return nil
	}
	if _, err := os.Stat(filepath.Join(f.peers, "scripts")); err != nil {
		return usagef("--peers %s: %w: make it by bench/setup.sh %[1]s", f.peers, err)
	}
	return nil
}

func laneNames() (names []string) {
	for _, l := range bench.Lanes {
		names = append(names, string(l))
	}
	return append(names, allCaches)
}

// allCaches names all lanes of a cache.
const allCaches = "cache"

// laneList are the lanes of the command line.
func (f *benchFlags) laneList() (list []bench.Lane, err error) {
	for _, name := range f.lanes {
		if name == allCaches {
			list = append(list, bench.CacheLanes...)
			continue
		}
		if !slices.Contains(bench.Lanes, bench.Lane(name)) {
			return nil, usagef("unknown lane %q: there are %s", name,
				strings.Join(laneNames(), ", "))
		}
		list = append(list, bench.Lane(name))
	}
	for _, backend := range f.backends {
		name, _, _ := strings.Cut(backend, ":")
		if name == auto {
			return nil, usagef("--backend %s: leave --backend out for the lane's first", backend)
		}
		lane, err := bench.LaneOf(backend)
		if err != nil {
			return nil, &usageError{err}
		}
		if len(list) == 1 && f.lanes != nil { // which of its backends it is
			lane = list[0]
			if there := bench.BackendsOf(lane); !slices.Contains(there, name) {
				return nil, usagef("--backend %s: lane %s takes %s", backend, lane,
					strings.Join(there, " or "))
			}
		}
		if err := byname.Check(backend); err != nil {
			return nil, &usageError{fmt.Errorf("--backend %s: %w", backend, err)}
		}
		if f.lanes == nil && !slices.Contains(list, lane) {
			list = append(list, lane)
		}
	}
	if len(list) > 1 && f.backends != nil {
		return nil, usagef("--backend is of one lane, and there are %d: say which by --lane",
			len(list))
	}
	if list == nil {
		list = []bench.Lane{bench.Host}
	}
	return list, nil
}

// times says for how long each shape is measured, and whether all there is is compared.
func (f *benchFlags) times(o *bench.Options) error {
	o.Quick = f.workload == "quick"
	o.Idles = o.Quick || f.workload == "all"
	if f.workload != "" && !o.Idles {
		return usagef("--workload %q: there are all and quick", f.workload)
	}
	o.Rounds = 5
	seconds := 1.0
	switch {
	case math.IsNaN(f.seconds) || f.seconds < 0 || f.seconds > 3600:
		return usagef("--seconds %v: want 0 to 3600", f.seconds)
	case f.seconds > 0:
		seconds = f.seconds
	case o.Quick:
		o.Rounds, seconds = 3, 0.3
	case o.Idles:
		seconds = 0.5
	}
	if o.Idles {
		o.Idle = 0
	}
	o.Slice = time.Duration(seconds / float64(o.Rounds) * float64(time.Second))
	return nil
}

// participants are ours, and what was asked for beside them.
func (f *benchFlags) participants(lane bench.Lane) ([]bench.Participant, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	setup := bench.Setup{Sluice: self, Backends: f.backends, Folder: f.dir}
	if f.peers != "" {
		setup.Scripts = filepath.Join(f.peers, "scripts")
		setup.Python = func(peer string) string {
			return filepath.Join(f.peers, peer, "bin", "python")
		}
	}
	all := bench.Participants(lane, setup)
	ours := all[:max(len(f.backends), 1)]
	rest := all[len(ours):]
	base := slices.IndexFunc(rest, func(p bench.Participant) bool { return p.Yardstick })
	switch {
	case f.beside == nil && (f.peers != "" || slices.Contains(bench.CacheLanes, lane)):
		return all, nil
	case f.beside == nil:
		return append(ours, rest[base]), nil
	case slices.Equal(f.beside, []string{"none"}):
		return ours, nil
	}
	list := slices.Clone(ours)
	for _, name := range f.beside {
		i := slices.IndexFunc(rest, func(p bench.Participant) bool { return p.Name == name })
		if i < 0 {
			var names []string
			for i := range rest {
				names = append(names, rest[i].Name)
			}
			return nil, usagef("--beside %s: on lane %s there are %s", name, lane,
				strings.Join(names, ", "))
		}
		list = append(list, rest[i])
	}
	return list, nil
}

// shapes returns the shapes of the command line, or those of the lane if it names none.
func (f *benchFlags) shapes(c *cobra.Command, lane bench.Lane) ([]bench.Shape, error) {
	base := bench.Shape{Op: f.op, Batch: f.batch, Where: bench.Shuffled, Threads: f.threads}
	var err error
	if base.Size, err = figures.ParseSize(f.size); err != nil {
		return nil, usagef("--size: %w", err)
	}
	if base.Spread, err = figures.ParseSize(f.spread); err != nil {
		return nil, usagef("--spread: %w", err)
	}
	switch where := []bool{f.pages, f.gather, f.hot}; {
	case len(slices.DeleteFunc(slices.Clone(where), func(b bool) bool { return !b })) > 1:
		return nil, usagef("--pages, --gather and --hot say where pieces lie: want one of them")
	case f.pages:
		base.Where = bench.Pages
	case f.gather:
		base.Where = bench.Gathered
	case f.hot:
		base.Where = bench.Hot
	}
	if base.Where == bench.Shuffled {
		if err := refuse(c, "--%s is the memory of --pages and --gather: say one of them",
			"spread"); err != nil {
			return nil, err
		}
	}
	if err := base.Check(); err != nil {
		return nil, &usageError{err}
	}
	own := []string{"size", "batch", "pages", "gather", "hot"}
	if lane == bench.Weights {
		if err := refuse(c, "lane "+string(lane)+" takes no --%s", append(own, "op", "spread",
			"threads")...); err != nil {
			return nil, err
		}
	}
	own = append(own, "op", "spread")
	if slices.ContainsFunc(own, func(name string) bool { return given(c, name) }) {
		return []bench.Shape{base}, nil
	}
	list := bench.LaneShapes(lane)
	for i := range list {
		list[i].Threads = f.threads
	}
	return list, nil
}

// fits returns an error if the machine has not enough memory or disk for the participants.
// Otherwise the kernel might end a process for lack of memory, or the disk be full.
func (f *benchFlags) fits(list []bench.Participant, shapes []bench.Shape) error {
	memory, disk := bench.Needs(list, shapes)
	if have := hostmem.Limits().Available; have > 0 && memory > have {
		return fmt.Errorf("the participants need %s, %s are available: use a smaller --size, "+
			"--batch or --spread, fewer --threads, or fewer participants",
			figures.RoundSize(memory), figures.RoundSize(have))
	}
	if disk == 0 {
		return nil
	}
	var room unix.Statfs_t
	if err := unix.Statfs(f.dir, &room); err != nil {
		return fmt.Errorf("look at --dir %s: %w", f.dir, err)
	}
	if free := room.Bavail * uint64(room.Bsize); free < disk+disk/16 {
		return fmt.Errorf("%s has room for %s, and %s are to be written: choose another --dir, or "+
			"a smaller --spread", f.dir, figures.RoundSize(free), figures.RoundSize(disk))
	}
	return nil
}
