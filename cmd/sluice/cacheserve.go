// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/events"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// newCache is the command whose commands are about the KV cache of one node. Its files:
//
//	cacheserve.go   sluice cache serve: the process that has the cache, from its start to its end
//	cacheconfig.go  the config of that process: its keys, their checks, errors by key and line
//	cachemetrics.go what it tells Prometheus
//	cachesecure.go  who may use which namespace, and the files of secrets
//	cachecluster.go a node of a cluster, and the commands for a cluster
//	cachecopies.go  what it sends to other nodes
//	cacheclient.go  stat, ls, get and put, which ask the server of this host by its socket
//	cachedemo.go    demo: a server that is killed under load
//	cachereplay.go  replay: a trace through a server, once for each policy
//	cacheuser.go    what these share: a client, how a model uses a cache, and a server for one
//	                command
//
// bench is that of bench.go, with the lanes of a cache.
func newCache() *cobra.Command {
	c := &cobra.Command{
		Use:   "cache",
		Short: "Serve the KV cache of this node, look into it, and measure it",
		Args:  noArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newCacheServe(), newCacheStat(), newCacheLs(), newCacheGet(), newCachePut(),
		newCacheReplay(), newCacheBench(), newCacheDemo())
	return c
}

func newCacheServe() *cobra.Command {
	var path, name, memory string
	var etcd, listen []string
	var check bool
	c := &cobra.Command{
		Use:   "serve",
		Short: "Serve the KV cache of this node to its processes, and to other hosts",
		Long: `Open the cache that a config describes, with all that a process before has left in it, and
serve it until SIGTERM or SIGINT: it leaves its cluster, requests that run may end within
drain_timeout, and blocks on their way to disks are waited for. A second signal, a second later, ends at once;
what was committed is there at the next start in any case. SIGHUP has all that namespaces may
have read again; a config that is wrong changes nothing.

Once clients may come it prints one line, and tells systemd (Type=notify, WatchdogSec).
docs/cache.md has the keys of the config and their defaults. With --etcd it is a node of a
cluster (docs/cluster.md). To try one, --name and --memory stand for a config.`,
		Example: "  sluice cache serve --config cache.toml --check\n" +
			"  sluice cache serve --name a --memory 1GiB --etcd http://127.0.0.1:2379",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var cfg *cacheConfig
			var err error
			switch {
			case path != "" && name+memory != "":
				return usagef("--name and --memory are for a server without --config: its config " +
					"has them")
			case path != "":
				cfg, err = readCacheConfig(path)
			case strings.Contains(name, "/"):
				return usagef("--name %q: want one without /, since it is a part of a path", name)
			case name != "" && memory != "":
				cfg, err = parseCacheConfig("--name and --memory",
					[]byte(quickConfig(name, memory)))
			default:
				return usagef("--config FILE says what to serve, or --name and --memory do: " +
					"docs/cache.md has an example")
			}
			if err == nil && len(etcd)+len(listen) > 0 {
				if len(etcd) > 0 {
					cfg.cluster.etcd = etcd
				}
				if len(listen) > 0 {
					cfg.listen = listen
				}
				err = cfg.check()
			}
			if err != nil {
				return err
			}
			if check {
				fmt.Fprintf(c.OutOrStdout(), "%s: config has no error\n", cfg.path)
				return nil
			}
			return serveCache(c.Context(), cfg, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	c.Flags().StringVar(&path, "config", "", "`FILE` in TOML")
	c.Flags().StringVar(&name, "name", "", "of a node without a config")
	c.Flags().StringVar(&memory, "memory", "", "`SIZE` of the memory of a node without a config")
	c.Flags().StringSliceVar(&etcd, "etcd", nil, "`URL`s of the etcd of a cluster to join")
	c.Flags().StringSliceVar(&listen, "listen", nil, "`HOST:PORT`s for other hosts, in place of "+
		"those of the config")
	c.Flags().BoolVar(&check, "check", false, "read and check the config, and open nothing")
	return c
}

// serveCache runs a server until ctx ends: it opens the engine, the listeners and the cache, serves
// clients and answers signals, and drains. It closes all that it has opened in the reverse order.
func serveCache(ctx context.Context, cfg *cacheConfig, stdout, stderr io.Writer) (err error) {
	say := func(format string, args ...any) { fmt.Fprintf(stderr, "cache: "+format+"\n", args...) }

	reload := make(chan os.Signal, 1) // an early SIGHUP waits there until clients may connect
	signal.Notify(reload, syscall.SIGHUP)
	defer signal.Stop(reload)

	if err := cfg.readSecrets(); err != nil {
		return err
	}
	e, err := cfg.openEngine(say)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()

	// The listeners, then the cache with the blocks that were left in it. A client that connects
	// meanwhile waits.
	listeners, err := cfg.openListeners(time.Second)
	defer func() {
		for _, l := range listeners { // if an error came before e.Serve
			_ = l.Close()
		}
	}()
	if err != nil {
		return err
	}
	holder := cfg.lockedBy()
	if holder != "" {
		say("waits for %s, for at most %v (start_timeout)", holder, cfg.startTimeout)
	}
	cfg.cache.Engine = e
	if cfg.object != (objectConfig{}) {
		within, cancel := context.WithTimeout(ctx, cfg.startTimeout)
		lock, err := lockStore(within, cfg.cache.Memory.Path+".object")
		cancel()
		if err != nil {
			return err
		}
		defer lock.Close()
		below, err := cfg.object.open(cfg.cache.Seal)
		if err != nil {
			return cfg.wrong("object", 0, "", "%w", err)
		}
		cfg.cache.Below = below
		defer func() { // once the cache has ended
			within, cancel := context.WithTimeout(context.Background(), cfg.drainTimeout)
			defer cancel()
			if err := below.Close(within); err != nil {
				say("%v; its blocks are not in the object store", err)
			}
		}()
	}
	within, cancel := context.WithTimeoutCause(ctx, cfg.startTimeout,
		errors.New("start_timeout is over"))
	c, err := cache.Open(within, cfg.cache)
	cancel()
	switch {
	case errors.Is(err, engine.ErrBusy) && ctx.Err() == nil:
		return fmt.Errorf("%w: stop %s, or name other files", err, cmp.Or(holder, "it"))
	case err != nil:
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()

	// The server and its metrics. now is the config as it was read last.
	var now atomic.Pointer[cacheConfig]
	now.Store(cfg)
	member := &membership{cfg: cfg, now: now.Load, say: say}
	copies, err := member.copies(c)
	if err != nil {
		return err
	}
	s, err := serve.New(serve.Config{Cache: c, Engine: e, Member: copies, Options: func(
		name string) cache.NamespaceOptions {
		return member.options(now.Load(), name)
	}, Access: func(name string) serve.Access { return member.access(now.Load(), name) },
		Log: slog.New(slog.NewTextHandler(stderr, nil))})
	if err != nil {
		return err
	}
	serving, stopServing := context.WithCancel(context.Background())
	running, stopRunning := context.WithCancel(context.Background())
	joined, leave := context.WithCancel(context.Background())
	left := make(chan struct{}) // closed once the directory has been told
	var parts sync.WaitGroup
	ended := make(chan error, len(listeners)+4) // results of parts; none should end by itself
	start := func(part func() error) { parts.Go(func() { ended <- part() }) }
	defer func() { // so that nothing uses the cache when it is closed
		leave()
		stopServing()
		stopRunning()
		parts.Wait()
	}()
	var draining atomic.Bool
	if cfg.metrics != "" {
		l, err := net.Listen("tcp", cfg.metrics)
		if err != nil {
			return cfg.wrong("", 0, "metrics", "%w", err)
		}
		say("metrics are at http://%v/metrics", l.Addr())
		handler := operatorHandler(s.Report, member, func() { _ = c.Spaces() }, func() error {
			if draining.Load() {
				return errors.New("it drains, and ends")
			}
			return member.ready()
		})
		server := &http.Server{Handler: handler, ReadTimeout: 10 * time.Second,
			WriteTimeout: 10 * time.Second}
		start(func() error { return server.Serve(l) })
		context.AfterFunc(running, func() { _ = server.Close() })
	}
	if cfg.events.address != "" {
		publisher, err := cfg.openEvents(c, say)
		if err != nil {
			return err
		}
		start(func() error { return publisher.Run(running) })
	}
	start(func() error { return s.Run(running) })
	for _, l := range listeners {
		start(func() error { return e.Serve(serving, l) })
	}
	if len(cfg.cluster.etcd) > 0 {
		start(func() error { defer close(left); return member.run(joined, s, listeners) })
	} else {
		close(left)
	}
	var fs unix.Statfs_t
	switch path := cfg.cache.Memory.Path; {
	case unix.Statfs(path, &fs) == nil && fs.Type != unix.TMPFS_MAGIC &&
		fs.Type != unix.HUGETLBFS_MAGIC:
		say("%s is not on a tmpfs: the kernel writes the memory to that disk, too; name a path "+
			"such as /dev/shm/kv", path)
	case c.Attached().BasePages:
		say("not all of the memory has huge pages, into which disks read faster: they take Linux " +
			"6.1, or huge=advise of /dev/shm, and time (start_timeout)")
	}
	line := servedLine(cfg.name, listeners, c.Attached(), c.Stats())
	if _, err := fmt.Fprintln(stdout, line); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	notifySystemd("READY=1")

	// Until a signal.
	watchdog, stopWatchdog := watchdogTicks()
	defer stopWatchdog()
	for ctx.Err() == nil {
		select {
		case <-watchdog:
			_ = c.Spaces() // waits for a cache that hangs, and for no disk
			notifySystemd("WATCHDOG=1")
		case <-reload:
			changed, err := readCacheConfig(cfg.path) // of a node without a config: an error
			if err == nil {
				err = changed.readSecrets()
			}
			if err != nil {
				say("SIGHUP: nothing is changed: %v", sentence(err))
				continue
			}
			now.Store(changed)
			if err := s.Reassign(); err != nil {
				say("SIGHUP: %s is read, and its lists hold, but not all quotas: %v; send the "+
					"signal again", cfg.path, sentence(err))
			} else {
				say("SIGHUP: %s is read: its [[namespace]] tables and cluster.weight hold now, "+
					"all else from the next start on", cfg.path)
			}
		case err := <-ended:
			return fmt.Errorf("a part of the server ended: %w", err)
		case <-ctx.Done():
		}
	}

	// Drain: the directory sends no client here any more; then no further peers, no further
	// requests, and what runs may end.
	say("%v: drains for at most %v", context.Cause(ctx), cfg.drainTimeout)
	draining.Store(true)
	notifySystemd("STOPPING=1")
	within, cancel = context.WithTimeout(context.Background(), cfg.drainTimeout)
	defer cancel()
	leave()
	select {
	case <-left:
	case <-within.Done():
	}
	stopServing()
	if err := errors.Join(s.Drain(within), c.Drain(within)); err != nil {
		say("%v; what was committed in memory is there at the next start", err)
	}
	return nil
}

// servedLine returns the line that says where the cache serves, and what was left in it.
func servedLine(name string, at []net.Listener, a cache.Attached, s cache.Stats) string {
	text := "cache " + name + " serves at"
	for n, l := range at {
		text += []string{" ", ", "}[min(n, 1)] + l.Addr().String()
	}
	switch {
	case a.Fresh != "":
		text += ": memory made anew: " + a.Fresh
	case a.Blocks == 0:
		text += ": memory is empty"
	default:
		text += fmt.Sprintf(": attached %d blocks, of at most %d, %s in memory, in %.1f ms",
			a.Blocks, a.Room, figures.RoundSize(a.Bytes), float64(a.Took)/1e6)
	}
	for _, d := range s.Disks {
		if d.Fresh != "" {
			text += fmt.Sprintf("; disk %s made anew: %s", d.Path, d.Fresh)
		} else {
			text += fmt.Sprintf("; %d blocks on disk %s", d.Blocks, d.Path)
		}
	}
	return text
}

// openEngine opens the engine with the backends of the config or, where it names none, with those
// that its tiers need. Where it listens for other hosts, it has one that reaches them. Its identity
// is that of the listeners.
func (c *cacheConfig) openEngine(say func(format string, args ...any)) (*engine.Engine, error) {
	telling := rate.NewLimiter(1, 8) // strangers may dial at any rate
	cfg := engine.Config{Name: c.name, Plaintext: c.plaintext,
		OnRefused: func(from net.Addr, why error) {
			// openListeners of another server hangs up at the Unix socket
			if from.Network() != "unix" && telling.Allow() {
				say("refused %v: %v", from, why)
			}
		}}
	if !c.unscheduled {
		cfg.Schedule = &c.schedule
	}
	var err error
	if cfg.Identity, err = c.openIdentity(); err != nil {
		return nil, err
	}
	c.own = cfg.Identity
	specs := c.backends
	if len(specs) == 0 {
		// Loads of one client are copied by several processors, as far as there are any.
		specs = []string{"shm:workers=4"}
		if len(c.cache.Disks) > 0 {
			specs = append(specs, "posix")
		}
	}
	for _, spec := range specs {
		name, words, err := byname.Split(spec)
		var b driver.Backend
		if err == nil {
			b, err = byname.Open(name, words)
		}
		if err != nil {
			err = c.wrong("", 0, "backends", "%s: %w", spec, err)
			return nil, errors.Join(err, closeAll(cfg.Backends))
		}
		cfg.Backends = append(cfg.Backends, b)
	}
	reachesHosts := func(b driver.Backend) bool { return b.Caps().Reach == driver.Network }
	if len(c.listen) > 0 && !slices.ContainsFunc(cfg.Backends, reachesHosts) {
		host, _, _ := net.SplitHostPort(c.listen[0])
		b, err := tcp.New(tcp.Config{Listen: net.JoinHostPort(host, "0"), Identity: cfg.Identity,
			Plaintext: cfg.Identity == nil})
		if err != nil {
			err = c.wrong("", 0, "listen", "%w", err)
			return nil, errors.Join(err, closeAll(cfg.Backends))
		}
		cfg.Backends = append(cfg.Backends, b)
	}
	return engine.Open(cfg)
}

// openIdentity reads the files of the identity; nil: there is none.
func (c *cacheConfig) openIdentity() (*identity.Identity, error) {
	id := c.identity
	if id.certificate == "" {
		return nil, nil
	}
	revoked := slices.DeleteFunc([]string{id.revoked}, func(s string) bool { return s == "" })
	read, err := identity.FromFiles(id.certificate, id.key, id.authority, revoked...)
	if err != nil {
		return nil, c.wrong("identity", 0, "certificate", "%w", err)
	}
	return read, nil
}

// openListeners opens the Unix socket and the addresses. With an error it returns those that it has
// opened. It removes a socket that a process has left behind, and waits up to patience for a
// process that still has it, as one that was killed a moment ago.
func (c *cacheConfig) openListeners(patience time.Duration) (list []net.Listener, err error) {
	for limit := time.Now().Add(patience); ; time.Sleep(time.Second / 4) {
		conn, err := net.DialTimeout("unix", c.socket, time.Second)
		if err != nil {
			break
		}
		_ = conn.Close()
		if time.Now().Before(limit) {
			continue
		}
		return nil, fmt.Errorf("another process serves at %s: stop it (sluice cache stat "+
			"--server %[1]s says which one it is), or name another socket", c.socket)
	}
	if info, err := os.Lstat(c.socket); err == nil && info.Mode()&os.ModeSocket != 0 {
		_ = os.Remove(c.socket) // else Listen says why not
	}
	for n, address := range append([]string{c.socket}, c.listen...) {
		network, key := "unix", "socket"
		if n > 0 {
			network, key = "tcp", "listen"
		}
		l, err := net.Listen(network, address)
		if err != nil {
			return list, c.wrong("", 0, key, "%w", err)
		}
		list = append(list, l)
	}
	return list, nil
}

// openEvents listens for routers that want the events of a cache.
func (c *cacheConfig) openEvents(of *cache.Cache,
	say func(format string, args ...any)) (*events.Publisher, error) {
	cfg := events.Config{Cache: of, Topic: c.events.topic, Buffer: c.events.buffer}
	var err error
	if cfg.Publish, err = net.Listen("tcp", c.events.address); err != nil {
		return nil, c.wrong("events", 0, "address", "%w", err)
	}
	say("events are at tcp://%v", cfg.Publish.Addr())
	if c.events.replay != "" {
		if cfg.Replay, err = net.Listen("tcp", c.events.replay); err != nil {
			return nil, errors.Join(c.wrong("events", 0, "replay", "%w", err), cfg.Publish.Close())
		}
		say("replays of events are at tcp://%v", cfg.Replay.Addr())
	}
	return events.New(cfg)
}

// lockedBy names a process that has locked a file of the cache, such as another server. It returns
// "" if no process has.
func (c *cacheConfig) lockedBy() string {
	for _, d := range append([]cache.DiskConfig{{Path: c.cache.Memory.Path}}, c.cache.Disks...) {
		if pid := proc.LockedBy(d.Path); pid > 0 {
			return fmt.Sprintf("pid %d, which has %s", pid, d.Path)
		}
	}
	return ""
}

// notifySystemd sends systemd a state of the service; see sd_notify(3). It ignores errors, and does
// nothing where systemd has not started the process.
func notifySystemd(state string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	_, _ = conn.Write([]byte(state))
}

// watchdogTicks returns a channel that ticks twice in the time after which systemd takes the
// service for dead, and a function that stops it. The channel is nil if systemd does not watch the
// service.
func watchdogTicks() (<-chan time.Time, func()) {
	us, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64)
	pid := os.Getenv("WATCHDOG_PID")
	if err != nil || us < 2 || pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return nil, func() {}
	}
	t := time.NewTicker(time.Duration(us) * time.Microsecond / 2)
	return t.C, t.Stop
}
