// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// GroupRanksMax bounds the ranks of a GroupSpec.
const GroupRanksMax = 1 << 10

// GroupSpec says which ranks a group has, and how its engine lays a cache out. ParseGroup
// reads it from text. The zero value of a field means its default.
type GroupSpec struct {
	TP   int   // tensor-parallel ranks of a pipeline stage; default 1
	PP   int   // pipeline stages; default as many as Cuts has, or 1
	Cuts []int // layers of each stage; nil: evenly, the first stages have one more
	DP   int   // data-parallel groups, each of TP x PP ranks; default 1

	Order       Order  // of what is kept by token; default VLLMNHD
	StateOrder  Order  // of states; default StateDS
	BlockTokens int    // default BlockTokens
	Blocks      uint32 // of the pools of a rank, as in Placement: no text says them
	StateBlocks uint32

	AllTokens bool // layers with a window keep the tokens before it, too
	Ring      bool // the tables of windows wrap

	Shards, Interleave int // decode context parallelism, as in Placement; default 1 and 1
}

// groupOrders are the words for each order: its layout, and how K and V lie where the layout
// leaves that open. The first of a layout is its default.
var groupOrders = []struct {
	layout, kv string
	order      Order
}{
	{"nhd", "apart", VLLMNHD},
	{"nhd", "fused", VLLMFusedNHD},
	{"nhd", "cells", VLLMCellsNHD},
	{"hnd", "apart", VLLMHND},
	{"hnd", "fused", VLLMFusedHND},
	{"hnd", "cells", VLLMCellsHND},
	{"cross_layer_nhd", "", VLLMCrossNHD},
	{"cross_layer_hnd", "", VLLMCrossHND},
	{"layer_first", "", SGLangLayer},
	{"page_first", "", SGLangPage},
	{"page_first_direct", "", SGLangDirect},
	{"page_head", "", SGLangPageHead},
}

// groupKeys are all keys.
var groupKeys = []string{"tp", "pp", "dp", "layout", "kv", "block", "window", "state", "dcp",
	"interleave"}

// The values of window and state.
var (
	groupWindows = []string{"table", "ring", "all"}
	groupStates  = []string{"ds", "sd"}
)

// ParseGroup reads a group of ranks from words such as "tp=8,layout=nhd,block=16", each key
// once at most, and fills in the defaults. The keys are:
//
//	tp, pp, dp   ranks; pp also as the layers of each stage: pp=20+60
//	layout       nhd, hnd, cross_layer_nhd and cross_layer_hnd of vLLM; layer_first, page_first,
//	             page_first_direct and page_head of SGLang
//	kv           of nhd and hnd: K and V apart, fused in a block, or cells of both
//	block        tokens
//	window       of layers with a window: a table as for others, a ring, or all tokens are kept
//	state        convolution states with channels (ds) or positions (sd) outermost
//	dcp, interleave   shards of tokens, and tokens in a row
//
// Errors are ErrGeometry. They name the keys or the values that there are.
func ParseGroup(text string) (GroupSpec, error) {
	var g GroupSpec
	values := make(map[string]string)
	for word := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(word, "=")
		if _, twice := values[key]; !ok || twice {
			return g, fmt.Errorf("group %q: %q, want each key once, as in tp=8,layout=nhd: %w",
				text, word, ErrGeometry)
		}
		values[key] = value
		if err := g.set(key, value); err != nil {
			return g, fmt.Errorf("group %q: %w", text, err)
		}
	}
	if err := g.setOrder(values["layout"], values["kv"]); err != nil {
		return g, fmt.Errorf("group %q: %w", text, err)
	}
	g.ensureDefaults()
	if err := g.check(); err != nil {
		return g, fmt.Errorf("group %q: %w", text, err)
	}
	return g, nil
}

// set takes one key but layout and kv, which go together.
func (g *GroupSpec) set(key, value string) error {
	switch key {
	case "tp":
		return setNumber(&g.TP, key, value, GroupRanksMax)
	case "dp":
		return setNumber(&g.DP, key, value, RanksMax)
	case "block":
		return setNumber(&g.BlockTokens, key, value, TokensMax)
	case "dcp":
		return setNumber(&g.Shards, key, value, GroupRanksMax)
	case "interleave":
		return setNumber(&g.Interleave, key, value, TokensMax)
	case "layout", "kv":
		return nil
	case "pp":
		return g.setStages(value)
	case "window":
		i, err := oneOf(key, value, groupWindows)
		g.Ring, g.AllTokens = i == 1, i == 2
		return err
	case "state":
		i, err := oneOf(key, value, groupStates)
		g.StateOrder = [...]Order{StateDS, StateSD}[i]
		return err
	}
	_, err := oneOf("key", key, groupKeys)
	return err
}

func setNumber(n *int, key, value string, limit int) error {
	var err error
	if *n, err = strconv.Atoi(value); err != nil || *n < 1 || *n > limit {
		return fmt.Errorf("%s %q, want 1 to %d: %w", key, value, limit, ErrGeometry)
	}
	return nil
}

// setStages reads "4", or the layers of each stage: "20+60".
func (g *GroupSpec) setStages(value string) error {
	if !strings.Contains(value, "+") {
		return setNumber(&g.PP, "pp", value, GroupRanksMax)
	}
	for layers := range strings.SplitSeq(value, "+") {
		n := 0
		if err := setNumber(&n, "layers of a stage", layers, LayersMax); err != nil {
			return err
		}
		g.Cuts = append(g.Cuts, n)
	}
	g.PP = len(g.Cuts)
	return nil
}

// setOrder finds the order of a layout; "" is the default of either.
func (g *GroupSpec) setOrder(name, kv string) error {
	if name == "" {
		name = groupOrders[0].layout
	}
	var names, kvs []string
	for _, o := range groupOrders {
		if o.layout == name && (kv == "" || o.kv == kv) {
			g.Order = o.order
			return nil
		}
		names = append(names, o.layout)
		if o.layout == name && o.kv != "" {
			kvs = append(kvs, o.kv)
		}
	}
	if !slices.Contains(names, name) {
		_, err := oneOf("layout", name, slices.Compact(names))
		return err
	}
	if kvs == nil {
		return fmt.Errorf("kv %q: layout %s has K and V in one way only: leave kv out: %w", kv,
			name, ErrGeometry)
	}
	_, err := oneOf("kv", kv, kvs)
	return err
}

// oneOf returns which of the names it is; 0 beside an error that lists them.
func oneOf(what, name string, names []string) (int, error) {
	if i := slices.Index(names, name); i >= 0 {
		return i, nil
	}
	return 0, fmt.Errorf("unknown %s %q: there are %s: %w", what, name, strings.Join(names, ", "),
		ErrGeometry)
}

func (g *GroupSpec) ensureDefaults() {
	if g.PP == 0 {
		g.PP = len(g.Cuts)
	}
	for _, n := range []*int{&g.TP, &g.PP, &g.DP, &g.Shards, &g.Interleave} {
		*n = max(*n, 1)
	}
	if g.BlockTokens == 0 {
		g.BlockTokens = BlockTokens
	}
	if g.Order == "" {
		g.Order = VLLMNHD
	}
	if g.StateOrder == "" {
		g.StateOrder = StateDS
	}
}

// check bounds what Sides makes; NewSide checks the rest.
func (g *GroupSpec) check() error {
	if g.TP*g.PP > GroupRanksMax || g.PP > GroupRanksMax || g.TP > GroupRanksMax {
		return fmt.Errorf("%d x %d ranks, want at most %d: %w", g.TP, g.PP, GroupRanksMax,
			ErrGeometry)
	}
	if g.Cuts != nil && len(g.Cuts) != g.PP {
		return fmt.Errorf("layers of %d stages, there are %d: %w", len(g.Cuts), g.PP, ErrGeometry)
	}
	if g.Interleave > 1 && g.Shards == 1 {
		return fmt.Errorf("tokens interleaved by %d without dcp: %w", g.Interleave, ErrGeometry)
	}
	return nil
}

// String returns words that ParseGroup reads. An order without a name stands as it is.
func (g GroupSpec) String() string {
	g.ensureDefaults()
	words := []string{fmt.Sprintf("tp=%d", g.TP)}
	add := func(is bool, format string, args ...any) {
		if is {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	if g.Cuts != nil {
		cuts := strings.Trim(fmt.Sprint(g.Cuts), "[]")
		add(true, "pp=%s", strings.ReplaceAll(cuts, " ", "+"))
	}
	add(g.Cuts == nil && g.PP > 1, "pp=%d", g.PP)
	add(g.DP > 1, "dp=%d", g.DP)
	name, kv := string(g.Order), ""
	for _, o := range groupOrders {
		if o.order == g.Order {
			name, kv = o.layout, o.kv
		}
	}
	add(true, "layout=%s", name)
	add(kv != "", "kv=%s", kv)
	add(true, "block=%d", g.BlockTokens)
	add(g.AllTokens, "window=%s", groupWindows[2])
	add(g.Ring && !g.AllTokens, "window=%s", groupWindows[1])
	add(g.StateOrder == StateSD, "state=%s", groupStates[1])
	add(g.Shards > 1, "dcp=%d,interleave=%d", g.Shards, g.Interleave)
	return strings.Join(words, ",")
}

// Sides lays out the ranks of one data-parallel group, by stage and then by tensor-parallel
// rank, which is how they are numbered. Errors are ErrGeometry.
func (g GroupSpec) Sides(spec Spec, dp int) ([]*Side, error) {
	g.ensureDefaults()
	if err := g.check(); err != nil {
		return nil, err
	}
	if dp < 0 || dp >= g.DP {
		return nil, fmt.Errorf("data-parallel group %d of %d: %w", dp, g.DP, ErrGeometry)
	}
	stages, err := g.stages(&spec)
	if err != nil {
		return nil, err
	}
	if spec.Tensors = slices.Clone(spec.Tensors); g.AllTokens {
		for i := range spec.Tensors {
			spec.Tensors[i].Window = 0
		}
	}
	p := Placement{TP: g.TP, DP: dp, BlockTokens: g.BlockTokens, Blocks: g.Blocks,
		StateBlocks: g.StateBlocks, Order: g.Order, StateOrder: g.StateOrder, Shards: g.Shards,
		Interleave: g.Interleave, Ring: g.Ring}
	var sides []*Side
	for _, p.Layers = range stages {
		for p.Rank = range g.TP {
			s, err := NewSide(spec, p)
			if err != nil {
				return nil, err
			}
			s.Rank = len(sides)
			sides = append(sides, s)
		}
	}
	return sides, nil
}

// stages cuts the layers of a model.
func (g *GroupSpec) stages(spec *Spec) (list [][2]int, err error) {
	layers, window := 0, false
	for _, t := range spec.Tensors {
		for _, l := range t.Layers {
			layers = max(layers, l+1)
		}
		window = window || t.Window > 0
	}
	if (g.Ring || g.AllTokens) && !window {
		return nil, fmt.Errorf("model %q has no layers with a window: leave window out: %w",
			spec.Name, ErrGeometry)
	}
	if g.PP > layers {
		return nil, fmt.Errorf("model %q: pp=%d, and there are %d layers: %w", spec.Name, g.PP,
			layers, ErrGeometry)
	}
	at := 0
	for i := range g.PP {
		n := layers / g.PP
		if i < layers%g.PP {
			n++
		}
		if g.Cuts != nil {
			n = g.Cuts[i]
		}
		list = append(list, [2]int{at, at + n})
		at += n
	}
	if at != layers {
		return nil, fmt.Errorf("model %q: stages of %d layers in all, it keeps a cache of %d: %w",
			spec.Name, at, layers, ErrGeometry)
	}
	return list, nil
}
