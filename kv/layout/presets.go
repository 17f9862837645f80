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
