// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

var harness = drivertest.Harness{New: func() (driver.Backend, error) { return New() }, Guards: true}

func TestMain(m *testing.M) { drivertest.Main(m, harness) }

func TestBackend(t *testing.T) { drivertest.Run(t, harness) }
