// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/backendtest"
)

// fakeHarness tests all that lies above C, without devices.
var fakeHarness = backendtest.Harness{
	Name:    "rdma-fake",
	New:     func() (backends.Backend, error) { return newFake(Config{}) },
	Wirings: backendtest.Self | backendtest.Pair,
}

func TestMain(m *testing.M) { backendtest.Main(m, fakeHarness, realHarness) }

func TestFake(t *testing.T) { backendtest.Run(t, fakeHarness) }
