// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testpoint"
)

var sharedHarness = drivertest.Harness{
	Name: "shm",
	New:  func() (driver.Backend, error) { return New(Config{Workers: 2}) },
	Park: parkAt, Disturb: breakSockets, Grace: 50 * time.Millisecond,
	Spots: []string{"announced", "generation", "epoch", "mapped", "copied", "left"},
}

func parkAt(name string, f func()) { testpoint.First("shm: "+name, f) }

// breakSockets ends the control sockets of all peers. The writers have the memory still.
func breakSockets(b driver.Backend, _ *rand.Rand) (mend func()) {
	for _, c := range *b.(*Backend).inbound.Load() {
		c.hangUp()
	}
	return func() {}
}

// foreignHarness is the same backend over memory that only its process has.
var foreignHarness = drivertest.Harness{
	Name:    "shm-foreign",
	New:     func() (driver.Backend, error) { return New(Config{Workers: 2}) },
	Local:   drivertest.ForeignMemory,
	Remote:  drivertest.ForeignMemory,
	Wirings: drivertest.Processes, // within one process it is the same code
	Park:    parkAt, Disturb: breakSockets, Grace: 50 * time.Millisecond,
	Spots: []string{"announced", "epoch", "gate", "passing", "copied"},
}

func TestMain(m *testing.M) {
	if kind, ok := os.LookupEnv(ownerVariable); ok {
		switch kind {
		case "inherited":
			os.Exit(serveInherited())
		}
		os.Exit(serveOwner(kind))
	}
	drivertest.Main(m, sharedHarness, foreignHarness)
}

func TestBackend(t *testing.T) { drivertest.Run(t, sharedHarness) }

func TestBackendForeign(t *testing.T) { drivertest.Run(t, foreignHarness) }
