// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// explainFlags are the words of the command line.
type explainFlags struct {
	local, remote, backend string
	sameHost, asJSON       bool
	network                networkFlags
	there                  remoteFlags
	groups                 groupsFlags

	memories []string // the flags that say what to ask where no running engine is
	peer     []string // and those about one
}

func newExplain() *cobra.Command {
	var f explainFlags
	c := &cobra.Command{
		Use:   "explain",
		Short: "Say which backends could move bytes between two memories, and which would",
		Long: `Say which backends could move bytes between two memories, which would, and how.
The answer comes from two engines in this process. For a peer on another host they
are connected as such a peer would be, over the network devices of this one. With --peer it
comes from a running engine that serves there, one answer for each of its regions.

With --prefill and --decode it says instead how the KV cache of --model goes from one group of
ranks to another that lays it out in another way: which rank pushes or pulls what by how many
patterns, which ranks send nothing, and how many descriptors a list would have had. Groups that
cannot exchange a cache are refused, with a cure. Nothing is opened.

` + groupsHelp,
		Example: `  sluice explain --local dram --remote dram
  sluice explain --backend ucx --transports tcp
  sluice explain --local dram --remote dram --same-host=false --json
  sluice explain --peer 10.0.0.2:7000 --cert b.pem --key b-key.pem --ca ca.pem
  sluice explain --model llama3.1-70b --prefill tp=8,layout=nhd --decode tp=4,layout=hnd,block=64`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return f.run(c) },
	}
	f.register(c)
	return c
}

func (f *explainFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&f.local, "local", "dram", "this side's memory: "+strings.Join(kindNames(), ", "))
	s.StringVar(&f.remote, "remote", "dram", "the peer's memory, one of the same")
	s.StringVar(&f.backend, "backend", auto, "consider this one alone: "+
		backendNames(driver.InProcess))
	s.BoolVar(&f.sameHost, "same-host", true, "the peer is another process of this host")
	f.network.register(c)
	s.VisitAll(func(g *pflag.Flag) { f.memories = append(f.memories, g.Name) })
	f.there.registerPeer(c)
	s.VisitAll(func(g *pflag.Flag) {
		if !slices.Contains(f.memories, g.Name) {
			f.peer = append(f.peer, g.Name)
		}
	})
	f.groups.register(c, "")
	s.BoolVar(&f.asJSON, "json", false, "print JSON")
}

func (f *explainFlags) run(c *cobra.Command) error {
	if f.groups.given(c) {
		if err := refuse(c, "--%s beside --prefill and --decode: a plan does not depend on it",
			append(f.peer, f.memories...)...); err != nil {
			return err
		}
		return explainPlan(c.OutOrStdout(), &f.groups, f.asJSON)
	}
	if f.there.peer != "" {
		if err := refuse(c, "--%s beside --peer: a running engine answers for its own regions, by "+
			"all its ways", f.memories...); err != nil {
			return err
		}
		return explainPeer(c.Context(), c.OutOrStdout(), &f.there, f.asJSON)
	}
	if err := refuse(c, "--%s is of --peer alone", f.peer...); err != nil {
		return err
	}
	n := &f.network
	err := n.settleAsked(f.backend)
	if err != nil {
		return err
	}
	var usage *usageError // what else is wrong is part of the answer
	if err := n.examine(f.backend); errors.As(err, &usage) {
		return err
	}
	q := question{backend: f.backend, sameHost: f.sameHost, options: openOptions{threads: 1,
		ucx: n.ucx, rdma: n.rdma, tcp: n.tcp, elsewhere: !f.sameHost}}
	if q.local, err = parseKind(f.local); err != nil {
		return err
	}
	if q.remote, err = parseKind(f.remote); err != nil {
		return err
	}
	x, err := q.ask(c.Context())
	if err != nil {
		return err
	}
	return printExplanations(c.OutOrStdout(), f.asJSON, explained{Explanation: x})
}

// errNoRoute ends explain with status 1 where no backend can: a script may ask.
var errNoRoute = errors.New("no backend can move these bytes: the reasons stand above")

// explained is an answer, and the peer's region that it is about; empty: of no running engine.
type explained struct {
	Region string `json:"region,omitempty"`
	engine.Explanation
}

func (x *explained) heading() string {
	if x.Region == "" {
		return ""
	}
	return "region " + x.Region + ": "
}

// printExplanations prints answers, of which each must have a route.
func printExplanations(w io.Writer, asJSON bool, list ...explained) error {
	var err error
	routes := true
	for i := range list {
		routes = routes && list[i].Chosen != ""
		if !asJSON && err == nil {
			_, err = fmt.Fprint(w, list[i].heading(), list[i].String())
		}
	}
	switch {
	case asJSON && len(list) == 1:
		err = printJSON(w, list[0])
	case asJSON:
		err = printJSON(w, list)
	}
	if err == nil && !routes {
		return errNoRoute
	}
	return err
}

// explainPeer asks an engine about its ways to each region of a running one.
func explainPeer(ctx context.Context, w io.Writer, r *remoteFlags, asJSON bool) error {
	if err := r.check(); err != nil {
		return err
	}
	var list []explained
	err := r.with(ctx, func(e *engine.Engine, p *engine.Peer) (err error) {
		return eachRegion(e, p, func(m *engine.Remote, x engine.Explanation) {
			list = append(list, explained{m.Name(), x})
		})
	})
	if err != nil {
		return err
	}
	if len(list) == 0 {
		return fmt.Errorf("%s describes no region", r.peer)
	}
	return printExplanations(w, asJSON, list...)
}

var kinds = map[string]driver.Kind{"dram": driver.DRAM, "hbm": driver.HBM, "file": driver.File}

func kindNames() []string { return slices.Sorted(maps.Keys(kinds)) }

func parseKind(name string) (driver.Kind, error) {
	k, ok := kinds[name]
	if !ok {
		return 0, usagef("unknown memory %q: there are %s", name, strings.Join(kindNames(), ", "))
	}
	return k, nil
}

// question is what explain answers.
type question struct {
	backend       string
	local, remote driver.Kind
	sameHost      bool
	options       openOptions
}

// ask opens every backend that is meant. Those that could serve are asked through
// two engines, as a program would; for the others the obstacle is named.
func (q *question) ask(ctx context.Context) (engine.Explanation, error) {
	if q.backend != auto {
		if _, err := findMaker(q.backend, driver.InProcess); err != nil {
			return engine.Explanation{}, err
		}
	}
	q.options.nearOnly = q.backend == auto && q.sameHost && len(q.options.ucx.given()) == 0
	x := engine.Explanation{Peer: "there", Local: q.local.String(), Remote: q.remote.String(),
		SameHost: q.sameHost}
	var fit, links []maker
	for _, m := range makers {
		if q.backend != auto && q.backend != m.name {
			continue
		}
		obstacle, link, err := q.obstacle(m)
		if err != nil {
			return x, err
		}
		if link {
			links = append(links, m)
		}
		if obstacle == "" {
			fit = append(fit, m)
		} else {
			x.Candidates = append(x.Candidates, engine.Candidate{Backend: m.name, Reason: obstacle})
		}
	}
	if len(fit) == 0 && q.backend == auto && q.local != driver.HBM && q.remote != driver.HBM {
		fit = links // no backend alone: the engines say whether a chain can
		x.Candidates = slices.DeleteFunc(x.Candidates, func(c engine.Candidate) bool {
			return slices.ContainsFunc(links, func(m maker) bool { return m.name == c.Backend })
		})
	}
	if len(fit) == 0 {
		x.Why = "no backend can"
		return x, nil
	}
	asked, err := q.connect(ctx, fit)
	if err != nil {
		return x, err
	}
	asked.Candidates = append(asked.Candidates, x.Candidates...)
	if !q.sameHost {
		asked.SameHost = false
		asked.Why += "; asked between two engines of this host, over what leads to others"
	}
	return asked, nil
}

// obstacle says why a backend cannot serve alone, as far as it says so itself, and whether it may
// be a link of a chain.
func (q *question) obstacle(m maker) (why string, link bool, err error) {
	if m.opensPort() && q.backend == auto && q.sameHost {
		return "not asked: it opens a port on the network, which a peer of this host does not " +
				"need: --backend " + m.name + " asks it",
			false, nil
	}
	if m.name == ucxName {
		if err := q.options.ucx.examine(ucxName); errors.Is(err, driver.ErrUnavailable) {
			return err.Error(), false, nil
		} else if err != nil {
			return "", false, err
		}
	}
	b, err := openBackend(m, q.options)
	if errors.Is(err, driver.ErrUnavailable) {
		return err.Error(), false, nil
	}
	if err != nil {
		return "", false, err
	}
	caps := b.Caps()
	if err := b.Close(); err != nil {
		return "", false, fmt.Errorf("close backend %s: %w", m.name, err)
	}
	link = q.sameHost || caps.Reach != driver.SameHost
	if caps.Reach == driver.InProcess && caps.Pairs.Serves(driver.DRAM, driver.DRAM) {
		link = false // it would lead from this engine to the one that stands for another process
	}
	return q.unfit(m, caps), link, nil
}

// unfit says what an open backend lacks; "": nothing.
func (q *question) unfit(m maker, caps driver.Caps) string {
	switch {
	case m.name == ucxName && (q.local == driver.HBM || q.remote == driver.HBM):
		return "does not serve device memory: UCX has transports for it only where it was built " +
			"with CUDA, which distributions do not"
	case !caps.Pairs.Serves(q.local, q.remote):
		return fmt.Sprintf("does not serve %v to %v", q.local, q.remote)
	case q.local == driver.HBM || q.remote == driver.HBM:
		return fmt.Sprintf("serves %v to %v, but this command has no device memory to ask with: "+
			"a program that has some asks by Engine.Explain", q.local, q.remote)
	case caps.Reach == driver.InProcess:
		return "stays within one process"
	case !q.sameHost && caps.Reach < driver.Network:
		return "stays within one host"
	}
	return ""
}

// connect asks an engine about its way to another one.
func (q *question) connect(ctx context.Context, fit []maker) (x engine.Explanation, err error) {
	var ends [2]*engine.Engine
	var regions [2]*engine.Region
	for i, kind := range []driver.Kind{q.local, q.remote} {
		var list []driver.Backend
		for _, m := range fit {
			b, err := openBackend(m, q.options)
			if err != nil {
				return x, errors.Join(err, closeAll(list))
			}
			list = append(list, b)
		}
		if ends[i], err = engine.Open(engine.Config{Name: [...]string{"here", "there"}[i],
			Backends: list}); err != nil {
			return x, err
		}
		defer ends[i].Close()
		segment, free, err := sampleSegment(ends[i], kind)
		if err != nil {
			return x, err
		}
		defer free()
		if regions[i], err = ends[i].Register("sample", segment); err != nil {
			return x, err
		}
	}
	description, err := ends[1].Describe()
	if err != nil {
		return x, err
	}
	peer, err := ends[0].Connect(ctx, description)
	if err != nil {
		return x, err
	}
	remote, err := peer.Remote("sample")
	if err != nil {
		return x, err
	}
	return ends[0].Explain(peer, regions[0], remote)
}

// sampleSegment is a little memory of a kind, as a program of that engine has it.
func sampleSegment(e *engine.Engine, k driver.Kind) (driver.Segment, func(), error) {
	const size = 64 << 10
	switch k {
	case driver.DRAM:
		m, err := e.Alloc(size, engine.AllocOptions{Purpose: "explain"})
		if err != nil {
			return driver.Segment{}, nil, err
		}
		return m.Segment(), func() { m.Close() }, nil
	case driver.File:
		f, err := os.CreateTemp("", "sluice-explain-*")
		if err != nil {
			return driver.Segment{}, nil, fmt.Errorf("make a sample file: %w", err)
		}
		os.Remove(f.Name()) // stays open, and leaves nothing behind
		if err := f.Truncate(size); err != nil {
			return driver.Segment{}, nil, errors.Join(fmt.Errorf("make a sample file: %w", err),
				f.Close())
		}
		return driver.Segment{Kind: driver.File, Len: size, FD: int(f.Fd())}, func() {
			f.Close()
		}, nil
	}
	return driver.Segment{}, nil, fmt.Errorf("no sample of %v here: %w", k, driver.ErrNotSupported)
}
