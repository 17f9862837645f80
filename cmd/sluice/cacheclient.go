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
	"github.com/spf13/pflag"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// cacheFlags say which server a command asks, and how long.
type cacheFlags struct {
	server                      string
	certificate, key, authority string
	plaintext                   bool
	timeout                     time.Duration
}

func (f *cacheFlags) register(s *pflag.FlagSet) {
	s.StringVar(&f.server, "server", defaultSocket(), "where it serves: the `PATH` of its Unix "+
		"socket, or tcp:HOST:PORT")
	s.StringVar(&f.certificate, "certificate", "", "`FILE` in PEM, for a server over tcp")
	s.StringVar(&f.key, "key", "", "`FILE` in PEM, of the certificate's key")
	s.StringVar(&f.authority, "authority", "", "`FILE` in PEM, of who signs for the server")
	s.BoolVar(&f.plaintext, "plaintext", false, "talk to a server over tcp in plain text")
	s.DurationVar(&f.timeout, "timeout", 10*time.Second, "limit for an answer")
}

// use dials the server, and calls do with a context that ends at the limit.
func (f *cacheFlags) use(ctx context.Context, do func(context.Context, *cacheUser) error) error {
	if f.timeout <= 0 {
		return usagef("--timeout %v: want more", f.timeout)
	}
	within, cancel := context.WithTimeoutCause(ctx, f.timeout,
		fmt.Errorf("the server has not answered within %v (--timeout)", f.timeout))
	defer cancel()
	u, err := f.dial(within, fmt.Sprintf("sluice cache (pid %d)", os.Getpid()))
	if err != nil {
		if within.Err() != nil && ctx.Err() == nil {
			err = errors.Join(context.Cause(within), err)
		}
		return fmt.Errorf("reach the cache at %s: %w", f.server, err)
	}
	return errors.Join(do(within, u), u.close())
}

// dial meets the server with an engine of that name.
func (f *cacheFlags) dial(ctx context.Context, name string) (*cacheUser, error) {
	cfg, network := engine.Config{Name: name, Plaintext: f.plaintext}, "unix"
	address, remote := strings.CutPrefix(f.server, "tcp:")
	_, noSocket := os.Stat(address)
	var b driver.Backend
	var err error
	switch {
	case remote && f.plaintext:
		b, err = tcp.New(tcp.Config{Plaintext: true})
	case remote && (f.certificate == "" || f.key == "" || f.authority == ""):
		return nil, usagef("give --certificate, --key and --authority, or --plaintext")
	case remote:
		var id *identity.Identity
		if id, err = identity.FromFiles(f.certificate, f.key, f.authority); err == nil {
			cfg.Identity = id.CheckHost()
			b, err = tcp.New(tcp.Config{Identity: id})
		}
	case f.certificate+f.key+f.authority != "" || f.plaintext:
		return nil, usagef("a Unix socket needs neither certificates nor --plaintext")
	case noSocket != nil:
		return nil, fmt.Errorf("no cache is served here: %w: start sluice cache serve, or name "+
			"its socket by --server", noSocket)
	default:
		b, err = byname.Open("shm", nil)
	}
	if err != nil {
		return nil, err
	}
	if remote {
		network = "tcp"
	}
	cfg.Backends = []driver.Backend{b}
	u := &cacheUser{}
	if u.engine, err = engine.Open(cfg); err != nil {
		return nil, err
	}
	if u.Client, err = serve.Dial(ctx, u.engine, network, address); err != nil {
		return nil, errors.Join(err, u.engine.Close())
	}
	return u, nil
}

func newCacheStat() *cobra.Command {
	f := &cacheFlags{}
	var asJSON bool
	var every time.Duration
	c := &cobra.Command{
		Use:   "stat",
		Short: "Say what a cache has, and what its clients get from it",
		Example: `  sluice cache stat
  sluice cache stat --watch 2s
  sluice cache stat --json`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if given(c, "watch") && every < 100*time.Millisecond {
				return usagef("--watch %v: want at least 100ms", every)
			}
			for {
				err := f.use(c.Context(), func(ctx context.Context, u *cacheUser) error {
					r, err := u.Report(ctx)
					switch {
					case err != nil:
						return err
					case asJSON:
						return printJSON(c.OutOrStdout(), r)
					}
					return printCacheReport(c.OutOrStdout(), &r)
				})
				if err != nil || every == 0 {
					return err
				}
				select {
				case <-c.Context().Done():
					return nil
				case <-time.After(every):
				}
			}
		},
	}
	f.register(c.Flags())
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	c.Flags().DurationVar(&every, "watch", 0, "print it again each so often, until a signal")
	return c
}

// printCacheReport writes a report for people.
func printCacheReport(w io.Writer, r *serve.Report) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(format string, args ...any) { fmt.Fprintf(t, format+"\n", args...) }
	line("server\t%s, pid %d, since %s", r.Name, r.PID, r.Started.Format(time.DateTime))
	attached := fmt.Sprintf("%d blocks, %s, in %.1f ms", r.Attached.Blocks,
		figures.RoundSize(r.Attached.Bytes), r.Attached.Ms)
	if r.Attached.Fresh != "" {
		attached = "made anew: " + r.Attached.Fresh
	}
	line("attached\t%s", attached)
	line("clients\t%d, with %d requests that run", r.Clients, r.Running)
	for k, tier := range r.Tiers {
		if tier.Room > 0 {
			line("%v\t%d blocks, %s of %s; %d had to go", cache.Tier(k), tier.Blocks,
				figures.RoundSize(tier.Bytes), figures.RoundSize(tier.Room), tier.Evicted)
		}
	}
	for _, d := range r.Disks {
		text := fmt.Sprintf("%d blocks, %s of %s", d.Blocks, figures.RoundSize(d.Bytes),
			figures.RoundSize(d.Room))
		if d.Left > 0 {
			text += ", " + figures.RoundSize(d.Left) + " may be written at once"
		}
		if d.Unused != "" {
			text += "; LEFT ALONE: " + d.Unused
		}
		if d.Error != "" {
			text += "; last error: " + d.Error
		}
		line("  %s\t%s", d.Path, text)
	}
	asked := uint64(0)
	for _, n := range r.Loads {
		asked += n
	}
	line("loads\t%d of %d blocks, %s%s", r.Loads[cache.Done], asked,
		figures.RoundSize(r.LoadedBytes), missesText(r.Loads))
	line("stores\t%d blocks, %s%s", r.Stores[cache.Done], figures.RoundSize(r.StoredBytes),
		missesText(r.Stores))
	line("disks\t%d blocks read, %d written, %d not in time", r.SwappedIn, r.SwappedOut,
		r.Unwritten)
	if r.Unproven > 0 {
		line("unproven\t%d transfers without a proof that they have ended", r.Unproven)
	}
	for _, name := range []string{"match", "load", "store"} {
		if l := r.Requests[name]; l.Count() > 0 {
			line("%s\t%d requests, p50 at most %v, p99 at most %v", name, l.Count(),
				l.Percentile(50), l.Percentile(99))
		}
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
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
	f := &cacheFlags{}
	var asJSON bool
	var most int
	c := &cobra.Command{
		Use:   "ls [NAMESPACE]",
		Short: "List the namespaces of a cache, or the blocks of one",
		Long: `List the namespaces of a cache or, with the name or the digest of one, its blocks: key,
bytes, and where they are. What is stored or has to go meanwhile may be in the list or not.`,
		Example: `  sluice cache ls
  sluice cache ls llama-70b --most 20`,
		Args: wordsFrom(0, 1),
		RunE: func(c *cobra.Command, args []string) error {
			if most < 0 {
				return usagef("--most %d: want 0, for all, or more", most)
			}
			w := c.OutOrStdout()
			return f.use(c.Context(), func(ctx context.Context, u *cacheUser) error {
				if len(args) == 0 {
					return u.printSpaces(ctx, w, asJSON)
				}
				space, err := u.space(ctx, args[0])
				if err != nil {
					return err
				}
				return printBlocks(ctx, w, space, most, asJSON)
			})
		},
	}
	f.register(c.Flags())
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON, a value a line")
	c.Flags().IntVar(&most, "most", 100, "blocks to list at most; 0: all")
	return c
}

func (u *cacheUser) printSpaces(ctx context.Context, w io.Writer, asJSON bool) error {
	spaces, err := u.Spaces(ctx)
	if err != nil {
		return err
	}
	var rows [][]any
	for _, s := range spaces {
		rows = append(rows, []any{s.Name, hex.EncodeToString(s.Digest[:]), s.Priority, s.Blocks[0],
			size(s.Bytes[0]), size(s.Quota[0]), s.Blocks[1], size(s.Bytes[1]), size(s.Quota[1]),
			s.Flow.String(), s.TTL.Seconds()})
	}
	return printRows(w, asJSON, []string{"namespace", "digest", "priority", "memory_blocks",
		"memory_bytes", "memory_quota", "disk_blocks", "disk_bytes", "disk_quota", "flow",
		"ttl_s"}, rows)
}

// printBlocks lists blocks page by page.
func printBlocks(ctx context.Context, w io.Writer, space *serve.Space, most int,
	asJSON bool) error {
	if most == 0 {
		most = math.MaxInt
	}
	for from := uint32(0); ; {
		list, next, err := space.Blocks(ctx, from)
		if err != nil {
			return err
		}
		var rows [][]any
		for _, b := range list[:min(len(list), most)] {
			rows = append(rows, []any{hex.EncodeToString(b.Key[:]), b.Bytes,
				b.Found&cache.InMemory != 0, b.Found&cache.OnDisk != 0})
		}
		most -= len(rows)
		err = printRows(w, asJSON, []string{"key", "bytes", "in_memory", "on_disk"}, rows)
		if err != nil {
			return err
		}
		if from = next; next == 0 || most == 0 {
			return nil
		}
	}
}

// space opens a namespace that the cache knows, by its name or its digest.
func (u *cacheUser) space(ctx context.Context, name string) (*serve.Space, error) {
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

// blockFlags say which block is meant.
type blockFlags struct {
	cacheFlags
	namespace string
	hash      bool
}

func (f *blockFlags) register(c *cobra.Command) {
	f.cacheFlags.register(c.Flags())
	c.Flags().StringVar(&f.namespace, "namespace", "default", "`NAME` or digest of its namespace")
	c.Flags().BoolVar(&f.hash, "hash", false, "KEY is a text, the key is its hash")
}

func (f *blockFlags) key(text string) (k cache.Key, err error) {
	if f.hash {
		return cache.KeyOf([]byte(text)), nil
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(k) {
		return k, usagef("key %q: want 32 hexadecimal digits, or a text with --hash", text)
	}
	return cache.Key(b), nil
}

func newCacheGet() *cobra.Command {
	f := &blockFlags{}
	var out string
	c := &cobra.Command{
		Use:   "get KEY --out FILE",
		Short: "Load a block into a file",
		Example: `  sluice cache get 5f16f4c7f149ac4f9510d9cf8cf384d8 --namespace llama-70b --out block
  sluice cache get --hash hello --out -`,
		Args: wordsFrom(1, 1),
		RunE: func(c *cobra.Command, args []string) error {
			key, err := f.key(args[0])
			if err == nil && out == "" {
				err = usagef("--out FILE says where the block goes; -: the standard output")
			}
			if err != nil {
				return err
			}
			return f.use(c.Context(), func(ctx context.Context, u *cacheUser) error {
				space, err := u.space(ctx, f.namespace)
				if err != nil {
					return err
				}
				b, _, err := space.Block(ctx, key) // for its length
				if err == nil && !b.Found.There() {
					err = fmt.Errorf("%x is not in namespace %q: never stored, or it had to go",
						key, f.namespace)
				}
				data := make([]byte, b.Bytes)
				if err == nil {
					err = u.moveBlock(ctx, space.Load, key, data)
				}
				if err == nil && out == "-" {
					_, err = c.OutOrStdout().Write(data)
				} else if err == nil {
					err = os.WriteFile(out, data, 0o666)
				}
				return err
			})
		},
	}
	f.register(c)
	c.Flags().StringVar(&out, "out", "", "`FILE` that gets its bytes; -: the standard output")
	return c
}

// outcomeTexts say of a block's outcome what it means.
var outcomeTexts = map[cache.Outcome]string{
	cache.Missing: "it had to go at this moment: it is not in the cache any more",
	cache.Pending: "another process stores it at this moment: try again",
	cache.Damaged: "its bytes were not those that were stored: the cache has forgotten it",
	cache.Conflict: "the cache has a block of another length under this key: a key names one " +
		"content for ever",
	cache.NoRoom: "there is no room for it that may be taken: see sluice cache stat, and the " +
		"quota of its namespace",
	cache.Late: "not within --timeout",
}

// moveBlock loads a block into data, or stores it from there.
func (u *cacheUser) moveBlock(ctx context.Context, call func(context.Context, []cache.Key,
	serve.Place) ([]cache.Outcome, error), key cache.Key, data []byte) error {
	if err := u.hold(ctx, len(data)); err != nil {
		return err
	}
	copy(u.memory.Bytes(), data)
	outcomes, err := call(ctx, []cache.Key{key}, u.place(1, len(data)))
	copy(data, u.memory.Bytes())
	if err != nil || outcomes[0] == cache.Done || outcomes[0] == cache.Known {
		return err
	}
	return errors.New(cmp.Or(outcomeTexts[outcomes[0]], "the outcome is: "+outcomes[0].String()))
}

func newCachePut() *cobra.Command {
	f := &blockFlags{}
	var geometry string
	c := &cobra.Command{
		Use:   "put KEY FILE",
		Short: "Store a file as a block",
		Long: `Store the bytes of a file as one block. A namespace that the cache does not know is made,
for --geometry: processes that name it and the same geometry find the block.`,
		Example: `  sluice cache put --hash hello ./hello.txt
  sluice cache put 5f16f4c7f149ac4f9510d9cf8cf384d8 block --namespace llama-70b`,
		Args: wordsFrom(2, 2),
		RunE: func(c *cobra.Command, args []string) error {
			key, err := f.key(args[0])
			if err != nil {
				return err
			}
			var digest [32]byte
			if geometry != "" {
				b, err := hex.DecodeString(geometry)
				if err != nil || len(b) != len(digest) {
					return usagef("--geometry %q: want 64 hexadecimal digits", geometry)
				}
				copy(digest[:], b)
			}
			data, err := os.ReadFile(args[1])
			if err == nil && len(data) == 0 {
				err = fmt.Errorf("%s is empty: a block has at least 1 byte", args[1])
			}
			if err != nil {
				return err
			}
			return f.use(c.Context(), func(ctx context.Context, u *cacheUser) error {
				space, err := u.space(ctx, f.namespace)
				if geometry != "" || errors.Is(err, os.ErrNotExist) {
					space, err = u.Namespace(ctx, f.namespace, digest)
				}
				if err != nil {
					return err
				}
				return u.moveBlock(ctx, space.Store, key, data)
			})
		},
	}
	f.register(c)
	c.Flags().StringVar(&geometry, "geometry", "", "`DIGEST` of what processes must agree on, 64 "+
		"hexadecimal digits (default: of the namespace with that name, else zeros)")
	return c
}
