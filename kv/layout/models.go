// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"slices"
	"strings"
)

// specs are the models whose layers are unlike, or whose parts a Model does not tell apart.
// All other presets of Lookup are made into a Spec.
var specs = []func() Spec{gptOSS, deepseekSparse, qwenNext, nemotronH, kimiLinear}

// LookupSpec returns the Spec of a public model: those of Names, and qwen3-next-80b,
// nemotron-h-8b and kimi-linear-48b, whose state layers Lookup does not know. States are in
// the dtype that the models are served with by default. The error for an unknown name lists
// the names there are.
func LookupSpec(name string) (Spec, error) {
	names := Names()
	for _, f := range specs {
		s := f()
		if s.Name == name {
			return s, nil
		}
		if !slices.Contains(names, s.Name) {
			names = append(names, s.Name)
		}
	}
	m, err := Lookup(name)
	if err != nil {
		return Spec{}, noModel(name, names)
	}
	t := Tensors{Layers: layers(m.Layers, func(int) bool { return true })}
	for _, p := range m.Parts {
		units := max(1, p.Heads)
		t.Parts = append(t.Parts, Cells{p.Name, dtypeOf(name), units, p.TokenBytes / uint64(units)})
	}
	return Spec{Name: name, Tensors: []Tensors{t}}, nil
}

func dtypeOf(name string) string {
	if strings.HasSuffix(name, "-fp8") || strings.HasPrefix(name, "deepseek-v3.2") {
		return "fp8"
	}
	return "bf16"
}

// layers returns the numbers below n for which in holds.
func layers(n int, in func(int) bool) []int {
	list := make([]int, 0, n)
	for i := range n {
		if in(i) {
			list = append(list, i)
		}
	}
	return list
}

// attentionCells are K and V of that many heads, in bf16.
func attentionCells(heads int, dim uint64) []Cells {
	return []Cells{{"k", "bf16", heads, 2 * dim}, {"v", "bf16", heads, 2 * dim}}
}

// convCells are the channels of a convolution state in bf16, by position. Each part is
// split over ranks by itself.
func convCells(names []string, channels ...int) []Cells {
	list := make([]Cells, len(names))
	for i, name := range names {
		list[i] = Cells{name, "bf16", channels[i], 2}
	}
	return list
}

// gptOSS: every other layer, from the first on, looks back 128 tokens.
func gptOSS() Spec {
	full := func(l int) bool { return l%2 == 1 }
	return Spec{"gpt-oss-120b", []Tensors{
		{Layers: layers(36, func(l int) bool { return !full(l) }), Parts: attentionCells(8, 64),
			Window: 128},
		{Layers: layers(36, full), Parts: attentionCells(8, 64)},
	}}
}

// deepseekSparse: beside the latent entry, an indexer whose blocks hold all keys and then
// all scales.
func deepseekSparse() Spec {
	all := layers(61, func(int) bool { return true })
	return Spec{"deepseek-v3.2", []Tensors{
		{Layers: all, Parts: []Cells{{"latent", "fp8", 1, 656}}},
		{Layers: slices.Clone(all), Order: VLLMFusedNHD,
			Parts: []Cells{{"key", "fp8", 1, 128}, {"scale", "fp32", 1, 4}}},
	}}
}

// qwenNext: each fourth layer is attention, the others gated delta nets.
func qwenNext() Spec {
	full := func(l int) bool { return l%4 == 3 }
	gdn := layers(48, func(l int) bool { return !full(l) })
	return Spec{"qwen3-next-80b", []Tensors{
		{Layers: layers(48, full), Parts: attentionCells(2, 256)},
		{Layers: gdn, Positions: 3,
			Parts: convCells([]string{"conv.q", "conv.k", "conv.v"}, 2048, 2048, 4096)},
		{Layers: gdn, Positions: 1, Parts: []Cells{{"state", "bf16", 32, 2 * 128 * 128}}},
	}}
}

// nemotronH: Mamba-2 with four attention layers.
func nemotronH() Spec {
	// "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-M-", M: Mamba, *: attention, -: MLP
	const pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-M-"
	mamba := layers(len(pattern), func(l int) bool { return pattern[l] == 'M' })
	return Spec{"nemotron-h-8b", []Tensors{
		{Layers: layers(len(pattern), func(l int) bool { return pattern[l] == '*' }),
			Parts: attentionCells(8, 128)},
		{Layers: mamba, Positions: 3,
			Parts: convCells([]string{"conv.x", "conv.b", "conv.c"}, 8192, 1024, 1024)},
		{Layers: mamba, Positions: 1, Parts: []Cells{{"state", "bf16", 128, 2 * 64 * 128}}},
	}}
}

// kimiLinear: seven MLA layers among twenty of Kimi delta attention.
func kimiLinear() Spec {
	full := func(l int) bool { return l%4 == 3 || l == 26 }
	kda := layers(27, func(l int) bool { return !full(l) })
	return Spec{"kimi-linear-48b", []Tensors{
		{Layers: layers(27, full), Parts: []Cells{{"latent", "bf16", 1, 1152}}},
		{Layers: kda, Positions: 3,
			Parts: convCells([]string{"conv.q", "conv.k", "conv.v"}, 4096, 4096, 4096)},
		{Layers: kda, Positions: 1, Parts: []Cells{{"state", "fp32", 32, 4 * 128 * 128}}},
	}}
}
