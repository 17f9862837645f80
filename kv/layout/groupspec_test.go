// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestParseGroup: words and what String makes of them; defaults are left out but for those that
// say how cells lie.
func TestParseGroup(t *testing.T) {
	for text, want := range map[string]GroupSpec{
		"tp=8,layout=nhd,kv=apart,block=16": {TP: 8},
		"tp=1,layout=hnd,kv=fused,block=64": {Order: VLLMFusedHND, BlockTokens: 64},
		"tp=4,pp=2,dp=3,layout=page_first,block=1": {TP: 4, PP: 2, DP: 3, Order: SGLangPage,
			BlockTokens: 1},
		"tp=2,pp=20+60,layout=hnd,kv=cells,block=16": {TP: 2, Cuts: []int{20, 60},
			Order: VLLMCellsHND},
		"tp=1,layout=nhd,kv=apart,block=16,window=ring": {Ring: true},
		"tp=1,layout=nhd,kv=apart,block=16,window=all":  {AllTokens: true},
		"tp=8,layout=nhd,kv=apart,block=16,state=sd,dcp=2,interleave=4": {TP: 8,
			StateOrder: StateSD, Shards: 2, Interleave: 4},
	} {
		got, err := ParseGroup(text)
		require.NoError(t, err)
		want.ensureDefaults()
		require.Equal(t, want, got, text)
		require.Equal(t, text, got.String())
	}
	short, err := ParseGroup("layout=hnd,window=table,state=ds,dcp=1")
	require.NoError(t, err)
	require.Equal(t, "tp=1,layout=hnd,kv=apart,block=16", short.String())
	for _, o := range groupOrders {
		g, err := ParseGroup(strings.TrimSuffix("layout="+o.layout+",kv="+o.kv, ",kv="))
		require.NoError(t, err)
		require.Equal(t, o.order, g.Order)
	}
}

func TestParseGroupRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                   `"", want each key once, as in tp=8,layout=nhd`,
		"tp":                 `"tp", want each key once`,
		"tp=2,tp=2":          `"tp=2", want each key once`,
		"tq=8":               `unknown key "tq": there are tp, pp, dp, layout, kv, block, window,`,
		"tp=0":               `tp "0", want 1 to 1024`,
		"block=x":            `block "x", want 1 to 65536`,
		"pp=3+":              `layers of a stage "", want 1 to 4096`,
		"tp=64,pp=32":        "64 x 32 ranks, want at most 1024",
		"layout=nhc":         `unknown layout "nhc": there are nhd, hnd, cross_layer_nhd,`,
		"kv=both":            `unknown kv "both": there are apart, fused, cells`,
		"kv=both,layout=hnd": `unknown kv "both": there are apart, fused, cells`,
		"layout=page_head,kv=apart": `kv "apart": layout page_head has K and V in one way only: ` +
			`leave kv out`,
		"window=128":   `unknown window "128": there are table, ring, all`,
		"state=dd":     `unknown state "dd": there are ds, sd`,
		"interleave=2": "interleaved by 2 without dcp",
	} {
		_, err := ParseGroup(text)
		require.ErrorIs(t, err, ErrGeometry)
		require.ErrorContains(t, err, want, text)
	}
}

// TestGroupSides: the ranks of all stages, numbered through, with the layers of their stage.
func TestGroupSides(t *testing.T) {
	spec, err := LookupSpec("llama3.1-70b")
	require.NoError(t, err)
	for text, cut := range map[string]int{"tp=4,pp=2,dp=3": 40, "tp=4,pp=20+60,dp=3": 20} {
		g, err := ParseGroup(text)
		require.NoError(t, err)
		sides, err := g.Sides(spec, 2)
		require.NoError(t, err)
		require.Len(t, sides, 8)
		for i, s := range sides {
			require.Equal(t, i, s.Rank)
			require.Equal(t, 2, s.DP)
			require.Equal(t, i%4*2, s.Views[0].First)
			require.Equal(t, i/4*cut, s.Views[0].Layer)
			require.Len(t, s.Views, 2*(cut+i/4*(80-2*cut)))
		}
	}
	states := Spec{"states", []Tensors{{Layers: count(2), Parts: gqa(1, 2, 4).Tensors[0].Parts},
		{Layers: count(2), Positions: 1, Parts: []Cells{{"state", "fp32", 2, 100}}}}}
	for stateBlocks, want := range map[uint32]uint32{0: 9, 4: 4} {
		sides, err := GroupSpec{Blocks: 9, StateBlocks: stateBlocks}.Sides(states, 0)
		require.NoError(t, err)
		require.Equal(t, uint32(9), sides[0].Groups[0].Blocks)
		require.Equal(t, want, sides[0].Groups[1].Blocks)
		require.Equal(t, uint64(want)*2*2*100, sides[0].Regions[1].Bytes)
	}
	uneven, err := GroupSpec{PP: 3}.Sides(gqa(8, 2, 4), 0)
	require.NoError(t, err)
	require.Len(t, uneven[1].Views, 6)
	require.Len(t, uneven[2].Views, 4)
}

func TestGroupSidesRefuse(t *testing.T) {
	for want, g := range map[string]GroupSpec{
		"pp=3, and there are 2 layers":                {PP: 3},
		"stages of 3 layers in all, it keeps a cache": {Cuts: []int{1, 2}},
		"layers of 2 stages, there are 3":             {PP: 3, Cuts: []int{1, 1}},
		"no layers with a window":                     {Ring: true},
		"4 heads do not split over 3 ranks":           {TP: 3},
		"data-parallel group 1 of 1":                  {},
	} {
		dp := 0
		if strings.HasPrefix(want, "data") {
			dp = 1
		}
		_, err := g.Sides(gqa(2, 4, 4), dp)
		require.ErrorIs(t, err, ErrGeometry)
		require.ErrorContains(t, err, want)
	}
}

// TestGroupsHandOver: groups from text with stages, windows, states and shards hand over what
// they should.
func TestGroupsHandOver(t *testing.T) {
	spec := gqa(5, 4, 6)
	windows := gqa(3, 4, 6)
	windows.Tensors[0].Window = 9
	states := Spec{"states", []Tensors{{Layers: count(4), Positions: 3,
		Parts: convCells([]string{"q", "k"}, 8, 16)}}}
	for i, c := range []struct {
		spec     Spec
		from, to string
	}{
		{spec, "tp=2,pp=2,block=4", "tp=4,pp=2+2+1,layout=hnd,kv=fused,block=6"},
		{spec, "tp=8,layout=page_head,block=4", "layout=cross_layer_nhd,block=8"},
		{spec, "tp=8,dcp=2,interleave=2,block=4", "tp=4,layout=layer_first,block=4"},
		{windows, "tp=2,window=all,block=4", "window=ring,block=4"},
		{windows, "tp=2,window=ring,block=4", "window=table,layout=hnd,block=2"},
		{states, "tp=4,state=sd", "tp=2,state=ds"},
	} {
		place := func(text string) []*Side {
			g, err := ParseGroup(text)
			require.NoError(t, err)
			g.Blocks = 20
			sides, err := g.Sides(c.spec, 0)
			require.NoError(t, err)
			return sides
		}
		if strings.Contains(c.from, "dcp") { // of heads that fewer ranks share
			c.spec = gqa(5, 2, 6)
		}
		hand(t, random(t, i), place(c.from), place(c.to), Span{3, 33})
	}
}

// TestIdle: of replicas, those that send nothing are named by rank.
func TestIdle(t *testing.T) {
	for _, c := range []struct {
		layers   int
		from, to string
		want     []int
	}{
		{1, "tp=4", "tp=1", []int{1, 2, 3}},
		{3, "tp=4", "tp=1", []int{3}},
		{4, "tp=4", "tp=1", nil},
		{1, "tp=4", "tp=4", nil},
		{2, "tp=2,pp=2", "tp=1", []int{1, 2}},
	} {
		var groups [2][]*Side
		for i, text := range []string{c.from, c.to} {
			g, err := ParseGroup(text)
			require.NoError(t, err)
			groups[i], err = g.Sides(gqa(c.layers, 1, 4), 0)
			require.NoError(t, err)
		}
		plan, err := NewPlan(groups[0], groups[1])
		require.NoError(t, err)
		require.Equal(t, c.want, plan.Idle(), c)
	}
}

func FuzzParseGroup(f *testing.F) {
	f.Add("tp=8,pp=20+60,dp=2,layout=nhd,kv=fused,block=16")
	f.Add("layout=page_first,window=ring,state=sd,dcp=2,interleave=4")
	spec := gqa(4, 8, 16)
	spec.Tensors[0].Window = 8
	f.Fuzz(func(t *testing.T, text string) {
		g, err := ParseGroup(text)
		if err != nil {
			require.ErrorIs(t, err, ErrGeometry)
			return
		}
		again, err := ParseGroup(g.String())
		require.NoError(t, err)
		require.Equal(t, g, again)
		sides, err := g.Sides(spec, g.DP-1)
		if err != nil {
			require.ErrorIs(t, err, ErrGeometry)
			return
		}
		require.Len(t, sides, g.TP*g.PP)
	})
}
