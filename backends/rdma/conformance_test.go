// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// fakeHarness tests all that lies above C, without devices.
var fakeHarness = drivertest.Harness{
	Name:    "rdma-fake",
	New:     func() (driver.Backend, error) { return newFake(Config{}) },
	Wirings: drivertest.Self | drivertest.Pair,
	Without: []string{"Faults"}, // NICs hold the pages
}

func TestMain(m *testing.M) { drivertest.Main(m, fakeHarness, realHarness) }

func TestSoakFake(t *testing.T) { drivertest.Run(t, fakeHarness) }
