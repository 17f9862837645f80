// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// figures are the published ones, computed elsewhere: bytes of a token in a layer and in all, of a
// token in a layer at TP4 and TP8, a prompt of 8,192 tokens in MiB, rounded.
var figures = []struct {
	name                                   string
	layers                                 int
	tokenLayer, token, tp4, tp8, promptMiB uint64
}{
	{"llama3.1-8b", 32, 4096, 131072, 1024, 512, 1024},
	{"llama3.1-70b", 80, 4096, 327680, 1024, 512, 2560},
	{"llama3.1-405b", 126, 4096, 516096, 1024, 512, 4032},
	{"qwen3-8b", 36, 4096, 147456, 1024, 512, 1152},
	{"qwen3-32b", 64, 4096, 262144, 1024, 512, 2048},
	{"qwen3-30b-a3b", 48, 2048, 98304, 512, 512, 768},
	{"qwen3-235b-a22b", 94, 2048, 192512, 512, 512, 1504},
	{"gpt-oss-20b", 24, 2048, 49152, 512, 256, 384},
	{"gpt-oss-120b", 36, 2048, 73728, 512, 256, 576},
	{"deepseek-v3", 61, 1152, 70272, 1152, 1152, 549},
	{"deepseek-r1", 61, 1152, 70272, 1152, 1152, 549},
	{"deepseek-v3-fp8", 61, 576, 35136, 576, 576, 275},
	{"deepseek-r1-fp8", 61, 576, 35136, 576, 576, 275},
	{"deepseek-v3.2-latent", 61, 656, 40016, 656, 656, 313},
	{"deepseek-v3.2-indexer", 61, 132, 8052, 132, 132, 63},
	{"deepseek-v3.2", 61, 788, 48068, 788, 788, 376},
}

func TestModelsWeighWhatIsPublished(t *testing.T) {
	for _, f := range figures {
		spec, err := LookupSpec(f.name)
		require.NoError(t, err)
		token := map[int]uint64{} // by tensor-parallel ranks, what the first keeps of a token
		for _, tp := range []int{1, 4, 8} {
			s, err := NewSide(spec, Placement{TP: tp})
			require.NoError(t, err)
			for _, v := range s.Views {
				token[tp] += v.Cell * uint64(v.Count)
			}
		}
		layers := uint64(f.layers)
		mib := uint64(math.Round(float64(8192*token[1]) / (1 << 20)))
		require.Equal(t, []uint64{layers * f.tokenLayer, f.token, f.promptMiB},
			[]uint64{token[1], token[1], mib}, f.name)
		require.Equal(t, []uint64{layers * f.tp4, layers * f.tp8},
			[]uint64{token[4], token[8]}, f.name)
	}
	for _, name := range Names()[len(figures):] { // the others keep states
		spec, err := LookupSpec(name)
		require.NoError(t, err)
		require.True(t, slices.ContainsFunc(spec.Tensors, func(t Tensors) bool {
			return t.Positions > 0
		}))
	}
}

func TestLookupListsNames(t *testing.T) {
	_, err := LookupSpec("gpt-5")
	require.ErrorIs(t, err, ErrGeometry)
	require.ErrorContains(t, err, `"gpt-5"`)
	require.ErrorContains(t, err, strings.Join(Names(), ", "))
}

func TestNewSideRefuses(t *testing.T) {
	part := Cells{"k", "bf16", 8, 256}
	with := func(change func(*Tensors)) []Tensors {
		tensors := Tensors{Layers: []int{0}, Parts: []Cells{part}}
		change(&tensors)
		return []Tensors{tensors}
	}
	good := with(func(*Tensors) {})
	for what, c := range map[string]struct {
		tensors []Tensors
		p       Placement
	}{
		"no tensors":      {nil, Placement{}},
		"no parts":        {with(func(t *Tensors) { t.Parts = nil }), Placement{}},
		"too many parts":  {with(func(t *Tensors) { t.Parts = make([]Cells, 9) }), Placement{}},
		"a part of none":  {with(func(t *Tensors) { t.Parts[0].Bytes = 0 }), Placement{}},
		"a part too big":  {with(func(t *Tensors) { t.Parts[0].Bytes = 1 << 63 }), Placement{}},
		"no heads":        {with(func(t *Tensors) { t.Parts[0].Units = 0 }), Placement{}},
		"a layer too far": {with(func(t *Tensors) { t.Layers[0] = LayersMax }), Placement{}},
		"no such order":   {with(func(t *Tensors) { t.Order = "LPBTT" }), Placement{}},
		"ranks":           {good, Placement{TP: 3}},
		"no ranks":        {good, Placement{TP: -1}},
		"a rank too far":  {good, Placement{TP: 2, Rank: 2}},
		"tokens":          {good, Placement{BlockTokens: -1}},
		"too many tokens": {good, Placement{BlockTokens: TokensMax + 1}},
		"too many blocks": {with(func(t *Tensors) { t.Parts[0].Bytes = 1 << 20 }),
			Placement{BlockTokens: TokensMax, Blocks: math.MaxUint32}},
	} {
		_, err := NewSide(Spec{"m", c.tensors}, c.p)
		require.ErrorIs(t, err, ErrGeometry, what)
	}
}
