// SPDX-License-Identifier: Apache-2.0

package mem_test

import (
	"testing"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

var harness = drivertest.Harness{
	Name: "mem",
	New: func() (driver.Backend, error) {
		return mem.New(mem.Config{BatchesMax: 256})
	},
	Guards: true,
}

func TestMain(m *testing.M) { drivertest.Main(m, harness) }

func TestBackend(t *testing.T) { drivertest.Run(t, harness) }

// TestBackendByAStream: runs are copied by other code, and nothing else differs.
func TestBackendByAStream(t *testing.T) {
	h := harness
	h.Wirings, h.Only = drivertest.Pair, append([]string{"Faults"}, drivertest.Moving...)
	t.Cleanup(copy.StreamAll())
	drivertest.Run(t, h)
}
