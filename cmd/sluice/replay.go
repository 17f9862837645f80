// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
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

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/replay"
)

// replayFlags are the words of the command line.
type replayFlags struct {
	trace, model, pool   string
	backend, peerBackend backendSpec
	requests, threads    int
	speed, abortRate     float64
	faults, faultSide    string
	seed                 uint64
	timeout              time.Duration
	overlap, asJSON      bool
	offload              string
	groups               replayGroupsFlags
	exactly              bool // --requests was given: fewer are an error
}

func newReplay() *cobra.Command {
	f := replayFlags{backend: autoSpec()}
	c := &cobra.Command{
		Use:   "replay",
		Short: "Hand the KV caches of a trace over between two processes, and check every byte",
		Long: `Hand the KV caches of a trace's requests over from a prefill process to a decode
process, layer by layer, and check on the decode side every byte of every block.
A trace has one JSON object a line: timestamp in ms, input_length,
output_length, hash_ids of blocks of 512 tokens. Without --trace a generator makes
requests of the same statistics as a public conversation trace.

gbps counts the time in which a layer was in flight, memcpy_gbps the same pieces
copied by memcpy by as many threads, in alternation; filling and checks are
reported apart, and happen while no layer is in flight unless --overlap or --speed
says otherwise. request_ms runs from the offer to the confirmation, without the
time of filling and memcpy.

--fault wraps the backends of both processes, or of the one that --fault-side names, in
faults, named with commas between: slow, failing, lossy (a completion that never comes),
flapping (a connection is lost), and corrupt (other bytes arrive, which must be found). A
hand-over that fails is begun again over a new connection, up to 30 times, and each wait of
one side for the other takes at most a quarter of --timeout.

--offload ssd has the decode process spill each block that has come to a file, once, and
read it back: when a later request has the same block, and all that is left at the end.
Every layer of what comes back is checked, and counts among the mismatches. The file lies
in dir (ssd:dir=DIR,size=16GiB) and has room for size, unless that is said for all of the
trace, at most 4 GiB; the oldest blocks make way. Beside it, in alternation, 8 threads
move the same blocks by pread and pwrite, past the page cache as well. The file is gone
afterwards, whatever happens; with file=PATH in place of dir it is kept, and what it holds
is checked when the next replay of the same --model takes it up. With durable=true a block
is spilled once the disk has it. Requests that are aborted spill nothing, and --fault is
for what lies between the processes, not for the file.

` + specHelp + replayGroupsHelp,
		Example: `  sluice replay --model deepseek-v3.2 --requests 40 --backend shm
  sluice replay --trace conversation_trace.jsonl --requests 40 --abort-rate 0.2 --json
  sluice replay --requests 5 --timeout 2s --fault lossy,flapping
  sluice replay --offload ssd:dir=/mnt/nvme,size=16GiB
  sluice replay --backend rdma:devices=mlx5_0 --peer-backend rdma:devices=mlx5_1
  sluice replay --model llama3.1-70b --prefill tp=8,layout=nhd --decode tp=4,pp=2,layout=hnd,block=64`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return runReplay(c, &f) },
	}
	f.register(c)
	return c
}

func (f *replayFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&f.trace, "trace", "", "`FILE` of requests; without it they are generated")
	s.StringVar(&f.model, "model", "deepseek-v3.2", "whose KV cache: "+strings.Join(layout.Names(),
		", ")+"; with --prefill and --decode also "+strings.Join(groupModels, ", "))
	s.IntVar(&f.requests, "requests", 40, "how many; 0: all of the trace; without the flag a "+
		"shorter trace will do")
	s.Var(&f.backend, "backend", "what moves the bytes: "+
		strings.Join(backendNames(driver.SameHost), ", "))
	s.Var(&f.peerBackend, "peer-backend", "that of the decode process; without it the same")
	s.StringVar(&f.offload, "offload", "", "spill blocks and read them back: ssd, a file")
	s.Float64Var(&f.speed, "speed", 0, "times the pace of the trace; 0: as fast as possible")
	s.Float64Var(&f.abortRate, "abort-rate", 0, "share of the requests to abort in "+
		"mid-flight, 0 to 1; above 0 at least one")
	s.BoolVar(&f.overlap, "overlap", false, "check a request while the next one arrives, as "+
		"--speed does; transfers then share the CPUs with digests")
	s.StringVar(&f.pool, "pool", "", "`SIZE` of the decode side's pool (default: 1.5 times the "+
		"largest request, if memory allows)")
	f.groups.register(c)
	s.IntVar(&f.threads, "threads", 1, "threads that copy")
	s.Uint64Var(&f.seed, "seed", 1, "of the generator")
	s.StringVar(&f.faults, "fault", "", "have the backends misbehave: "+
		strings.Join(replay.FaultNames(), ", ")+", with commas between")
	s.StringVar(&f.faultSide, "fault-side", "both", "which process --fault is for: both, "+
		"prefill, decode")
	s.DurationVar(&f.timeout, "timeout", 30*time.Second, "limit for a process that does not "+
		"answer or move on; at least 2s")
	s.BoolVar(&f.asJSON, "json", false, "print JSON")
}

// spec is the backend of a process.
func (f *replayFlags) spec(s replay.Side) string {
	if s == replay.DecodeSide && f.peerBackend.text != "" {
		return f.peerBackend.text
	}
	return f.backend.text
}

// checkBackends finds, before anything is started, what is wrong with the backends of either
// process.
func (f *replayFlags) checkBackends() error {
	if err := f.backend.checkReach(driver.SameHost); err != nil {
		return err
	}
	if err := f.backend.try(); err != nil || f.peerBackend.text == "" {
		return err
	}
	if f.backend.name == auto || f.peerBackend.name != f.backend.name {
		return usagef("--peer-backend %s: want --backend of the same name", f.peerBackend.text)
	}
	return f.peerBackend.try()
}

// offloadOptions reads --offload; nil: none.
func (f *replayFlags) offloadOptions() (*replay.Offload, error) {
	if f.offload == "" {
		return nil, nil
	}
	o := struct {
		Dir, File string
		Size      uint64
		Durable   bool
	}{Dir: os.TempDir()}
	name, words, err := byname.Split(f.offload)
	if err == nil && name != "ssd" {
		err = fmt.Errorf("there is ssd")
	}
	if err == nil {
		err = byname.SetOptions(&o, words)
	}
	if err != nil {
		return nil, usagef("--offload %s: %w", f.offload, err)
	}
	// Before minutes of work: the decode process makes the file there.
	dir := o.Dir
	if o.File != "" {
		dir = filepath.Dir(o.File)
	}
	if s, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("--offload: %w: make the directory, or name another", err)
	} else if !s.IsDir() {
		return nil, fmt.Errorf("--offload: %s is not a directory: name one", dir)
	}
	return &replay.Offload{File: o.File, Dir: o.Dir, Durable: o.Durable, Bytes: o.Size}, nil
}

// faultsOf says which side meets which faults of --fault.
func (f *replayFlags) faultsOf() (map[replay.Side]string, error) {
	sides, ok := map[string][]replay.Side{
		"both":    {replay.PrefillSide, replay.DecodeSide},
		"prefill": {replay.PrefillSide}, "decode": {replay.DecodeSide},
	}[f.faultSide]
	switch {
	case !ok:
		return nil, usagef("--fault-side %q: want both, prefill or decode", f.faultSide)
	case f.faults == "" && f.faultSide != "both":
		return nil, usagef("--fault-side %s without --fault: there is no fault to be for that side",
			f.faultSide)
	case f.faults == "":
		return nil, nil
	}
	if err := replay.CheckFaults(f.faults); err != nil {
		return nil, usagef("--fault: %w", err)
	}
	list := map[replay.Side]string{}
	for _, s := range sides {
		list[s] = f.faults
	}
	return list, nil
}

// timeoutMin leaves room for a few signs of life.
const timeoutMin = 4 * proc.AliveEvery

// check finds usage errors, and reads the pool size.
func (f *replayFlags) check() (pool uint64, err error) {
	if slices.Contains(groupModels, f.model) {
		return 0, usagef("--model %s goes with --prefill and --decode alone", f.model)
	}
	if !slices.Contains(layout.Names(), f.model) {
		return 0, usagef("unknown model %q: there are %s", f.model, strings.Join(layout.Names(),
			", "))
	}
	if err := f.checkBackends(); err != nil {
		return 0, err
	}
	if err := f.checkNumbers(); err != nil {
		return 0, err
	}
	switch {
	case !(f.speed >= 0) || math.IsInf(f.speed, 0):
		return 0, usagef("--speed %v: want 0 or more", f.speed)
	}
	if f.pool == "" {
		return 0, nil
	}
	if pool, err = figures.ParseSize(f.pool); err != nil {
		return 0, usagef("--pool: %w", err)
	}
	return pool, nil
}

// checkNumbers finds usage errors in what any replay takes.
func (f *replayFlags) checkNumbers() error {
	switch {
	case f.requests < 0 || f.requests == 0 && f.trace == "":
		return usagef("--requests %d: want at least 1, or 0 for all of a --trace", f.requests)
	case f.requests > requestsMax:
		return usagef("--requests %d: want at most %d", f.requests, requestsMax)
	case !(f.abortRate >= 0 && f.abortRate <= 1):
		return usagef("--abort-rate %v: want 0 to 1", f.abortRate)
	case f.threads < 1 || f.threads > 64:
		return usagef("--threads %d: want 1 to 64", f.threads)
	case f.timeout < timeoutMin:
		return usagef("--timeout %v: want at least %v", f.timeout, timeoutMin)
	}
	return nil
}

func runReplay(c *cobra.Command, f *replayFlags) error {
	changed := c.Flags().Changed
	f.exactly = changed("requests")
	if groups, err := f.groups.given(c); groups || err != nil {
		if err != nil {
			return err
		}
		return runReplayGroups(c, f)
	}
	switch {
	case changed("trace") && changed("seed"):
		return usagef("--seed is of the generator: it does not go with --trace")
	case f.speed > 0 && changed("overlap") && !f.overlap:
		return usagef("--overlap=false: at the pace of --speed a request is checked while the " +
			"next one arrives")
	}
	pool, err := f.check()
	if err != nil {
		return err
	}
	offload, err := f.offloadOptions()
	if err != nil {
		return err
	}
	rules, err := f.faultsOf()
	if err != nil {
		return err
	}
	requests, err := f.load()
	if err != nil {
		return err
	}
	r, err := f.replay(c.Context(), c.ErrOrStderr(), replay.Options{
		Model: f.model, Backend: f.backend.name, Requests: requests, Speed: f.speed,
		Overlap: f.overlap, AbortRate: f.abortRate,
		PoolBytes: pool, Threads: f.threads, Limit: f.timeout, Faults: rules,
		Offload: offload,
	})
	if err != nil {
		return err
	}
	return f.show(c.OutOrStdout(), r)
}

// show prints a report, and returns what it says went wrong.
func (f *replayFlags) show(w io.Writer, r *replay.Report) error {
	if f.asJSON {
		return errors.Join(printJSON(w, r), r.Err())
	}
	return errors.Join(r.Text(w), r.Err())
}

// replay runs it, and says on stderr what is being done.
func (f *replayFlags) replay(ctx context.Context, stderr io.Writer, o replay.Options) (
	*replay.Report, error) {
	o.Start = func(s replay.Side) (*proc.Child, error) {
		return proc.StartChild(string(s), []string{"peer", "replay-" + string(s), f.spec(s)})
	}
	r := &reporter{w: stderr, title: "replay " + f.model}
	defer r.end()
	o.Say, o.Progress = r.say, r.progress
	return replay.Run(ctx, o)
}

// reporter says what a replay does.
type reporter struct {
	w     io.Writer
	title string
	bar   *progress
}

func (r *reporter) say(what string) {
	r.end() // a bar makes way for the line
	fmt.Fprintf(r.w, "%s: %s\n", r.title, what)
}

func (r *reporter) progress(done, total int64) {
	if r.bar == nil {
		r.bar = newProgress(r.w, total, r.title)
	}
	r.bar.set(done)
}

func (r *reporter) end() {
	if r.bar != nil {
		r.bar.clear()
	}
}
