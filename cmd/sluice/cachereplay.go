// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	enc "encoding/binary" // the tests have a variable of that name
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
)

// cacheReplay is the command: it runs a trace through caches.
type cacheReplay struct {
	replayFlags // which trace, how many requests of it, and the seed of generated ones
	policies    []string
	clients     int
	blockText   string
	block       int     // bytes
	memory      float64 // percent of the different blocks of the trace
	disk        float64
	dir         string

	chains  [][]cache.Key
	refs    int // blocks of all chains, each as often as it occurs
	unique  int // different blocks
	longest int // blocks of the longest chain
}

func newCacheReplay() *cobra.Command {
	f := &cacheReplay{}
	c := &cobra.Command{
		Use:   "replay [TRACE]",
		Short: "Run a trace through a cache, by several clients, and check every byte",
		Long: `Run the requests of a trace through a cache of its own, once for each policy: clients take
them in their order, match the chain of a request, load what is there, and store the rest.
Each byte that is loaded must be the one that the block's key says.

Beside the hits of each policy stands the optimum: the most that a cache with room for as many
blocks, memory and disk together, could have served if it knew all later requests. Both are
shares of all blocks. from_disk counts the bytes that the cache first had to read from its disk.
Without TRACE a generator makes requests of the statistics of a conversation trace.`,
		Example: `  sluice cache replay conversation_trace.jsonl --memory 10
  sluice cache replay --requests 500 --memory 3 --disk 20 --policy s3fifo --json`,
		Args: wordsFrom(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			f.chooseTrace(c.Flags(), args)
			if err := f.check(c.Context()); err != nil {
				return err
			}
			return f.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	s := c.Flags()
	s.IntVar(&f.requests, "requests", 0, "how many; without it all of TRACE, or 1,000 that are "+
		"made up")
	s.Uint64Var(&f.seed, "seed", 1, "of those that are made up")
	s.StringSliceVar(&f.policies, "policy", nil, "`POLICIES` to run, with commas between; without "+
		"it s3fifo, arc and lru")
	s.IntVar(&f.clients, "clients", 4, "clients, each with an engine of its own")
	s.StringVar(&f.blockText, "block", "4KiB", "`SIZE` of a block, a multiple of 4 KiB")
	s.Float64Var(&f.memory, "memory", 10, "`PERCENT` of the trace's different blocks that the "+
		"memory has room for")
	s.Float64Var(&f.disk, "disk", 0, "`PERCENT` that a file of a disk has room for; 0: no disk")
	s.StringVar(&f.dir, "dir", os.TempDir(), "`FOLDER` for that file, which is gone afterwards")
	s.BoolVar(&f.asJSON, "json", false, "print JSON, a value a line")
	return c
}

// check finds what is wrong with the flags, and makes keys of the trace.
func (f *cacheReplay) check(ctx context.Context) error {
	n, err := figures.ParseSize(f.blockText)
	switch {
	case err != nil:
		return usagef("--block: %w", err)
	case n%4096 != 0 || n > 256<<20:
		return usagef("--block %s: want a multiple of 4 KiB, at most 256 MiB", f.blockText)
	case f.clients < 1 || f.clients > 64:
		return usagef("--clients %d: want 1 to 64", f.clients)
	case !(f.memory > 0 && f.memory <= 100):
		return usagef("--memory %v: want more than 0, at most 100 percent", f.memory)
	case !(f.disk >= 0 && f.disk <= 100):
		return usagef("--disk %v: want 0 to 100 percent", f.disk)
	case f.exactly && f.requests < 1 || f.requests > requestsMax:
		return usagef("--requests %d: want from 1 to %d", f.requests, requestsMax)
	}
	if f.policies == nil {
		f.policies = []string{"s3fifo", "arc", "lru"}
	}
	for _, p := range f.policies {
		if err := checkPolicy(p); err != nil {
			return usagef("--policy: %w", err)
		}
	}
	f.block = int(n)
	requests, err := f.load(ctx)
	if err != nil {
		return err
	}
	seen := map[cache.Key]bool{}
	for _, q := range requests {
		chain := make([]cache.Key, len(q.HashIDs))
		for k, id := range q.HashIDs {
			enc.LittleEndian.PutUint64(chain[k][:], id)
			seen[chain[k]] = true
		}
		f.chains = append(f.chains, chain)
		f.refs, f.longest = f.refs+len(chain), max(f.longest, len(chain))
	}
	if f.unique = len(seen); f.unique == 0 {
		return errors.New("the requests have no blocks")
	}
	return nil
}

// blocksOf returns how many blocks are that percentage of the trace's different blocks, rounded up.
func (f *cacheReplay) blocksOf(percent float64) int {
	return int(math.Ceil(percent / 100 * float64(f.unique)))
}

// replayColumns are the columns of the result of each policy; times are of whole requests.
var replayColumns = []string{"policy", "hits", "optimum", "loaded", "from_disk", "to_disk",
	"match_p50_us", "match_p99_us", "load_p50_us", "load_p99_us", "store_p50_us", "store_p99_us",
	"mismatches"}

// run runs all policies, and prints what came of them.
func (f *cacheReplay) run(ctx context.Context, stdout, stderr io.Writer) error {
	optimum := share(optimalHits(f.chains, f.blocksOf(f.memory)+f.blocksOf(f.disk)), f.refs)
	bar := newProgress(stderr, int64(len(f.chains)*len(f.policies)), "cache replay")
	defer bar.clear()
	var rows [][]any
	mismatches := 0
	for n, p := range f.policies {
		r, err := f.runPolicy(ctx, p, func(done int) { bar.set(int64(n*len(f.chains) + done)) })
		if err != nil {
			return err
		}
		mismatches += r.wrong
		row := []any{p, share(r.hits, f.refs), optimum, size(r.stats.LoadedBytes),
			size(r.stats.SwappedIn * uint64(f.block)), size(r.stats.SwappedOut * uint64(f.block))}
		for _, t := range r.took {
			row = append(row, micros(t.Percentile(50)), micros(t.Percentile(99)))
		}
		rows = append(rows, append(row, r.wrong))
	}
	bar.clear()
	fmt.Fprintf(stderr, "%d requests of %d blocks of %s, %d of them different, by %d clients; "+
		"memory for %v %% of these, disk for %v %%\n", len(f.chains), f.refs,
		figures.FormatSize(uint64(f.block)), f.unique, f.clients, f.memory, f.disk)
	err := printRows(stdout, f.asJSON, replayColumns, rows)
	if mismatches > 0 {
		err = errors.Join(err, fmt.Errorf("%d blocks were loaded with other bytes", mismatches))
	}
	return err
}

// share and micros round to the digits that a reader can use.
func share(n, of int) float64        { return math.Round(1e4*float64(n)/float64(of)) / 1e4 }
func micros(d time.Duration) float64 { return math.Round(figures.Micros(d)) }

// replayResult is the result of a policy: the number of blocks loaded, and of those among them that
// had wrong bytes.
type replayResult struct {
	hits, wrong int
	took        [3]*figures.Samples // of Match, Load and Store
	stats       cache.Stats
}

// runPolicy starts a server of a policy, has clients take the requests in their order, and returns
// what became of them.
func (f *cacheReplay) runPolicy(ctx context.Context, policy string, progress func(int)) (
	r replayResult, err error) {
	// The cache has room for as many blocks as the optimum.
	memory, disk := f.blocksOf(f.memory), f.blocksOf(f.disk)
	tier := func(blocks int) string {
		return fmt.Sprintf("bytes = %d\nextent = %d", blocks*f.block, f.block)
	}
	onDisk := ""
	if disk > 0 {
		onDisk = fmt.Sprintf("%s\nblocks = %d", tier(disk), disk)
	}
	s, err := newOwnServer(f.dir, fmt.Sprintf("policy = %q\nblocks = %d", policy,
		memory+disk+4096), tier(memory), onDisk)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.remove()) }()
	if _, err := s.start(); err != nil {
		return r, err
	}
	for k := range r.took {
		r.took[k] = figures.NewSamples(len(f.chains))
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var mu sync.Mutex // guards r
	var clients sync.WaitGroup
	queue := make(chan []cache.Key)
	room := max(1, min(f.longest, 64<<20/f.block))
	for n := range f.clients {
		clients.Go(func() {
			u, err := openModelUser(ctx, s.socket, fmt.Sprint("client ", n), f.block, room)
			if err == nil {
				defer func() { _ = u.close() }()
			}
			for chain := range queue {
				var q requestResult
				if err == nil {
					q, err = u.handle(ctx, chain)
				}
				if err != nil {
					fail(err)
					return
				}
				mu.Lock()
				r.hits, r.wrong = r.hits+q.hits, r.wrong+q.wrong
				for k, d := range q.took {
					if d > 0 {
						r.took[k].Add(d)
					}
				}
				mu.Unlock()
			}
		})
	}
	for at, chain := range f.chains {
		select {
		case queue <- chain:
			progress(at)
		case <-ctx.Done():
		}
	}
	close(queue)
	clients.Wait()
	if ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	u, err := dialCache(ctx, s.socket, "reader")
	if err != nil {
		return r, err
	}
	report, err := u.Report(ctx)
	r.stats = report.Stats
	return r, errors.Join(err, u.close())
}

// optimalHits returns the most hits that any cache of that capacity can have on the chains, even
// one that knows all later chains and may decline to keep a block: Belady's MIN. After each chain
// MIN keeps the blocks whose next use comes first. A block of a chain is never used before the
// blocks in front of it, so MIN can keep chains without gaps, and each of its hits is a block that
// Match would find.
func optimalHits(chains [][]cache.Key, capacity int) (hits int) {
	// For each block of each chain, the number of the next chain that uses it.
	uses := make([][]int, len(chains))
	later := map[cache.Key]int{}
	for n, chain := range slices.Backward(chains) {
		for _, key := range chain { // no key is in a chain twice
			at, ok := later[key]
			if !ok {
				at = len(chains)
			}
			uses[n] = append(uses[n], at)
			later[key] = n
		}
	}
	there := map[cache.Key]bool{}
	next := make([][]cache.Key, len(chains)) // cached blocks, by the chain that uses them next
	last := 0                                // no cached block is used after this chain
	for n, chain := range chains {
		for k, key := range chain {
			if there[key] {
				hits++
			}
			delete(there, key)
			if at := uses[n][k]; at < len(chains) {
				there[key] = true
				next[at] = append(next[at], key)
				last = max(last, at)
			}
		}
		for len(there) > capacity {
			if list := next[last]; len(list) > 0 {
				delete(there, list[0])
				next[last] = list[1:]
			} else {
				last--
			}
		}
	}
	return hits
}
