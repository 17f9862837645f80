// SPDX-License-Identifier: Apache-2.0

package backendtest

import (
	"testing"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
)

var (
	memHarness = Harness{
		Name: "mem",
		New:  func() (backends.Backend, error) { return mem.New(mem.Config{}) },
	}
	shmHarness = Harness{
		Name: "shm",
		New:  func() (backends.Backend, error) { return shm.New(shm.Config{}) },
	}
)

func TestMain(m *testing.M) { Main(m, memHarness, shmHarness, landlordHarness) }
