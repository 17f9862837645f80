// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"slices"
	"strings"
)

// models returns the public models, those with state layers last.
func models() []Spec {
	return []Spec{
		attention("llama3.1-8b", 32, 8, 128),
		attention("llama3.1-70b", 80, 8, 128),
		attention("llama3.1-405b", 126, 8, 128),
		attention("qwen3-8b", 36, 8, 128),
		attention("qwen3-32b", 64, 8, 128),
		attention("qwen3-30b-a3b", 48, 4, 128),
		attention("qwen3-235b-a22b", 94, 4, 128),
		attention("gpt-oss-20b", 24, 8, 64),
		gptOSS(),
		deepseek("deepseek-v3", latent),
		deepseek("deepseek-v3-fp8", latentFP8),
		deepseek("deepseek-r1", latent),
		deepseek("deepseek-r1-fp8", latentFP8),
		deepseekSparse(),
		deepseek("deepseek-v3.2-latent", latentSparse),
		deepseek("deepseek-v3.2-indexer", Cells{"indexer", "fp8", 1, 128 + 4}),
		qwenNext(),
		nemotronH(),
		kimiLinear(),
	}
}

// LookupSpec returns the Spec of a public model. States are in the dtype that the models are
// served with by default. The error for an unknown name, an ErrGeometry, lists the names there are.
func LookupSpec(name string) (Spec, error) {
	list := models()
	if i := slices.IndexFunc(list, func(s Spec) bool { return s.Name == name }); i >= 0 {
		return list[i], nil
	}
	return Spec{}, fmt.Errorf("no model %q; there are %s: %w", name, strings.Join(Names(), ", "),
		ErrGeometry)
}

// Names lists the models of LookupSpec.
func Names() []string {
	var names []string
	for _, s := range models() {
		names = append(names, s.Name)
	}
	return names
}

// The entries of the DeepSeek models. One serves all heads, so that every tensor-parallel rank
// holds it.
var (
	latent    = Cells{"latent", "bf16", 1, 2 * (512 + 64)} // latent and rope
	latentFP8 = Cells{"latent", "fp8", 1, 512 + 64}        // scales kept elsewhere
	// fp8 latent, four fp32 scales, bf16 rope
	latentSparse = Cells{"latent", "fp8", 1, 512 + 4*4 + 64*2}
)

func attention(name string, depth, heads int, dim uint64) Spec {
	return Spec{name, []Tensors{{Layers: all(depth), Parts: attentionCells(heads, dim)}}}
}

func deepseek(name string, entry Cells) Spec {
	return Spec{name, []Tensors{{Layers: all(61), Parts: []Cells{entry}}}}
}

func all(n int) []int { return layers(n, func(int) bool { return true }) }

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
	return Spec{"deepseek-v3.2", []Tensors{
		{Layers: all(61), Parts: []Cells{latentSparse}},
		{Layers: all(61), Order: VLLMFusedNHD,
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
	// M: Mamba, *: attention, -: MLP
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
