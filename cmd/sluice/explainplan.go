// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/replay"
)

// groupsFlags name two groups of ranks and the model that both serve.
type groupsFlags struct{ prefill, decode, model string }

// groupModels are the models of layout.Names that have state layers, which only groups of ranks can
// hand over.
var groupModels = []string{"qwen3-next-80b", "nemotron-h-8b", "kimi-linear-48b"}

// groupsHelp explains to the user how to describe a group.
const groupsHelp = `A group of ranks is words such as tp=8,layout=nhd,block=16. Its keys are tp, pp (stages, or
the layers of each: pp=20+60) and dp; layout: nhd, hnd, cross_layer_nhd, cross_layer_hnd
(vLLM), layer_first, page_first, page_first_direct, page_head (SGLang); kv, of nhd and hnd:
apart, fused in a block, or cells of both; block: its tokens; window, of layers with a
window: table, ring, or all tokens are kept; state: ds or sd; dcp and interleave: shards of
tokens.`

func (f *groupsFlags) register(c *cobra.Command, of string) {
	s := c.Flags()
	s.StringVar(&f.prefill, "prefill", "", of+"the sending group of ranks, such as "+
		"tp=8,layout=nhd,block=16")
	s.StringVar(&f.decode, "decode", "", of+"the receiving group of ranks")
	s.StringVar(&f.model, "model", "", of+"whose cache it is, such as llama3.1-70b")
}

// given reports whether the command line has one of them.
func (f *groupsFlags) given(c *cobra.Command) bool {
	s := c.Flags()
	return s.Changed("prefill") || s.Changed("decode") || s.Changed("model")
}

// parse reads them; what is wrong with them is a usage error.
func (f *groupsFlags) parse() (spec layout.Spec, from, to layout.GroupSpec, err error) {
	var missing []string
	for _, flag := range []struct{ name, value string }{{"--prefill", f.prefill},
		{"--decode", f.decode}, {"--model", f.model}} {
		if flag.value == "" {
			missing = append(missing, flag.name)
		}
	}
	if missing != nil {
		verb := "is"
		if len(missing) > 1 {
			verb = "are"
		}
		return spec, from, to, usagef("--prefill, --decode and --model go together: %s %s missing",
			strings.Join(missing, ", "), verb)
	}
	if from, err = layout.ParseGroup(f.prefill); err != nil {
		return spec, from, to, &usageError{fmt.Errorf("--prefill: %w", err)}
	}
	if to, err = layout.ParseGroup(f.decode); err != nil {
		return spec, from, to, &usageError{fmt.Errorf("--decode: %w", err)}
	}
	if spec, err = layout.LookupSpec(f.model); err != nil {
		return spec, from, to, &usageError{fmt.Errorf("--model: %w", err)}
	}
	return spec, from, to, nil
}

// explainPlan prints what the plan between two groups says.
func explainPlan(w io.Writer, f *groupsFlags, asJSON bool) error {
	spec, from, to, err := f.parse()
	if err != nil {
		return err
	}
	p, err := replay.PlanGroups(spec, from, to)
	if errors.Is(err, layout.ErrGeometry) {
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(w, p)
	}
	_, err = io.WriteString(w, p.String())
	return err
}
