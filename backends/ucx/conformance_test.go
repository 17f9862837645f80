// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"os"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// harness reaches peers of this host by UCX's TCP, as those of other hosts, by whatever device UCX
// chooses. An owner's thread of C that stands holds up the proof of all memory, so the suite parks
// none: see TestRevokeWhileAPageDoesNotCome.
var harness = drivertest.Harness{
	Name:   "ucx",
	New:    func() (driver.Backend, error) { return New(Config{}) },
	Guards: true,
}

func TestMain(m *testing.M) {
	if spec, ok := os.LookupEnv(ownerVariable); ok {
		os.Exit(serveOwner(spec))
	}
	drivertest.Main(m, harness)
}

// TestTCP is between processes, and within one what looks at both sides.
func TestTCP(t *testing.T) {
	h := harness
	h.Wirings = drivertest.Processes
	drivertest.Run(t, h)
}

// TestWithinAProcess has backends of several workers.
func TestWithinAProcess(t *testing.T) {
	h := harness
	h.New = func() (driver.Backend, error) { return New(Config{Workers: 2}) }
	h.Wirings = drivertest.Pair
	h.Only = []string{"Tokens", "Churn", "Revoke", "Bounds", "Patterns", "NotKept", "CancelNothing",
		"Connect", "Together", "Renew"}
	drivertest.Run(t, h)
}

func TestSoakTCP(t *testing.T) { drivertest.Run(t, harness) }
