// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// serverFlags are the flags of a command that asks the server of this host.
type serverFlags struct {
	server    string
	timeout   time.Duration
	asJSON    bool
	cluster   clusterFlags
	namespace string // this and hash: of the commands about one block
	hash      bool
}

func (a *serverFlags) register(c *cobra.Command, asJSON string) *cobra.Command {
	s := c.Flags()
	s.StringVar(&a.server, "server", defaultSocket(), "`PATH` of the server's Unix socket, or "+
		"unix:PATH")
	s.DurationVar(&a.timeout, "timeout", 10*time.Second, "limit for an answer")
	if asJSON != "" {
		s.BoolVar(&a.asJSON, "json", false, asJSON)
	}
	return c
}

// within returns a context that ends at the limit.
func (a *serverFlags) within(c *cobra.Command) (context.Context, context.CancelFunc, error) {
	if a.timeout <= 0 {
		return nil, nil, usagef("--timeout %v: want more", a.timeout)
	}
	ctx, cancel := context.WithTimeoutCause(c.Context(), a.timeout,
		fmt.Errorf("no answer within %v (--timeout)", a.timeout))
	return ctx, cancel, nil
}

// askCluster is ask of the nodes of a cluster.
func (a *serverFlags) askCluster(c *cobra.Command, do func(context.Context, *clusterUser) error) (
	err error) {
	if given(c, "server") {
		return usagef("--server names one cache: a cluster has --etcd or --nodes")
	}
	ctx, cancel, err := a.within(c)
	if err != nil {
		return err
	}
	defer cancel()
	u, err := a.cluster.open(ctx, fmt.Sprintf("sluice cache (pid %d)", os.Getpid()))
	if err != nil {
		return fmt.Errorf("reach the cluster: %w", err)
	}
	if err = c.Context().Err(); err == nil { // else it was interrupted while it dialled
		err = do(ctx, u)
	}
	if absent, further := u.absent(); err != nil && absent != "" {
		err = fmt.Errorf("%w; nodes that do not answer have and take no blocks: %s", err, absent)
		if further {
			err = fmt.Errorf("%w; those of other hosts are reached with --backend", err)
		}
	}
	return errors.Join(err, u.end())
}

// ask dials the server, and calls do with a context that ends at the limit.
func (a *serverFlags) ask(c *cobra.Command, do func(context.Context, *cacheUser) error) error {
	ctx, cancel, err := a.within(c)
	if err != nil {
		return err
	}
	defer cancel()
	u, err := dialCache(ctx, a.server, fmt.Sprintf("sluice cache (pid %d)", os.Getpid()))
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		return fmt.Errorf("reach the cache at %s: %w", a.server, err)
	}
	return errors.Join(do(ctx, u), u.close())
}

func newCacheStat() *cobra.Command {
	var a serverFlags
	c := &cobra.Command{
		Use:     "stat",
		Short:   "Say what a cache has, and what its clients get from it",
		Example: "  sluice cache stat\n  watch sluice cache stat",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if a.cluster.isSet() {
				return a.askCluster(c, func(ctx context.Context, u *clusterUser) error {
					return u.printStats(ctx, c.OutOrStdout(), c.ErrOrStderr(), a.asJSON)
				})
			}
			return a.ask(c, func(ctx context.Context, u *cacheUser) error {
				r, err := u.Report(ctx)
				r.Clients, r.Running = r.Clients-1, r.Running-1 // this one
				switch {
				case err != nil:
					return err
				case a.asJSON:
					return printJSON(c.OutOrStdout(), &r)
				}
				return printCacheReport(c.OutOrStdout(), &r)
			})
		},
	}
	a.cluster.register(c.Flags())
	return a.register(c, "print JSON")
}

// printCacheReport writes a report for people.
func printCacheReport(w io.Writer, r *serve.Report) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }
	round := figures.RoundSize
	line("server\t%s, pid %d, since %s", r.Name, r.PID, r.Started.Format(time.DateTime))
	if at := r.Attached; at.Fresh != "" {
		line("attached\tmade anew: %s", at.Fresh)
	} else {
		line("attached\t%d blocks, %s, in %.1f ms", at.Blocks, round(at.Bytes), at.Ms)
	}
	line("clients\t%d, with %d requests that run", r.Clients, r.Running)
	for k, tier := range r.Tiers {
		if tier.Room > 0 {
			line("%v\t%d blocks, %s of %s; %d had to go", cache.Tier(k), tier.Blocks,
				round(tier.Bytes), round(tier.Room), tier.Evicted)
		}
	}
	for _, d := range r.Disks {
		text := fmt.Sprintf("%d blocks, %s of %s", d.Blocks, round(d.Bytes), round(d.Room))
		if d.Day > 0 {
			text += fmt.Sprintf(", %s of %s a day may be written at once", round(d.Left),
				round(d.Day))
		}
		if d.Unused != "" {
			text += "; LEFT ALONE: " + d.Unused
		}
		if d.Error != "" {
			text += "; last error: " + d.Error
		}
		line("  %s\t%s", d.Path, text)
	}
	if o := r.Object; o != nil {
		text := fmt.Sprintf("%d blocks in %d objects, %s of %s; %d read, %d written, %d lost",
			o.Blocks, o.Objects, round(o.Bytes), round(o.Room), o.Read, o.Written, o.Lost)
		if o.Unused != "" {
			text += "; LEFT ALONE: " + o.Unused
		}
		if !strings.Contains(o.Unused, o.Error) {
			text += "; last error: " + o.Error
		}
		line("object\t%s", text)
	}
	asked := uint64(0)
	for _, n := range r.Loads {
		asked += n
	}
	line("loads\t%d of %d blocks, %s%s", r.Loads[cache.Done], asked, round(r.LoadedBytes),
		missesText(r.Loads))
	line("stores\t%d blocks, %s%s", r.Stores[cache.Done], round(r.StoredBytes),
		missesText(r.Stores))
	line("disks\t%d blocks read, %d written, %d not written", r.SwappedIn, r.SwappedOut,
		r.Unwritten)
	if r.Unproven > 0 {
		line("unproven\t%d transfers without a proof that they have ended", r.Unproven)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Requests)) {
		if l := r.Requests[name]; l.Count() > 0 {
			line("%s\t%d requests, p50 at most %v, p99 at most %v", name, l.Count(),
				l.Percentile(50), l.Percentile(99))
		}
	}
	return t.Flush()
}

// missesText lists what became of blocks that are not Done.
func missesText(counts map[cache.Outcome]uint64) (text string) {
	for _, o := range slices.Sorted(maps.Keys(counts)) {
		if o != cache.Done {
			text += fmt.Sprintf("; %d %v", counts[o], o)
		}
	}
	return text
}

func newCacheLs() *cobra.Command {
	var a serverFlags
	var most int
	c := &cobra.Command{
		Use:   "ls [NAMESPACE]",
		Short: "List the namespaces of a cache, or the blocks of one",
		Long: `List the namespaces of a cache that a client has opened or, with the name or the digest of
one, its blocks. What is stored or has to go meanwhile may be in the list or not.`,
		Example: "  sluice cache ls\n  sluice cache ls llama-70b --most 20",
		Args:    wordsFrom(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			if most < 0 {
				return usagef("--most %d: want 0, for all, or more", most)
			}
			return a.ask(c, func(ctx context.Context, u *cacheUser) error {
				if len(args) == 0 {
					return u.printSpaces(ctx, c.OutOrStdout(), a.asJSON)
				}
				space, err := u.findSpace(ctx, args[0])
				if err != nil {
					return err
				}
				left, next := cmp.Or(most, math.MaxInt), uint32(0)
				for {
					var list []cache.BlockInfo
					if list, next, err = space.Blocks(ctx, next); err != nil {
						return err
					}
					var rows [][]any
					for _, b := range list[:min(len(list), left)] {
						rows = append(rows, []any{hex.EncodeToString(b.Key[:]), b.Bytes,
							b.Found&cache.InMemory != 0, b.Found&cache.OnDisk != 0})
					}
					if len(rows) > 0 {
						err = printRows(c.OutOrStdout(), a.asJSON, []string{"key", "bytes",
							"in_memory", "on_disk"}, rows)
					}
					left -= len(rows)
					if left == 0 && (next != 0 || len(list) > len(rows)) {
						fmt.Fprintf(c.ErrOrStderr(), "there are more than %d: --most 0 lists all\n",
							most)
					}
					if err != nil || next == 0 || left == 0 {
						return err
					}
				}
			})
		},
	}
	c.Flags().IntVar(&most, "most", 100, "blocks to list at most; 0: all")
	return a.register(c, "print JSON, a value a line")
}

func (u *cacheUser) printSpaces(ctx context.Context, w io.Writer, asJSON bool) error {
	spaces, err := u.Spaces(ctx)
	if err != nil {
		return err
	}
	var rows [][]any
	for _, s := range spaces {
		var quota [2]any // nil: none
		for t, n := range s.Quota {
			if n > 0 {
				quota[t] = size(n)
			}
		}
		rows = append(rows, []any{s.Name, hex.EncodeToString(s.Digest[:]), s.Priority, s.Blocks[0],
			size(s.Bytes[0]), quota[0], s.Blocks[1], size(s.Bytes[1]), quota[1], s.Flow.String(),
			s.TTL.Seconds()})
	}
	return printRows(w, asJSON, []string{"namespace", "digest", "priority", "memory_blocks",
		"memory_bytes", "memory_quota", "disk_blocks", "disk_bytes", "disk_quota", "flow",
		"ttl_s"}, rows)
}

// findSpace opens a namespace that the cache has, by its name or its digest.
func (u *cacheUser) findSpace(ctx context.Context, name string) (*serve.Space, error) {
	spaces, err := u.Spaces(ctx)
	if err != nil {
		return nil, err
	}
	var found []cache.SpaceInfo
	for _, s := range spaces {
		if hex.EncodeToString(s.Digest[:]) == name { // whatever others are named
			return u.Find(ctx, s.Digest)
		}
		if s.Name == name {
			found = append(found, s)
		}
	}
	switch len(found) {
	case 0:
		return nil, fmt.Errorf("the cache has no namespace %q: sluice cache ls prints those that "+
			"it has: %w", name, os.ErrNotExist)
	case 1:
		return u.Find(ctx, found[0].Digest)
	}
	return nil, fmt.Errorf("%d namespaces have the name %q, for models of other layouts: give the "+
		"digest of the one, which sluice cache ls prints", len(found), name)
}

// registerBlock is register of a command about one block.
func (a *serverFlags) registerBlock(c *cobra.Command, asJSON string) *cobra.Command {
	c.Flags().StringVar(&a.namespace, "namespace", "default", "`NAME` or digest of its namespace")
	c.Flags().BoolVar(&a.hash, "hash", false, "KEY is a text, the key is its hash")
	a.cluster.register(c.Flags())
	return a.register(c, asJSON)
}

func (a *serverFlags) key(text string) (k cache.Key, err error) {
	if a.hash {
		return cache.KeyOf([]byte(text)), nil
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(k) {
		return k, usagef("key %q: want 32 hexadecimal digits, or a text with --hash", text)
	}
	return cache.Key(b), nil
}

func newCacheGet() *cobra.Command {
	var a serverFlags
	c := &cobra.Command{
		Use:   "get KEY FILE",
		Short: "Load a block into a file, or to the standard output where FILE is -",
		Example: `  sluice cache get 5f16f4c7f149ac4f9510d9cf8cf384d8 block --namespace llama-70b
  sluice cache get --hash hello -`,
		Args: wordsFrom(2, 2),
		RunE: func(c *cobra.Command, args []string) error {
			key, err := a.key(args[0])
			if err != nil {
				return err
			}
			// b is for the length of the block, and load fills data.
			write := func(b cache.BlockInfo, load func(data []byte) error) error {
				if !b.Found.There() {
					return fmt.Errorf("%x is not in namespace %q: never stored, or it had to go",
						key, a.namespace)
				}
				data := make([]byte, b.Bytes)
				if err := load(data); err != nil {
					return err
				}
				if args[1] == "-" {
					_, err := c.OutOrStdout().Write(data)
					return err
				}
				return os.WriteFile(args[1], data, 0o666)
			}
			if a.cluster.isSet() {
				return a.askCluster(c, func(ctx context.Context, u *clusterUser) error {
					space, err := u.Namespace(ctx, a.namespace, [32]byte{})
					if err != nil {
						return err
					}
					// Block finds nothing where this process may not read, and Match says so.
					if _, err := space.Match(ctx, []cache.Key{key}); err != nil {
						return err
					}
					return write(space.Block(ctx, key), func(data []byte) error {
						_, err := u.moveBlock(ctx, space.Load, key, data)
						return err
					})
				})
			}
			return a.ask(c, func(ctx context.Context, u *cacheUser) error {
				space, err := u.findSpace(ctx, a.namespace)
				if err != nil {
					return err
				}
				b, _, err := space.Block(ctx, key)
				if err != nil {
					return err
				}
				return write(b, func(data []byte) error {
					_, err := u.moveBlock(ctx, space.Load, key, data)
					return err
				})
			})
		},
	}
	return a.registerBlock(c, "")
}

func newCachePut() *cobra.Command {
	var a serverFlags
	c := &cobra.Command{
		Use:   "put KEY FILE",
		Short: "Store a file as a block",
		Long: `Store the bytes of a file as one block, and say whether they were stored, or the key was
known: the cache then keeps the bytes that it has. A namespace that the cache does not know
is made, of a geometry of zeros.`,
		Example: "  sluice cache put --hash hello ./hello.txt",
		Args:    wordsFrom(2, 2),
		RunE: func(c *cobra.Command, args []string) error {
			key, err := a.key(args[0])
			if err != nil {
				return err
			}
			data, err := os.ReadFile(args[1])
			if err == nil && len(data) == 0 {
				err = fmt.Errorf("%s is empty: a block has at least 1 byte", args[1])
			}
			if err != nil {
				return err
			}
			say := func(outcome cache.Outcome, err error) error {
				if err != nil {
					return err
				}
				word := outcome.String()
				if outcome == cache.Done {
					word = "stored"
				}
				return printRows(c.OutOrStdout(), a.asJSON, []string{"key", "bytes", "outcome"},
					[][]any{{hex.EncodeToString(key[:]), len(data), word}})
			}
			if a.cluster.isSet() {
				return a.askCluster(c, func(ctx context.Context, u *clusterUser) error {
					space, err := u.Namespace(ctx, a.namespace, [32]byte{})
					if err != nil {
						return err
					}
					return say(u.moveBlock(ctx, space.Store, key, data))
				})
			}
			return a.ask(c, func(ctx context.Context, u *cacheUser) error {
				space, err := u.findSpace(ctx, a.namespace)
				if errors.Is(err, os.ErrNotExist) {
					space, err = u.Namespace(ctx, a.namespace, [32]byte{})
				}
				if err != nil {
					return err
				}
				return say(u.moveBlock(ctx, space.Store, key, data))
			})
		},
	}
	return a.registerBlock(c, "print JSON")
}

// outcomeTexts say what an outcome means for a block.
var outcomeTexts = map[cache.Outcome]string{
	cache.Missing: "it had to go at this moment: it is not in the cache any more",
	cache.Pending: "another process stores it at this moment: try again",
	cache.Damaged: "its bytes were not those that were stored: the cache has forgotten it",
	cache.Conflict: "the cache has another block under this key: a key names one content for " +
		"ever",
	cache.NoRoom: "there is no room for it that may be taken: see sluice cache stat, and the " +
		"quota of its namespace",
	cache.Late: "not within --timeout",
}

// moveBlock loads a block into data, or stores it from there.
func (u *cacheUser) moveBlock(ctx context.Context, call func(context.Context, []cache.Key,
	serve.Place) ([]cache.Outcome, error), key cache.Key, data []byte) (cache.Outcome, error) {
	if err := u.allocate(ctx, 1, len(data)); err != nil {
		return cache.Failed, err
	}
	copy(u.memory.Bytes(), data)
	outcomes, err := call(ctx, []cache.Key{key}, u.place(1))
	copy(data, u.memory.Bytes())
	if err != nil {
		return cache.Failed, err
	}
	return outcomes[0], outcomeError(outcomes[0])
}

// outcomeError is nil where the block is there.
func outcomeError(o cache.Outcome) error {
	if o == cache.Done || o == cache.Known {
		return nil
	}
	return errors.New(cmp.Or(outcomeTexts[o], "the outcome is: "+o.String()))
}
