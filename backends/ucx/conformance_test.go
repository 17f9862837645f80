// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"os"
	"testing"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// harness reaches peers of this host by UCX's TCP, as those of other hosts, by whatever device UCX
// chooses. An owner's thread of C
// that stands holds up a fence whatever its context says, so the suite parks none: see
// TestFenceWhileALandingStands of csrc/ucx.
var harness = drivertest.Harness{
	Name:   "ucx",
	New:    func() (driver.Backend, error) { return New(Config{}) },
	Kept:   ucp.Kept,
	Guards: true,
}

func TestMain(m *testing.M) {
	if spec, ok := os.LookupEnv(ownerVariable); ok {
		os.Exit(serveOwner(spec))
	}
	drivertest.Main(m, harness)
}

// TestTCP: within one process it is the code of the other wirings.
func TestTCP(t *testing.T) {
	h := harness
	h.Wirings = drivertest.Processes
	drivertest.Run(t, h)
}

func TestSoakTCP(t *testing.T) { drivertest.Run(t, harness) }

func BenchmarkTCP(b *testing.B) { drivertest.Benchmark(b, harness) }
