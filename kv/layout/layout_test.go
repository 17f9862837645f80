// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// figures are the published ones, computed elsewhere: bytes a token in a layer
// and in all, a block of 16 and of 64 tokens in a layer, a token in a layer at
// TP4 and TP8, a prompt of 8,192 tokens in MiB, rounded.
var figures = []struct {
	name                                                     string
	layers                                                   int
	tokenLayer, token, block16, block64, tp4, tp8, promptMiB uint64
}{
	{"llama3.1-8b", 32, 4096, 131072, 65536, 262144, 1024, 512, 1024},
	{"llama3.1-70b", 80, 4096, 327680, 65536, 262144, 1024, 512, 2560},
	{"llama3.1-405b", 126, 4096, 516096, 65536, 262144, 1024, 512, 4032},
	{"qwen3-8b", 36, 4096, 147456, 65536, 262144, 1024, 512, 1152},
	{"qwen3-32b", 64, 4096, 262144, 65536, 262144, 1024, 512, 2048},
	{"qwen3-30b-a3b", 48, 2048, 98304, 32768, 131072, 512, 512, 768},
	{"qwen3-235b-a22b", 94, 2048, 192512, 32768, 131072, 512, 512, 1504},
	{"gpt-oss-20b", 24, 2048, 49152, 32768, 131072, 512, 256, 384},
	{"gpt-oss-120b", 36, 2048, 73728, 32768, 131072, 512, 256, 576},
	{"deepseek-v3", 61, 1152, 70272, 18432, 73728, 1152, 1152, 549},
	{"deepseek-r1", 61, 1152, 70272, 18432, 73728, 1152, 1152, 549},
	{"deepseek-v3-fp8", 61, 576, 35136, 9216, 36864, 576, 576, 275},
	{"deepseek-r1-fp8", 61, 576, 35136, 9216, 36864, 576, 576, 275},
	{"deepseek-v3.2-latent", 61, 656, 40016, 10496, 41984, 656, 656, 313},
	{"deepseek-v3.2-indexer", 61, 132, 8052, 2112, 8448, 132, 132, 63},
	{"deepseek-v3.2", 61, 788, 48068, 12608, 50432, 788, 788, 376},
}

func TestPresetsWeighWhatIsPublished(t *testing.T) {
	if len(figures) != len(Names()) {
		t.Errorf("%d presets, figures for %d", len(Names()), len(figures))
	}
	for _, f := range figures {
		m, err := Lookup(f.name)
		require.NoError(t, err)
		g16, g64 := geometry(t, m, Options{}), geometry(t, m, Options{BlockTokens: 64})
		tp4, tp8 := geometry(t, m, Options{TP: 4}), geometry(t, m, Options{TP: 8})
		mib := uint64(math.Round(float64(8192*m.TokenBytes()) / (1 << 20)))
		for _, c := range []struct {
			what      string
			got, want uint64
		}{
			{"layers", uint64(m.Layers), uint64(f.layers)},
			{"a token in a layer", m.TokenLayerBytes(), f.tokenLayer},
			{"a token", m.TokenBytes(), f.token},
			{"a layer of 16 tokens", g16.LayerBytes(), f.block16},
			{"a layer of 64 tokens", g64.LayerBytes(), f.block64},
			{"a token in a layer at TP4", tp4.LayerBytes() / 16, f.tp4},
			{"a token in a layer at TP8", tp8.LayerBytes() / 16, f.tp8},
			{"a block of 16 tokens", g16.BlockBytes(), 16 * f.token},
			{"MiB of 8,192 tokens", mib, f.promptMiB},
		} {
			if c.got != c.want {
				t.Errorf("%s: %s weighs %d, want %d", f.name, c.what, c.got, c.want)
			}
		}
	}
}

func TestLookupListsNames(t *testing.T) {
	_, err := Lookup("gpt-5")
	if !errors.Is(err, ErrGeometry) {
		t.Fatalf("error %v is no ErrGeometry", err)
	}
	for _, name := range append(Names(), `"gpt-5"`) {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("error %q does not name %s", err, name)
		}
	}
}

func TestLookupGivesACopy(t *testing.T) {
	m, _ := Lookup("deepseek-v3.2")
	m.Parts[0].TokenBytes = 1
	again, _ := Lookup("deepseek-v3.2")
	if again.Parts[0].TokenBytes != 656 {
		t.Error("changing a looked-up model changed the preset")
	}
}

func geometry(t *testing.T, m Model, o Options) *Geometry {
	t.Helper()
	g, err := New(m, o)
	require.NoError(t, err)
	return g
}
