// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"slices"
	"strings"
)

// The presets: public model shapes.
var presets = []Model{
	attention("llama3.1-8b", 32, 8, 128),
	attention("llama3.1-70b", 80, 8, 128),
	attention("llama3.1-405b", 126, 8, 128),
	attention("qwen3-8b", 36, 8, 128),
	attention("qwen3-32b", 64, 8, 128),
	attention("qwen3-30b-a3b", 48, 4, 128),
	attention("qwen3-235b-a22b", 94, 4, 128),
	attention("gpt-oss-20b", 24, 8, 64),
	// half of the layers are windowed; the pool holds them all the same
	attention("gpt-oss-120b", 36, 8, 64),
	deepseek("deepseek-v3", latentBF16),
	deepseek("deepseek-v3-fp8", latentFP8),
	deepseek("deepseek-r1", latentBF16),
	deepseek("deepseek-r1-fp8", latentFP8),
	deepseek("deepseek-v3.2", latentSparse, indexerKey),
	deepseek("deepseek-v3.2-latent", latentSparse),
	deepseek("deepseek-v3.2-indexer", indexerKey),
}

// The parts of the DeepSeek models. One latent entry serves all heads, so that
// tensor parallelism replicates it.
var (
	latentBF16 = Part{Name: "latent", TokenBytes: 2 * (512 + 64)} // latent and rope, bf16
	// the same in fp8, scales kept elsewhere
	latentFP8 = Part{Name: "latent", TokenBytes: 512 + 64}
	// fp8 latent, four fp32 scales, bf16 rope
	latentSparse = Part{Name: "latent", TokenBytes: 512 + 4*4 + 64*2}
	indexerKey   = Part{Name: "indexer", TokenBytes: 128 + 4} // fp8 key, one fp32 scale
	bf16Bytes    = uint64(2)
)

func attention(name string, layers, heads int, headDim uint64) Model {
	n := uint64(heads) * headDim * bf16Bytes
	return Model{Name: name, Layers: layers, Parts: []Part{
		{Name: "k", TokenBytes: n, Heads: heads},
		{Name: "v", TokenBytes: n, Heads: heads},
	}}
}

func deepseek(name string, parts ...Part) Model {
	return Model{Name: name, Layers: 61, Parts: parts}
}

// Lookup returns the preset of that name. The error for an unknown one lists
// the names there are.
func Lookup(name string) (Model, error) {
	for _, m := range presets {
		if m.Name == name {
			m.Parts = slices.Clone(m.Parts)
			return m, nil
		}
	}
	return Model{}, noModel(name, Names())
}

func noModel(name string, names []string) error {
	return fmt.Errorf("no model %q; there are %s: %w", name, strings.Join(names, ", "),
		ErrGeometry)
}

// Names lists the presets.
func Names() []string {
	names := make([]string, len(presets))
	for i, m := range presets {
		names[i] = m.Name
	}
	return names
}

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
