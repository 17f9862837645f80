// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/trace"
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
	asJSON               bool
	groups               replayGroupsFlags
	exactly              bool // --requests was given: fewer are an error
}

func newReplay() *cobra.Command {
	f := replayFlags{backend: autoSpec()}
	c := &cobra.Command{
		Use:   "replay",
		Short: "Hand the KV caches of a trace over between processes, and check every byte",
		Long: `Hand the KV caches of a trace's requests over from a prefill process to a decode
process, layer by layer, and check on the decode side every byte of every block.
A trace has one JSON object a line: timestamp in ms, input_length,
output_length, hash_ids of blocks of 512 tokens. Without --trace a generator makes
requests of the same statistics as a public conversation trace. Requests go one after the
other. The decode keeps their blocks in its pool, and has the first blocks of later ones
from there: prefix_hits, prefix_tokens.

Both processes also compare a digest of each layer, over the bytes of all of its blocks,
before a request is complete. gbps counts the time in which a layer was in flight,
memcpy_gbps the same bytes copied by memcpy by as many threads, in alternation; ratio is the
one over the other. Filling and the prefill's digests, which come before each layer, are
reported apart, and so is the comparison of each byte, behind each request. request_ms runs
from the offer to the confirmation, without the time of filling and memcpy. --abort-rate
has the processes end a share of the requests in mid-flight: what is written to their
blocks later is found.

--fault wraps the backends of both sides, or of the one that --fault-side names, in
faults, named with commas between: slow, failing, lossy (a completion that never comes),
flapping (a connection is lost), and corrupt (other bytes arrive, which must be found). A
hand-over that fails is begun again over a new connection, up to 30 times, and each wait of
one side for the other takes at most a quarter of --timeout.

` + specHelp + replayGroupsHelp,
		Example: `  sluice replay --model deepseek-v3.2 --requests 40 --backend shm
  sluice replay --trace conversation_trace.jsonl --requests 40 --abort-rate 0.2 --json
  sluice replay --requests 5 --timeout 2s --fault lossy,flapping
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
		", ")+"; "+strings.Join(groupModels, ", ")+" with --prefill and --decode alone")
	s.IntVar(&f.requests, "requests", 40, "how many; 0: all of the trace; without the flag a "+
		"shorter trace will do")
	s.Var(&f.backend, "backend", "what moves the bytes: "+
		strings.Join(backendNames(driver.SameHost), ", "))
	s.Var(&f.peerBackend, "peer-backend", "that of the decode process; without it the same")
	s.Float64Var(&f.speed, "speed", 0, "times the pace of the trace; 0: as fast as possible; "+
		"a request waits until the one before is checked")
	s.Float64Var(&f.abortRate, "abort-rate", 0, "share of the requests to abort in "+
		"mid-flight, 0 to 1; above 0 at least one")
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

// checkNumbers finds usage errors in what any replay takes.
func (f *replayFlags) checkNumbers() error {
	switch {
	case f.requests < 0 || f.requests == 0 && f.trace == "":
		return usagef("--requests %d: want at least 1, or 0 for all of a --trace", f.requests)
	case f.requests > requestsMax:
		return usagef("--requests %d: want at most %d", f.requests, requestsMax)
	case !(f.speed >= 0) || math.IsInf(f.speed, 0):
		return usagef("--speed %v: want 0 or more", f.speed)
	case !(f.abortRate >= 0 && f.abortRate <= 1):
		return usagef("--abort-rate %v: want 0 to 1", f.abortRate)
	case f.threads < 1 || f.threads > 64:
		return usagef("--threads %d: want 1 to 64", f.threads)
	case f.timeout < timeoutMin:
		return usagef("--timeout %v: want at least %v", f.timeout, timeoutMin)
	}
	return nil
}

// streamed is how both processes lay the cache out where no groups are given.
const streamed = "tp=1,block=512"

// options returns the options of the command line. An error in them is a usageError.
func (f *replayFlags) options(c *cobra.Command) (*replay.Options, error) {
	groups, err := f.groups.given(c)
	if err != nil {
		return nil, err
	}
	changed := c.Flags().Changed
	f.exactly = changed("requests")
	names := groupsFlags{f.groups.prefill, f.groups.decode, f.model}
	switch {
	case changed("trace") && changed("seed") && !groups:
		return nil, usagef("--seed is of the generator: it does not go with --trace")
	case groups && f.threads > 1 && f.backend.name != auto && f.backend.name != "shm":
		return nil, usagef("--threads %d: between groups backend shm alone has more than one",
			f.threads)
	case groups && !f.exactly:
		f.requests = groupRequests
	case !groups && slices.Contains(groupModels, f.model):
		return nil, usagef("--model %s goes with --prefill and --decode alone", f.model)
	case !groups:
		names.prefill, names.decode = streamed, streamed
	}
	o := &replay.Options{Backend: f.backend.name, Speed: f.speed, Scale: f.groups.scale,
		AbortRate: f.abortRate, HitRate: f.groups.hits, Kill: replay.Side(f.groups.kill),
		Digest: !groups || f.groups.checksum, Threads: f.threads, Seed: f.seed, Limit: f.timeout,
		Stream: !groups}
	if o.Spec, o.Prefill, o.Decode, err = names.parse(); err != nil {
		return nil, err
	}
	for i := range o.Spec.Tensors { // all tokens are kept
		if o.Spec.Tensors[i].Window > 0 && !groups {
			o.Spec.Tensors[i].Window = 0
		}
	}
	if err := f.groups.check(c); err != nil {
		return nil, err
	}
	if err := f.checkBackends(); err != nil {
		return nil, err
	}
	if err := f.checkNumbers(); err != nil {
		return nil, err
	}
	if f.pool != "" {
		if o.PoolBytes, err = figures.ParseSize(f.pool); err != nil {
			return nil, usagef("--pool: %w", err)
		}
	}
	if o.Faults, err = f.faultsOf(); err != nil {
		return nil, err
	}
	if n := f.groups.tokens; n > 0 {
		o.TokensMax = uint64(n)
		o.Requests = slices.Repeat([]trace.Request{{InputLength: n}}, f.requests)
		return o, nil
	}
	o.Requests, err = f.load(c.Context())
	return o, err
}

func runReplay(c *cobra.Command, f *replayFlags) error {
	o, err := f.options(c)
	if err != nil {
		return err
	}
	o.Start = func(s replay.Side, rank int) (*proc.Child, error) {
		name := string(s)
		if !o.Stream {
			name = fmt.Sprintf("%s rank %d", s, rank)
		}
		return proc.StartChild(name, []string{"peer", "replay-" + string(s), f.spec(s)})
	}
	say := &reporter{w: c.ErrOrStderr(), title: "replay " + f.model}
	defer say.end()
	o.Say, o.Progress = say.say, say.progress
	r, err := replay.Run(c.Context(), *o)
	if errors.Is(err, layout.ErrGeometry) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	say.end()
	if f.asJSON {
		return errors.Join(printJSON(c.OutOrStdout(), r), r.Err())
	}
	return errors.Join(r.Text(c.OutOrStdout()), r.Err())
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
