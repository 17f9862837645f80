// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
)

var (
	memHarness = Harness{
		Name:   "mem",
		New:    func() (driver.Backend, error) { return mem.New(mem.Config{}) },
		Guards: true,
	}
	shmHarness = Harness{
		Name:  "shm",
		New:   func() (driver.Backend, error) { return shm.New(shm.Config{}) },
		Grace: 50 * time.Millisecond,
	}
)

func TestMain(m *testing.M) { Main(m, memHarness, shmHarness, parkedHarness) }
