// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStageHoldsItsShareOfLayers(t *testing.T) {
	m, err := Lookup("deepseek-r1") // 61 layers
	require.NoError(t, err)
	for pp, layers := range map[int]int{1: 61, 2: 31, 4: 16, 8: 8, 61: 1} {
		s, err := m.Stage(pp)
		if err != nil || s.Layers != layers || s.TokenLayerBytes() != m.TokenLayerBytes() {
			t.Errorf("%d stages: %d layers of %d bytes a token, %v; want %d", pp, s.Layers,
				s.TokenLayerBytes(), err, layers)
		}
		if pp*s.Layers < m.Layers {
			t.Errorf("%d stages of %d layers do not hold the model", pp, s.Layers)
		}
	}
	for _, pp := range []int{0, -1, 62} {
		if _, err := m.Stage(pp); !errors.Is(err, ErrGeometry) {
			t.Errorf("%d stages: %v", pp, err)
		}
	}
}
