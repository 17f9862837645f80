// SPDX-License-Identifier: Apache-2.0

package layout

import "fmt"

// Stage returns what the fullest of pp pipeline stages holds of the model: its layers, divided as
// evenly as they can be, rounded up.
func (m Model) Stage(pp int) (Model, error) {
	if pp < 1 || pp > m.Layers {
		return Model{}, fmt.Errorf("model %q: %d pipeline stages, want 1 to its %d layers: %w",
			m.Name, pp, m.Layers, ErrGeometry)
	}
	m.Layers = (m.Layers + pp - 1) / pp
	return m, nil
}
