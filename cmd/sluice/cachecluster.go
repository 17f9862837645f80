// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/cluster/member"
	"github.com/sluicehq/sluice/kv/directory"
	"github.com/sluicehq/sluice/kv/directory/etcd"
)

// membership is how a server is a node of a cluster.
type membership struct {
	cfg    *cacheConfig
	now    func() *cacheConfig // the config as the last SIGHUP has read it
	say    func(format string, args ...any)
	member *member.Member // nil: it is none

	mu      sync.Mutex
	view    *directory.View // the last one; nil: none yet
	joined  bool
	trouble string // of the directory; "": none
}

const (
	loadPause  = 5 * time.Second // between two looks at how busy the node is
	leaveLimit = 2 * time.Second
	reachLimit = 10 * time.Second // for etcd, before a line says that it does not answer
	// hearLimit is the time in which clients hear that the node has left. Meanwhile it serves them.
	hearLimit = 250 * time.Millisecond
)

var errUnreached = fmt.Errorf("not within %v", reachLimit)

// options are those of a namespace: of the config where that names it, else of the directory, else
// of the config for all others.
func (m *membership) options(now *cacheConfig, name string) cache.NamespaceOptions {
	m.mu.Lock()
	view := m.view
	m.mu.Unlock()
	if view == nil || now.names(name) {
		return now.options(name)
	}
	n, is := view.Namespaces[name]
	if !is {
		return now.options(name)
	}
	return cache.NamespaceOptions{Priority: n.Priority, TTL: n.TTL(),
		Quota: [2]uint64{n.MemoryQuota, n.DiskQuota}}
}

// run is the story of a node: reach the directory, join, tell it how busy the node is, take from it
// the options of namespaces, and leave when ctx ends. The server serves meanwhile, whatever etcd
// does.
func (m *membership) run(ctx context.Context, s *serve.Server, at []net.Listener) error {
	node := m.cfg.node(at)
	var d *etcd.Directory
	for said := false; d == nil; {
		soon, cancel := context.WithTimeoutCause(ctx, reachLimit, errUnreached)
		var err error
		d, err = etcd.Open(soon, etcd.Config{Endpoints: m.cfg.cluster.etcd,
			Prefix: m.cfg.cluster.prefix, Lease: m.cfg.cluster.lease,
			Identity: m.cfg.cluster.identity})
		cancel()
		switch {
		case ctx.Err() != nil && d == nil:
			return nil
		case err != nil && !said:
			m.say("not in the cluster yet, which is tried again: %v", sentence(err))
			said = true
		}
	}
	defer d.Close()
	var joined *etcd.Member
	for said := false; joined == nil; {
		soon, cancel := context.WithTimeoutCause(ctx, reachLimit, errUnreached)
		var err error
		joined, err = d.Join(soon, node)
		cancel()
		switch {
		case ctx.Err() != nil && joined == nil:
			return nil
		case err != nil && !said:
			m.say("not in the cluster yet, which is tried again: %v", sentence(err))
			said = true
		}
	}
	defer m.sendCopies(ctx, d)() // which ends when no client looks for the node any more
	defer func() {
		soon, cancel := context.WithTimeout(context.Background(), leaveLimit)
		defer cancel()
		if err := joined.Leave(soon); err != nil {
			m.say("leaves the cluster once its lease has run out: %v", sentence(err))
			return
		}
		m.say("node %s has left the cluster", node.Name)
		time.Sleep(hearLimit)
	}()
	m.mu.Lock()
	m.joined = true
	m.mu.Unlock()
	m.say("node %s is in the cluster, at %s", node.Name, strings.Join(node.Addresses, ", "))

	ticks := time.NewTicker(loadPause)
	defer ticks.Stop()
	trouble := ""
	for {
		v, changed := d.View()
		m.mu.Lock()
		same := m.view != nil && reflect.DeepEqual(m.view.Namespaces, v.Namespaces)
		m.view = v
		m.mu.Unlock()
		if !same {
			if err := s.Reassign(); err != nil {
				m.say("options of namespaces in the cluster: %v", sentence(err))
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			continue
		case <-ticks.C:
		}
		joined.Update(loadOf(s.Report()), m.now().weight())
		now := ""
		if err := cmp.Or(v.Trouble, joined.Trouble()); err != nil {
			now = strings.ReplaceAll(sentence(err), "\n", "; ")
		}
		switch {
		case now != "" && trouble == "":
			m.say("the directory does not answer, so the nodes stay as they were: %s", now)
		case now == "" && trouble != "":
			m.say("the directory answers again")
		}
		trouble = now
		m.mu.Lock()
		m.trouble = now
		m.mu.Unlock()
	}
}

// ready says why clients are not sent to this node yet. That the directory does not answer later is
// no reason: those that know the node go on.
func (m *membership) ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.cfg.cluster.etcd) > 0 && !m.joined {
		return errors.New("not in the cluster yet")
	}
	return nil
}

// reached is 1 where the node is in the directory, and that answers.
func (m *membership) reached() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.joined && m.trouble == "" {
		return 1
	}
	return 0
}

// loadOf rounds, so that a node changes its entry of the directory seldom.
func loadOf(r serve.Report) directory.Load {
	l := directory.Load{}
	if r.Running > 0 {
		l.Running = 1 << bits.Len(uint(r.Running-1))
	}
	if t := r.Tiers[cache.Memory]; t.Room > 0 {
		l.Memory = int(t.Bytes*20/t.Room) * 5
	}
	return l
}

// weight is the node's share of the blocks: by default its memory in units of 16 MiB.
func (c *cacheConfig) weight() uint32 {
	if c.cluster.weight >= 0 {
		return uint32(c.cluster.weight)
	}
	return uint32(max(1, min(c.cache.Memory.Bytes>>24, 1<<31)))
}

// node is how the directory knows this server.
func (c *cacheConfig) node(at []net.Listener) directory.Node {
	n := directory.Node{Name: c.name, Certificate: c.cluster.certificate,
		Addresses: c.cluster.addresses, Weight: c.weight()}
	if c.own != nil && n.Certificate == "" { // so that no other member answers in its place
		n.Certificate = cmp.Or(append(c.own.Facts().Hosts, "")...)
	}
	if n.Addresses != nil {
		return n
	}
	for _, l := range at {
		network, address := l.Addr().Network(), l.Addr().String()
		if host, port, err := net.SplitHostPort(address); err == nil && network == "tcp" {
			if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
				host, _ = os.Hostname()
			}
			address = net.JoinHostPort(host, port)
		} else if full, err := filepath.Abs(address); err == nil {
			address = full
		}
		n.Addresses = append(n.Addresses, network+":"+address)
	}
	return n
}

// quickConfig is the text of a config for a node that has none: what --name and --memory say.
func quickConfig(name, memory string) string {
	return fmt.Sprintf("name = %q\nsocket = %q\n[memory]\npath = %q\nbytes = %q\n", name,
		filepath.Join(filepath.Dir(defaultSocket()), "sluice-cache-"+name+".sock"),
		"/dev/shm/sluice-cache-"+name, memory)
}

// clusterFlags name a cluster, for commands that use one.
type clusterFlags struct {
	etcd          []string
	prefix, nodes string
	backend       backendSpec // for nodes of other hosts; not given: there are none
}

func (a *clusterFlags) register(s *pflag.FlagSet) {
	s.StringSliceVar(&a.etcd, "etcd", nil, "`URL`s of the etcd of a cluster to ask")
	s.StringVar(&a.prefix, "prefix", "", "of the keys in etcd (default \"sluice\")")
	s.StringVar(&a.nodes, "nodes", "", "nodes of a cluster without an etcd: "+
		"`NAME=unix:PATH,NAME=tcp:HOST:PORT,...`")
	s.Var(&a.backend, "backend", "how to reach nodes of other hosts: "+
		"tcp:listen=:0,certificate=FILE,key=FILE,authority=FILE, or tcp:listen=:0,plaintext=true")
}

func (a *clusterFlags) isSet() bool {
	return len(a.etcd) > 0 || a.nodes != "" || a.prefix != "" || a.backend.given
}

// clusterUser is a client of a cluster, with memory for a block.
type clusterUser struct {
	*cluster.Cluster
	engine *engine.Engine
	local  bool                              // it reaches nodes of this host alone
	close  []func(ctx context.Context) error // in the reverse order
}

// openEngine opens an engine that reaches nodes of this host and, with --backend, of others.
func (a *clusterFlags) openEngine(name string) (e *engine.Engine, id *identity.Identity,
	err error) {
	b, err := byname.Open("shm", nil)
	if err != nil {
		return nil, nil, err
	}
	cfg := engine.Config{Name: name, Backends: []driver.Backend{b}}
	if a.backend.given {
		var of byname.TCP
		b, err = a.backend.openOne(1)
		if err == nil {
			cfg.Backends = append(cfg.Backends, b)
			err = byname.SetOptions(&of, tcpWords(a.backend.words))
		}
		if err == nil {
			id, err = of.Member()
		}
		if err != nil {
			return nil, nil, errors.Join(err, closeAll(cfg.Backends))
		}
		cfg.Identity, cfg.Plaintext = id, of.Plaintext
	}
	e, err = engine.Open(cfg)
	return e, id, err
}

// check is the error of a user who gave flags that do not go together.
func (a *clusterFlags) check() error {
	words := a.backend.words
	switch {
	case len(a.etcd) == 0 && a.nodes == "":
		return usagef("--prefix and --backend are of a cluster: name it by --etcd or --nodes")
	case len(a.etcd) > 0 && a.nodes != "":
		return usagef("--etcd and --nodes: a cluster has the one or the other")
	case a.backend.given && a.backend.name != "tcp":
		return usagef("--backend %s: nodes of other hosts are reached by tcp", a.backend.text)
	case says(words, "listen") && !says(words, "certificate", "plaintext"):
		return usagef("--backend %s: say certificate, key and authority, or plaintext=true, as "+
			"the nodes have it", a.backend.text)
	}
	return nil
}

// open opens the cluster.
func (a *clusterFlags) open(ctx context.Context, name string) (u *clusterUser, err error) {
	u = &clusterUser{}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.end())
		}
	}()
	if err = a.check(); err != nil {
		return u, err
	}
	var d directory.Directory
	switch {
	case a.nodes != "":
		nodes, err := directory.ParseList(a.nodes)
		if err != nil {
			return u, &usageError{err}
		}
		if d, err = directory.List(nodes, nil); err != nil {
			return u, &usageError{err}
		}
	default:
		cfg := etcd.Config{Endpoints: a.etcd, Prefix: a.prefix, HangUp: true}
		if err := cfg.Check(); err != nil {
			return u, &usageError{err}
		}
		e, err := etcd.Open(ctx, cfg)
		if err != nil {
			return u, fmt.Errorf("%w: name an etcd that runs by --etcd, or the nodes by --nodes",
				err)
		}
		u.close = append(u.close, func(context.Context) error { e.Close(); return nil })
		d = e
	}
	e, id, err := a.openEngine(name)
	if err != nil {
		return u, err
	}
	u.engine, u.local = e, !a.backend.given
	u.close = append(u.close, func(context.Context) error { return u.engine.Close() })
	u.Cluster, err = cluster.Open(ctx, cluster.Config{Engine: e, Directory: d, Identity: id})
	if err != nil {
		return u, err
	}
	u.close = append(u.close, u.Cluster.Close)
	return u, nil
}

// end closes all that was opened, up to what fails.
func (u *clusterUser) end() error {
	soon, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for k := len(u.close) - 1; k >= 0; k-- {
		if err := u.close[k](soon); err != nil {
			return err
		}
	}
	return nil
}

// moveBlock loads a block into data, or stores it from there.
func (u *clusterUser) moveBlock(ctx context.Context, call func(context.Context, []cache.Key,
	serve.Place) ([]cache.Outcome, error), key cache.Key, data []byte) (cache.Outcome, error) {
	m, err := u.engine.Alloc(uint64(len(data)), engine.AllocOptions{})
	if err != nil {
		return cache.Failed, err
	}
	r, err := u.engine.RegisterPrivate("block", m.Segment())
	if err == nil {
		err = u.Attach(ctx, r)
	}
	if err != nil {
		return cache.Failed, err
	}
	copy(m.Bytes(), data)
	n := uint64(len(data))
	outcomes, err := call(ctx, []cache.Key{key}, serve.Place{Region: r, Stride: n, Run: n,
		Slots: []uint32{0}})
	copy(data, m.Bytes())
	if err == nil {
		err = outcomeError(outcomes[0])
	}
	if err != nil {
		return cache.Failed, err
	}
	return outcomes[0], nil
}

// absent names the nodes that do not answer, and why; empty: all answer. With further, one of them
// has an address of the network, and this process was not told how to reach such.
func (u *clusterUser) absent() (names string, further bool) {
	var list []string
	for _, n := range u.Stats().Nodes {
		if n.State != cluster.Serving {
			list = append(list, fmt.Sprintf("%s (%s)", n.Name, cmp.Or(n.Why, string(n.State))))
			further = further || u.local && slices.ContainsFunc(n.Addresses,
				func(a string) bool { return strings.HasPrefix(a, "tcp:") })
		}
	}
	return strings.Join(list, ", "), further
}

// nodeReport is a node as this process sees it and, where it may ask, as the node says.
type nodeReport struct {
	cluster.NodeStats
	Report *serve.Report `json:"report,omitempty"`
}

// printStats writes what the nodes are and have.
func (u *clusterUser) printStats(ctx context.Context, w, stderr io.Writer, asJSON bool) error {
	s := u.Stats()
	reports := make([]nodeReport, len(s.Nodes))
	var asked sync.WaitGroup
	for k, n := range s.Nodes {
		reports[k].NodeStats = n
		asked.Go(func() {
			if r, err := u.Report(ctx, n.Name); err == nil {
				reports[k].Report = &r
			}
		})
	}
	asked.Wait()
	if asJSON {
		return printJSON(w, map[string]any{"nodes": reports, "trouble": s.Trouble,
			"refused": s.Refused})
	}
	var rows [][]any
	for _, r := range reports {
		row := []any{r.Name, string(r.State), strings.Join(r.Addresses, " "), r.Weight, nil, nil,
			nil, nil, nil, nil, nil, nil, cmp.Or(r.Why, "-")}
		if of := r.Report; of != nil {
			t := of.Tiers[cache.Memory]
			row[4], row[5], row[6], row[7] = t.Blocks, size(t.Bytes), size(t.Room),
				of.Loads[cache.Done]
			if c := of.Copies; c != nil {
				row[8], row[9], row[10], row[11] = c.Surplus, c.Pending, size(c.Bytes), size(c.Rate)
			}
		}
		rows = append(rows, row)
	}
	for _, text := range s.Refused {
		fmt.Fprintf(stderr, "left out of the directory: %s\n", text)
	}
	if len(s.Nodes) == 0 {
		fmt.Fprintln(stderr, "no node has joined: sluice cache serve says so once it has; "+
			"--prefix must be that of its config")
	}
	if _, further := u.absent(); further {
		fmt.Fprintln(stderr, "nodes of other hosts are reached with --backend: docs/cluster.md")
	}
	if s.Trouble != "" {
		fmt.Fprintf(stderr, "the directory does not answer, these are its last nodes: %s\n",
			s.Trouble)
	}
	return printRows(w, false, []string{"node", "state", "addresses", "weight", "memory_blocks",
		"memory_bytes", "memory_room", "loaded_blocks", "surplus_blocks", "pending_segments",
		"sent_bytes", "sent_a_second_max", "last_error"}, rows)
}
