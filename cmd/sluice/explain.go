// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// explainFlags are the words of the command line.
type explainFlags struct {
	local, remote    string
	backend          backendSpec
	sameHost, asJSON bool
	groups           groupsFlags

	memories []string // the flags that concern two memories, not two groups
}

func newExplain() *cobra.Command {
	f := explainFlags{backend: autoSpec()}
	c := &cobra.Command{
		Use:   "explain",
		Short: "Say which backends could move bytes between two memories, and which would",
		Long: `Say which backends could move bytes between two memories, which would, and how.
The answer comes from two engines in this process. For a peer on another host they
are connected as such a peer would be, over the network devices of this one.

With --prefill and --decode it says instead how the KV cache of --model goes from one group of
ranks to another that lays it out in another way: which rank pushes or pulls what by how many
patterns, which ranks send nothing, and how many descriptors a list would have had. Groups that
cannot exchange a cache are refused, with a cure. Nothing is opened.

` + specHelp + "\n\n" + groupsHelp,
		Example: `  sluice explain --local dram --remote dram
  sluice explain --backend ucx:transports=tcp
  sluice explain --local dram --remote dram --same-host=false --json
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
	s.Var(&f.backend, "backend", "consider this one alone: "+
		strings.Join(backendNames(driver.InProcess), ", "))
	s.BoolVar(&f.sameHost, "same-host", true, "the peer is another process of this host")
	s.VisitAll(func(g *pflag.Flag) { f.memories = append(f.memories, g.Name) })
	f.groups.register(c, "")
	s.BoolVar(&f.asJSON, "json", false, "print JSON")
}

func (f *explainFlags) run(c *cobra.Command) error {
	if f.groups.given(c) {
		if err := refuse(c, "--%s beside --prefill and --decode: a plan does not depend on it",
			f.memories...); err != nil {
			return err
		}
		return explainPlan(c.OutOrStdout(), &f.groups, f.asJSON)
	}
	q := question{backend: f.backend, sameHost: f.sameHost}
	var err error
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
	if f.asJSON {
		err = printJSON(c.OutOrStdout(), x)
	} else {
		x.Peer = "" // any
		_, err = fmt.Fprint(c.OutOrStdout(), x.String())
	}
	if err == nil && x.Chosen == "" {
		return errNoRoute
	}
	return err
}

// errNoRoute ends explain with status 1 where no backend can: a script may ask.
var errNoRoute = errors.New("no backend can move these bytes: the reasons stand above")

var kinds = map[string]driver.Kind{"dram": driver.DRAM, "hbm": driver.HBM, "file": driver.File}

func kindNames() []string { return slices.Sorted(maps.Keys(kinds)) }

func parseKind(name string) (driver.Kind, error) {
	k, ok := kinds[name]
	if !ok {
		return 0, usagef("unknown memory %q: there are %s", name, strings.Join(kindNames(), ", "))
	}
	return k, nil
}

// question says which route explain is asked about.
type question struct {
	backend       backendSpec
	local, remote driver.Kind
	sameHost      bool
}

// ask opens every backend that is meant. Those that could serve are asked through
// two engines, as a program would; for the others the obstacle is named.
func (q *question) ask(ctx context.Context) (engine.Explanation, error) {
	x := engine.Explanation{Peer: "there", Local: q.local.String(), Remote: q.remote.String(),
		SameHost: q.sameHost}
	var fit, links []string
	leaves := false // a link leads to another process
	for _, b := range byname.All() {
		if q.backend.name != auto && q.backend.name != b.Name {
			continue
		}
		obstacle, link, err := q.obstacle(b)
		if err != nil {
			return x, err
		}
		if link {
			links = append(links, b.Name)
			leaves = leaves || b.Reach != driver.InProcess
		}
		if obstacle == "" {
			fit = append(fit, b.Name)
		} else {
			x.Candidates = append(x.Candidates, engine.Candidate{Backend: b.Name, Reason: obstacle})
		}
	}
	if len(fit) == 0 && leaves && q.backend.name == auto && q.local != driver.HBM &&
		q.remote != driver.HBM {
		fit = links // no backend alone: the engines say whether a chain can
		x.Candidates = slices.DeleteFunc(x.Candidates, func(c engine.Candidate) bool {
			return slices.Contains(links, c.Backend)
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
		for i, c := range asked.Candidates { // ucx begins with where the peer is: here
			_, rest, found := strings.Cut(c.Reason, "; ")
			if found && c.Usable && c.Backend == "ucx" {
				asked.Candidates[i].Reason = rest
			}
		}
	}
	return asked, nil
}

// open opens a backend with the options of the command line. A peer on another host is not reached
// by what ucx has for peers of this one, nor over the loopback.
func (q *question) open(name string) (driver.Backend, error) {
	one := backendSpec{text: name, name: name}
	if q.backend.name == name {
		one = q.backend
	}
	if name == "tcp" && !q.sameHost && !says(one.words, "listen") {
		one.words = append([]string{"listen=:0"}, one.words...)
	}
	if name != "ucx" || q.sameHost {
		return one.openOne(1)
	}
	var cfg ucx.Config
	if err := byname.SetOptions(&cfg, one.words); err != nil {
		return nil, &usageError{err}
	}
	cfg, err := cfg.Elsewhere()
	if err != nil {
		return nil, err
	}
	return ucx.New(cfg)
}

// obstacle says why a backend cannot serve alone, as far as it says so itself, and whether it may
// be a link of a chain.
func (q *question) obstacle(known byname.Backend) (why string, link bool, err error) {
	if opensPort(known) && q.backend.name == auto && q.sameHost {
		return "not asked: it opens a port on the network, which a peer of this host does not " +
			"need: --backend " + known.Name + " asks it", false, nil
	}
	b, err := q.open(known.Name)
	if errors.Is(err, driver.ErrUnavailable) {
		return err.Error(), false, nil
	}
	if err != nil {
		return "", false, err
	}
	caps := b.Caps()
	if err := b.Close(); err != nil {
		return "", false, fmt.Errorf("close backend %s: %w", known.Name, err)
	}
	link = q.sameHost || caps.Reach != driver.SameHost
	if caps.Reach == driver.InProcess && caps.Pairs.Serves(driver.DRAM, driver.DRAM) {
		link = false // it would lead from this engine to the one that stands for another process
	}
	return q.unfit(caps), link, nil
}

// unfit says what an open backend lacks; "": nothing.
func (q *question) unfit(caps driver.Caps) string {
	switch {
	case caps.Name == "ucx" && (q.local == driver.HBM || q.remote == driver.HBM):
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
func (q *question) connect(ctx context.Context, fit []string) (x engine.Explanation, err error) {
	var ends [2]*engine.Engine
	var regions [2]*engine.Region
	for i, kind := range []driver.Kind{q.local, q.remote} {
		var list []driver.Backend
		for _, name := range fit {
			b, err := q.open(name)
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
