// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

func TestRegions(t *testing.T) {
	eng, err := engine.Open(engine.Config{Name: "regions", Backends: memBackend(t)})
	require.NoError(t, err)
	defer eng.Close()
	list, err := Regions(eng, "mem", 50, 20)
	if err != nil || len(list) != 2 {
		t.Fatalf("%v, %v", list, err)
	}
	for i, op := range []string{"register", "describe"} {
		if r := list[i]; r.Op != op || r.P50us <= 0 || r.OpsPerS <= 0 ||
			r.Batch != []int{50, 20}[i] {
			t.Errorf("%+v", r)
		}
	}
	if weight := list[1].Extra["desc-bytes"]; weight < 20*16 {
		t.Errorf("a description of 20 regions weighs %v bytes", weight)
	}
	if d, err := eng.Describe(); err != nil || float64(len(d)) > list[1].Extra["desc-bytes"] {
		t.Errorf("%d bytes describe what is left, %v", len(d), err)
	}
}
