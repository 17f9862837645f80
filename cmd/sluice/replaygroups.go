// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/kv/layout"
)

// groupRequests is the default of --requests between two groups.
const groupRequests = 10

// replayGroupsFlags are the flags of a replay between two groups of ranks.
type replayGroupsFlags struct {
	prefill, decode string
	tokens, scale   int
	hits            float64
	kill            string
	checksum        bool
}

// replayGroupsHelp says what --prefill and --decode do.
const replayGroupsHelp = `

With --prefill and --decode, it is two groups of ranks that hand over, each rank a process
of its own, whatever their layouts, two requests at once. The decode ranks compare every
byte with what it must be by its layer, part, head and token alone, and digests of each
layer with those of the senders. The prefill ranks find what is written to their blocks. So
that it fits a small machine, only the first layers of the model are kept, with --scale N
one in N, and lengths are cut to 8,192 tokens unless --tokens says otherwise; the output
says so. --prefix-hits has the decode side keep the first tokens of a share of the requests,
whole blocks or not: what is written there is found. --kill kills a rank of that side while
the last requests are on their way; all others must end those within --timeout.
` + groupsHelp

func (g *replayGroupsFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&g.prefill, "prefill", "", "the sending group of ranks, such as "+
		"tp=8,layout=nhd,block=16")
	s.StringVar(&g.decode, "decode", "", "the receiving group of ranks")
	s.IntVar(&g.tokens, "tokens", 0, "of each request, between groups (default: those of the "+
		"trace, at most 8192)")
	s.IntVar(&g.scale, "scale", 0, "keep one layer in so many, between groups; 1: all (default: "+
		"as many as fit in 768 MiB)")
	s.Float64Var(&g.hits, "prefix-hits", 0, "share of the requests of whose tokens the decode "+
		"side has the first ones, 0 to 1; above 0 at least one")
	s.StringVar(&g.kill, "kill", "", "kill a rank in mid-flight: prefill or decode")
	s.BoolVar(&g.checksum, "checksum", true, "between groups, compare digests of each layer on "+
		"both sides before a rank hears of it")
}

// groupsOnly and streamOnly are the flags that go with one kind of replay alone.
var (
	groupsOnly = []string{"tokens", "scale", "prefix-hits", "kill", "checksum"}
	streamOnly = []string{"speed", "pool"}
)

// given reports whether it is a replay between groups; flags that have no meaning are usage errors.
func (g *replayGroupsFlags) given(c *cobra.Command) (bool, error) {
	s := c.Flags()
	groups := s.Changed("prefill") || s.Changed("decode")
	without, how := groupsOnly, "goes with --prefill and --decode"
	if groups {
		without, how = streamOnly, "does not go with --prefill and --decode"
	}
	for _, name := range without {
		if s.Changed(name) {
			return groups, usagef("--%s %s", name, how)
		}
	}
	return groups, nil
}

// check finds usage errors.
func (g *replayGroupsFlags) check(c *cobra.Command) error {
	s := c.Flags()
	switch {
	case s.Changed("tokens") && (g.tokens < 1 || g.tokens > layout.BlocksMax):
		return usagef("--tokens %d: want 1 to %d", g.tokens, uint64(layout.BlocksMax))
	case s.Changed("tokens") && s.Changed("trace"):
		return usagef("--tokens and --trace: want one of them")
	case s.Changed("scale") && g.scale < 1:
		return usagef("--scale %d: want at least 1", g.scale)
	case !(g.hits >= 0 && g.hits <= 1):
		return usagef("--prefix-hits %v: want 0 to 1", g.hits)
	case !slices.Contains([]string{"", "prefill", "decode"}, g.kill):
		return usagef("--kill %q: want prefill or decode", g.kill)
	}
	return nil
}
